"""What a run goes on from cannot be read after all: the process that finds this gives way, and costs no more."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path

import pytest

from elastic.checkpoints.naming import MANIFEST, EntryName
from elastic.checkpoints.series import Series
from elastic.checkpoints.settings import Settings
from elastic.checkpoints.storage import FileSource, LocalStorage, MemoryStorage, storage_at
from elastic.records.resume import has_advanced
from runtime.recovery.checkpoint import source
from tests.unit.elastic.checkpoints.test_checkpoints import (
    FAULTS,
    Configure,
    configure,
    file_of,
    flip,
    run_and_die,
    taken,
    two,
)
from tests.unit.jobs import Recorded, make_job, set_up, train

__all__ = ["configure", "taken", "two"]


class GivesWay(Exception):
    """The process ends here."""


class Leaving(Recorded):
    """A worker that another process would replace, with its journal."""

    def __init__(self, began: str = "") -> None:
        super().__init__()
        self.began = began
        self.said: list[tuple[str, str, bool, str]] = []
        self.notes: list[str] = []

    def note(self, event: str, **fields: object) -> None:
        self.notes.append(event)

    def unreadable(self, entry: EntryName, because: str, *, memory: bool, instead: EntryName | None) -> None:
        self.said.append((str(entry), because, memory, str(instead or "")))
        raise GivesWay


def begin(session: Leaving) -> None:
    next(iter(set_up(make_job(session)).job.epochs(4)))


@pytest.mark.parametrize("fault", ["a bit of the data", "a bit of the manifest", "a missing data file"])
def test_a_checkpoint_that_was_damaged_after_the_choice_is_left_for_the_one_before(
    two: Series, configure: Configure, fault: str
) -> None:
    older, newer = two.names()
    hurt, because = FAULTS[fault]
    hurt(two, older, newer)
    before = two.storage.files(two.path(newer))
    configure(resume=str(newer))
    session = Leaving()
    with pytest.raises(GivesWay):
        begin(session)
    ((entry, why, memory, instead),) = session.said
    assert (entry, memory, instead) == (str(newer), False, str(older))
    assert because in why or "part-00000-of-00001.safetensors is damaged" in why
    assert session.notes == ["read_again", "read_again", "checkpoint_set_aside"]
    assert two.storage.files(two.path(newer)) == before, "people may want to look at it"


def test_nothing_is_named_where_nothing_older_is_whole(two: Series, configure: Configure) -> None:
    older, newer = two.names()
    flip(file_of(two, newer), 0.6)
    file_of(two, older, MANIFEST).unlink()
    configure(resume=str(newer))
    session = Leaving()
    with pytest.raises(GivesWay):
        begin(session)
    assert [instead for *_, instead in session.said] == [""]


@pytest.fixture
def memory(tmp_path: Path, two: Series) -> Path:
    """Of this machine: it holds the newer one as a snapshot."""
    _, newer = two.names()
    path = tmp_path / "memory"
    held = Series(MemoryStorage(str(path)))
    (path / held.name).mkdir(parents=True)
    Path(two.storage.url, two.path(newer)).rename(path / held.path(newer))
    return path


@pytest.mark.parametrize("by_leader", [True, False])
def test_a_damaged_snapshot_is_removed_so_that_the_next_process_finds_another(
    two: Series, memory: Path, configure: Configure, by_leader: bool
) -> None:
    held = Series(MemoryStorage(str(memory)))
    (newer,) = held.names()
    flip(file_of(held, newer), 0.6)
    told = {} if by_leader else {"resume": str(newer), "resume_from": str(memory)}
    configure(memory=str(memory), **told)
    session = Leaving(began=str(newer) if by_leader else "")
    with pytest.raises(GivesWay):
        begin(session)
    ((entry, why, in_memory, instead),) = session.said
    assert (entry, in_memory, instead) == (str(newer), True, "")
    assert "is damaged" in why and session.notes[-1] == "snapshot_set_aside"
    assert held.names() == [] and len(two.names()) == 1


def test_what_was_read_wrong_once_is_read_again(
    two: Series, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, newer = two.names()
    configure()
    quiet = train(set_up(make_job()), epochs=4)
    failing = iter([True])
    opened = LocalStorage.open

    def fails_once(self: LocalStorage, path: str) -> AbstractContextManager[FileSource]:
        if next(failing, False):
            raise OSError(5, "Input/output error")
        return opened(self, path)

    monkeypatch.setattr(LocalStorage, "open", fails_once)
    configure(resume=str(newer))
    session = Leaving()
    assert train(set_up(make_job(session)), epochs=4) == quiet
    assert session.notes[:2] == ["read_again", "state_restored"] and session.records[0].step == newer.step


def test_a_store_that_answers_with_errors_for_a_while_is_asked_again(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    series = configure(root="memory://source/checkpoints", every="4 steps")
    run_and_die(9)
    newer = series.names()[-1]
    monkeypatch.setattr(source, "PAUSE_S", 0.0)
    failing = iter([True] * (source.TRIES_REMOTE - 1))
    opened = type(series.storage).open

    def busy(self: object, path: str) -> AbstractContextManager[FileSource]:
        if next(failing, False):
            raise OSError("503 Slow Down")
        return opened(self, path)  # type: ignore[arg-type]

    monkeypatch.setattr(type(series.storage), "open", busy)
    configure(root="memory://source/checkpoints", resume=str(newer))
    session = Leaving()
    begin(session)
    assert session.notes == ["read_again"] * (source.TRIES_REMOTE - 1) + ["state_restored"]


@pytest.fixture
def went_on(tmp_path: Path) -> Iterator[Callable[..., bool]]:
    """Whether a run that began from this entry, and did nothing, is followed by another one."""

    def of(root: Series, entry: EntryName, **settings: str) -> bool:
        told = Settings(root=root.storage.url, job_id="feed", resume=str(entry), **settings)  # type: ignore[arg-type]
        (tmp_path / "checkpoints.json").write_text(json.dumps(asdict(told)))
        return has_advanced(tmp_path)

    yield of


def test_a_run_that_could_not_read_what_it_began_from_is_followed_by_one_that_begins_elsewhere(
    two: Series, went_on: Callable[..., bool]
) -> None:
    _, newer = two.names()
    assert not went_on(two, newer)
    flip(file_of(two, newer), 0.6)
    assert went_on(two, newer)


def test_so_is_a_run_whose_snapshot_was_removed(two: Series, memory: Path, went_on: Callable[..., bool]) -> None:
    (newer,) = Series(storage_at(str(memory))).names()
    told = {"memory": str(memory), "resume_from": str(memory)}
    assert not went_on(two, newer, **told)
    Series(MemoryStorage(str(memory))).remove(newer)
    assert went_on(two, newer, **told)
