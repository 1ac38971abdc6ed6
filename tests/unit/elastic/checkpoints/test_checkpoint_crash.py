"""The machine stops at any point of a save, by one worker or by several at once: whatever the disk kept, a good
checkpoint is chosen and none is torn.

Every call that changes the disk is recorded. An image is what a crash after one of them leaves if only what was
fsynced is kept: of a file its content at its last fsync, of a directory its names at its last fsync. A second kind of
image keeps everything that was done, as a crash of the process does; a third keeps names without contents, as file
systems may.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.checkpoints import storage
from elastic.checkpoints.naming import MANIFEST, EntryName, part_note
from elastic.checkpoints.select import Found
from elastic.checkpoints.series import Series
from elastic.checkpoints.storage import LocalStorage
from tests.unit.elastic.checkpoints.test_checkpoints import Configure, configure, settle
from tests.unit.jobs import Setup, make_job, set_up, train
from tests.unit.worlds import FakeMember, World

__all__ = ["configure"]


@dataclass
class Node:
    """A file or a directory, as it is and as the disk has it."""

    content: bytes | None = None
    """None: a directory."""
    durable: bytes = b""
    names: dict[str, Node] = field(default_factory=dict)
    durable_names: dict[str, Node] = field(default_factory=dict)


@dataclass
class Disk:
    """Does what storage.py asks of `os`, one call after the other, and remembers it."""

    root: str
    tree: Node = field(default_factory=Node)
    images: list[tuple[str, Node]] = field(default_factory=list)
    opened: dict[int, Node] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def node(self, path: str) -> Node:
        node = self.tree
        for part in Path(path).relative_to(self.root).parts:
            node = node.names[part]
        return node

    def parent(self, path: str) -> tuple[Node, str]:
        return self.node(os.path.dirname(path)), os.path.basename(path)

    def took(self, what: str) -> None:
        self.images.append((what, deepcopy(self.tree)))

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        descriptor = os.open(path, flags, mode)
        if not flags & os.O_DIRECTORY:
            parent, name = self.parent(path)
            parent.names[name] = Node(b"")
            self.took(f"create {path}")
        self.opened[descriptor] = self.node(path)
        return descriptor

    def write(self, descriptor: int, data: bytes) -> int:
        written = os.write(descriptor, data)
        node = self.opened[descriptor]
        assert node.content is not None
        node.content += bytes(data[:written])
        self.took(f"write {written}")
        return written

    def fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)
        node = self.opened[descriptor]
        if node.content is None:
            node.durable_names = dict(node.names)
        else:
            node.durable = node.content
        self.took("fsync")

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new)
        parent, name = self.parent(old)
        node = parent.names.pop(name)
        parent, name = self.parent(new)
        parent.names[name] = node
        self.took(f"rename {new}")

    def unlink(self, path: str) -> None:
        os.unlink(path)
        parent, name = self.parent(path)
        del parent.names[name]
        self.took(f"unlink {path}")

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(path, mode)
        parent, name = self.parent(path)
        parent.names[name] = Node()
        self.took(f"mkdir {path}")

    def rmdir(self, path: str) -> None:
        os.rmdir(path)
        parent, name = self.parent(path)
        del parent.names[name]
        self.took(f"rmdir {path}")


def only_fsynced(node: Node) -> dict[str, Any]:
    return _image(node, lambda n: n.durable_names, lambda n: n.durable)


def everything(node: Node) -> dict[str, Any]:
    return _image(node, lambda n: n.names, lambda n: n.content or b"")


def names_without_contents(node: Node) -> dict[str, Any]:
    """The journal of the file system was written, the data was not."""
    return _image(node, lambda n: n.names, lambda n: n.durable)


def _image(node: Node, names: Callable[[Node], dict[str, Node]], content: Callable[[Node], bytes]) -> dict[str, Any]:
    return {
        name: _image(child, names, content) if child.content is None else content(child)
        for name, child in names(node).items()
    }


def lay(image: dict[str, Any], directory: Path) -> None:
    directory.mkdir()
    for name, content in image.items():
        if isinstance(content, dict):
            lay(content, directory / name)
        else:
            (directory / name).write_bytes(content)


KINDS = (only_fsynced, everything, names_without_contents)


@dataclass
class Crash:
    """After the first `number` + 1 calls to the disk, what it kept and what a reader finds there."""

    number: int
    what: str
    kind: Callable[[Node], dict[str, Any]]
    image: dict[str, Any]
    series: Series
    found: Found | None
    skipped: Sequence[Found]

    @property
    def step(self) -> int | None:
        return self.found.name.step if self.found is not None else None


def crashes(disk: Disk, directory: Path) -> Iterator[Crash]:
    """One after each call, with an image of each kind. Equal images are laid and read once."""
    read: dict[bytes, tuple[Series, Found | None, Sequence[Found]]] = {}
    for number, (what, tree) in enumerate(disk.images):
        for kind in KINDS:
            image = kind(tree)
            content = pickle.dumps(image)
            if content not in read:
                place = directory / f"image-{len(read)}"
                lay(image, place)
                series = Series(LocalStorage(str(place / "checkpoints")))
                read[content] = (series, *series.newest("feed"))
            yield Crash(number, what, kind, image, *read[content])


def one_at_a_time(disk: Disk, call: Callable[..., Any]) -> Callable[..., Any]:
    def locked(*arguments: Any) -> Any:
        with disk.lock:
            return call(*arguments)

    return locked


@contextmanager
def recorded(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """storage.py meets the recording disk in the place of `os`."""
    disk = Disk(str(root))
    names = ("open", "write", "fsync", "rename", "unlink", "mkdir", "rmdir")
    own = {name: one_at_a_time(disk, getattr(disk, name)) for name in names}
    rest = {name: getattr(os, name) for name in dir(os) if not name.startswith("__") and name not in own}
    with monkeypatch.context() as patch:
        patch.setattr(storage, "os", SimpleNamespace(**rest, **own))
        yield disk


def test_no_crash_tears_a_checkpoint_or_loses_the_one_before(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints of steps 3, 6 and 9, of which the last one stays; a crash after each call to the disk."""
    root = tmp_path / "disk"
    root.mkdir()
    configure(root=str(root / "checkpoints"), every="3 steps", keep="last 1")

    def body(setup: Setup) -> None:
        settle(setup)
        published.append(len(disk.images))

    published: list[int] = []
    with recorded(root, monkeypatch) as disk:
        train(set_up(make_job()), epochs=4, body=body)
    assert len(disk.images) > 50
    seen: set[int | None] = set()
    for crash in crashes(disk, tmp_path):
        complete = [3 * index for index, end in enumerate(published) if crash.number >= end - 1 and index]
        if crash.kind is only_fsynced:
            seen.add(crash.step)
        assert all(entry.unfinished for entry in crash.skipped), crash
        assert not complete or (crash.step is not None and crash.step >= complete[-1]), crash
    assert seen == {None, 3, 6, 9}


