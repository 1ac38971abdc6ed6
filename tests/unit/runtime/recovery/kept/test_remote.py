"""Segments on another machine: mirrored, read and copied over a connection, whole or not at all."""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from elastic.errors import CheckpointCorrupt
from runtime.allreduce.ring.tls import PLAIN
from runtime.recovery.kept import remote
from runtime.recovery.kept.choice import HeldSegment, RoundNumber
from runtime.recovery.kept.place import KeptPlace, directory_of
from runtime.recovery.kept.remote import CopyDial, KeptServer, OtherMachines, RemoteSegment, SegmentMirror, pull
from runtime.recovery.kept.segment import Header, Segment, SegmentWriter, read_header, segments_in
from runtime.recovery.transfer.connection import CopyConnection, CopyFailed

ROUND = RoundNumber(0, 3)
TABLE = b'{"plain": {}, "tensors": []}'
DIAL = CopyDial("job", "a.0.0", 3, "plan", "token", {"b.0.0": ("10.0.0.2", 4000)})


def held(step: int) -> HeldSegment:
    return HeldSegment(step, ROUND, 0, 2, 4)


def body(step: int) -> bytes:
    return bytes((step + i) % 251 for i in range(10_000))


def written(memory: Path, *steps: int) -> list[tuple[str, Header, memoryview]]:
    """Segments of a script on this machine: file, header and body of each."""
    writer, found = SegmentWriter(KeptPlace(str(memory), ROUND).directory(), 0, 2), []
    for step in steps:
        file = writer.oldest()
        place = file.begin(10_000)
        place[:] = body(step)
        found.append((file.name, file.finish(held(step), place, TABLE), place))
    return found


def here(memory: Path) -> dict[int, Header]:
    """Step -> header, of the segments that are right."""
    found = {}
    for path in segments_in(directory_of(str(memory), ROUND)):
        if (header := read_header(path)) is not None:
            segment = Segment(path, header)
            segment.check()
            assert bytes(segment.body) == body(header.step) and segment.table_bytes() == TABLE
            found[header.step] = header
    return found


@contextmanager
def asking(server: KeptServer) -> Iterator[CopyConnection]:
    """A connection to a worker with that memory, which answers until it is closed."""
    ours, theirs = socket.socketpair()

    def serve() -> None:
        with closing(CopyConnection(theirs)) as connection:
            try:
                while True:
                    request, _ = connection.receive()
                    if not server.answer(connection, request):
                        connection.send({"refused": "unknown"})
            except CopyFailed:
                return

    thread = threading.Thread(target=serve)
    thread.start()
    with closing(CopyConnection(ours)) as connection:
        yield connection
    thread.join()


@pytest.fixture
def machines(tmp_path: Path) -> tuple[Path, Path]:
    """The memory of two machines."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    return tmp_path / "here", tmp_path / "there"


def test_each_step_is_mirrored_under_its_name(machines: tuple[Path, Path]) -> None:
    mine, theirs = machines
    with asking(KeptServer(str(theirs))) as connection:
        mirror = SegmentMirror(connection, ROUND)
        for name, header, place in written(mine, 1, 2, 3):
            mirror.send(name, header, place, TABLE)
    assert here(theirs) == here(mine) and sorted(here(theirs)) == [1, 2, 3]
    assert sorted(path.name for path in segments_in(directory_of(str(theirs), ROUND))) == ["0.2.0", "0.2.1", "0.2.2"]


def test_a_script_that_is_killed_while_it_mirrors_leaves_no_half(machines: tuple[Path, Path]) -> None:
    mine, theirs = machines
    segments = written(mine, 1, 2)
    with asking(KeptServer(str(theirs))) as connection:
        mirror = SegmentMirror(connection, ROUND)
        mirror.send(segments[0][0], segments[0][1], segments[0][2], TABLE)
        said = segments[1][1].pack().hex()
        connection.send({"want": "kept_write", "round": str(ROUND), "file": segments[0][0], "header": said})
    assert here(theirs) == {}, "step 1 made way for step 2, which did not come"


@pytest.mark.parametrize("memory", ["", "gone"])
def test_a_machine_without_room_says_so(machines: tuple[Path, Path], memory: str) -> None:
    mine, theirs = machines
    ((name, header, place),) = written(mine, 1)
    server = KeptServer(str(theirs / memory) if memory else "")
    with (
        asking(server) as connection,
        pytest.raises(CopyFailed, match="cannot be written" if memory else "has no directory"),
    ):
        SegmentMirror(connection, ROUND).send(name, header, place, TABLE)


def test_bits_that_have_changed_before_they_are_sent_are_not_mirrored(machines: tuple[Path, Path]) -> None:
    mine, theirs = machines
    ((name, header, place),) = written(mine, 1)
    place[77] ^= 1
    with asking(KeptServer(str(theirs))) as connection, pytest.raises(CopyFailed, match="the checksum of the copy is"):
        SegmentMirror(connection, ROUND).send(name, header, place, TABLE)
    assert here(theirs) == {}


def test_parts_of_a_segment_are_read_from_there(machines: tuple[Path, Path]) -> None:
    _, theirs = machines
    written(theirs, 1, 2)
    with asking(KeptServer(str(theirs))) as connection:
        segment = RemoteSegment(connection, held(2))
        assert segment.header == here(theirs)[2] and segment.table() == json.loads(TABLE)
        assert bytes(segment.read(100, 50)) == body(2)[100:150]
        assert bytes(segment.read(9_999, 1)) == body(2)[9_999:]
        assert bytes(segment.read(5, 0)) == b""
        with pytest.raises(CopyFailed, match="not here any more"):
            segment.read(9_999, 2)
        with pytest.raises(CopyFailed, match="this segment is not here"):
            RemoteSegment(connection, held(3))


def test_a_segment_that_was_written_anew_is_not_read(machines: tuple[Path, Path]) -> None:
    _, theirs = machines
    written(theirs, 1)
    with asking(KeptServer(str(theirs))) as connection:
        segment = RemoteSegment(connection, held(1))
        for path in segments_in(directory_of(str(theirs), ROUND)):
            path.unlink()
        with pytest.raises(CopyFailed, match="not here any more"):
            segment.read(0, 10)


def test_a_worker_copies_what_another_machine_alone_has(
    machines: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs = machines
    written(theirs, 1, 2)
    with asking(KeptServer(str(theirs))) as connection:
        monkeypatch.setattr(remote, "open_copy", lambda peer, **said: connection)
        monkeypatch.setattr(remote, "PIECE_BYTES", len(body(2)) // 2 - 1)
        pull(DIAL, "b.0.0", PLAIN, held(2), str(mine))
    assert here(mine) == {2: here(theirs)[2]}


@pytest.mark.parametrize(
    "request_",
    [
        {"want": "kept_write", "round": "../x", "file": "0.2.0"},
        {"want": "kept_write", "round": "0.3", "file": "../0"},
        {"want": "kept_write", "round": "0.3", "file": "0.2.0", "header": "00"},
        {"want": "kept_table", "segment": ["x"]},
    ],
)
def test_what_is_malformed_ends_the_connection(machines: tuple[Path, Path], request_: dict[str, Any]) -> None:
    mine, theirs = machines
    ((_, header, _),) = written(mine, 1)
    with asking(KeptServer(str(theirs))) as connection:
        connection.send({"header": header.pack().hex(), **request_})
        with pytest.raises(CopyFailed):
            connection.receive()
    assert os.listdir(theirs) == []


def test_other_requests_are_left_to_others() -> None:
    assert not KeptServer("").answer(cast(Any, None), {"want": "meta"})


def test_a_worker_with_too_many_callers_is_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    answers: list[Callable[[], CopyConnection]] = [lambda: _refuse("256 copies are running here already")] * 2
    answers.append(lambda: CopyConnection(ours))
    monkeypatch.setattr(remote, "open_copy", lambda peer, **said: answers.pop(0)())
    monkeypatch.setattr(remote, "BUSY_POLL_S", 0.0)
    with closing(DIAL.open("b.0.0", PLAIN)), closing(theirs):
        assert answers == []
    answers.append(lambda: _refuse("it is gone"))
    with pytest.raises(CopyFailed, match="it is gone"):
        DIAL.open("b.0.0", PLAIN)


def _refuse(because: str) -> CopyConnection:
    raise CopyFailed(because)


def test_what_a_script_is_told_of_other_machines_is_for_its_user_only(tmp_path: Path) -> None:
    told = OtherMachines(DIAL, ("b.0.0",), {1: "b.0.0", 3: "b.0.0"}, 4)
    told.write(tmp_path / "others.0")
    assert OtherMachines.read(str(tmp_path / "others.0")) == told
    assert stat.S_IMODE((tmp_path / "others.0").stat().st_mode) == 0o600
    assert OtherMachines.read("") is None


def test_a_copy_with_another_checksum_is_no_segment(tmp_path: Path) -> None:
    writer = SegmentWriter(KeptPlace(str(tmp_path), ROUND).directory(), 0, 2)
    file = writer.oldest()
    with pytest.raises(CheckpointCorrupt, match="the checksum of the copy is"):
        file.finish(held(1), file.begin(10), TABLE, 12345)
    assert here(tmp_path) == {}


def test_a_worker_that_was_lost_meanwhile_is_not_called(tmp_path: Path) -> None:
    """Another generation has begun between the decision to copy and the copy."""
    with pytest.raises(CopyFailed, match=r"c\.0\.0 is no member of generation 3"):
        pull(DIAL, "c.0.0", PLAIN, held(7), str(tmp_path))