@pytest.mark.parametrize(("workers", "pointed"), [(3, True), (2, False)])
def test_no_crash_tears_what_several_members_write_or_loses_the_one_before(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, pointed: bool
) -> None:
    """The same of parts that come from several members, with the manifest by whoever finds them all. pointed: whether
    the pointer came to the new one, so that the one before goes; else the crash is between manifest and pointer."""
    root = tmp_path / "disk"
    root.mkdir()
    configure(root=str(root / "checkpoints"), every="3 steps", keep="last 1")
    durable_from: dict[int, int] = {}

    def note(self: FakeMember, event: str, **fields: Any) -> None:
        if event == "checkpoint_complete":
            with disk.lock:
                durable_from.setdefault(fields["step"], len(disk.images))

    def point(self: FakeMember, series: str, name: EntryName, answer: Callable[[bool], None]) -> None:
        answer(pointed)

    monkeypatch.setattr(FakeMember, "note", note)
    monkeypatch.setattr(FakeMember, "point", point)
    world = World(workers)
    with recorded(root, monkeypatch) as disk:
        world.run(lambda session: train(set_up(make_job(session)), epochs=4, body=settle))
        assert world.errors == {}
    assert sorted(durable_from) == [3, 6, 9]
    stages: set[tuple[int, bool]] = set()
    for crash in crashes(disk, tmp_path):
        durable = {step for step, since in durable_from.items() if crash.number >= since}
        assert all(entry.unfinished for entry in crash.skipped), crash
        assert not durable or (crash.step is not None and crash.step >= max(durable)), crash
        assert crash.found is None or crash.found.manifest is None or crash.found.manifest.world == workers
        if crash.kind is everything and crash.step is None:
            stages |= {stage(entry, workers) for entry in entries(crash.image).values()}
        assert pointed or {name.step for name in crash.series.names()} >= durable, crash
    assert stages >= {(parts, False) for parts in range(1, workers + 1)}, "no crash came between two parts"


def entries(image: dict[str, Any]) -> dict[str, Any]:
    return dict(image.get("checkpoints", {}).get("_periodic", {}))


def stage(entry: dict[str, Any], workers: int) -> tuple[int, bool]:
    """How many parts are there, and whether the manifest is."""
    return sum(part_note(rank, workers) in entry for rank in range(workers)), MANIFEST in entry


def test_a_directory_that_a_worker_made_and_was_killed_is_durable_with_the_next_file_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    with recorded(root, monkeypatch) as disk:
        disk.mkdir(str(root / "series"), 0o755)
        storage.put(LocalStorage(str(root)), "series/entry/manifest.json", b"{}")
    assert only_fsynced(disk.images[-1][1]) == {"series": {"entry": {"manifest.json": b"{}"}}}
