"""Nobody removes a checkpoint that is newer than the one which the job knows to be theirs, or the only whole one."""

from __future__ import annotations

import errno
import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from elastic.checkpoints.manifest import Manifest, Moment
from elastic.checkpoints.naming import MANIFEST, PERIODIC, EntryName
from elastic.checkpoints.policy import Keep
from elastic.checkpoints.series import Series
from elastic.checkpoints.settings import Settings
from elastic.checkpoints.storage import LocalStorage, put
from elastic.records.resume import has_advanced
from runtime.recovery.checkpoint import saver
from tests.unit.elastic.checkpoints.test_checkpoints import (
    Configure,
    Dies,
    configure,
    dying_at,
    file_of,
    flip,
    run_and_die,
    settle,
)
from tests.unit.jobs import Recorded, make_job, set_up, train

__all__ = ["configure"]


class Unanswered(Recorded):
    """Nobody leads the job: whoever asks for the pointer hears nothing until the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[int, Callable[[bool], None]] = {}

    def point(self, series: str, name: EntryName, answer: Callable[[bool], None]) -> None:
        self.asked[name.step] = answer


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver, "POINTER_S", 0.01)


def steps(series: Series) -> list[int]:
    return [entry.name.step for entry in series.all("feed") if not entry.problem]


def test_nothing_is_removed_while_nobody_leads(configure: Configure) -> None:
    series, session = configure(every="4 steps", keep="last 1"), Unanswered()
    train(set_up(make_job(session)), epochs=4, body=settle)
    assert steps(series) == [8, 4]
    assert list(session.asked) == [4, 8]


def test_whoever_does_not_hold_the_pointer_removes_nothing(configure: Configure) -> None:
    series, session = configure(every="4 steps", keep="last 1"), Unanswered()
    job = make_job(session)
    with pytest.raises(Dies):
        train(set_up(job), epochs=4, body=dying_at(9))
    session.asked[8](False)
    job._training.checkpoints.finish()
    assert steps(series) == [8, 4]
    session.asked[8](True)
    job._training.checkpoints.finish()
    assert steps(series) == [8]
    job._detach()


def test_a_writer_that_was_frozen_with_the_right_to_remove_leaves_newer_ones_alone(configure: Configure) -> None:
    """It completed step 4; the others have come to step 11 in a later generation when it wakes up."""
    series, session = configure(every="4 steps", keep="last 1"), Unanswered()
    frozen = make_job(session)
    with pytest.raises(Dies):
        train(set_up(frozen), epochs=4, body=dying_at(5))
    name = str(series.names()[-1])
    configure(every="5 steps", keep="last 9", resume=name)
    run_and_die(11)
    unfinished = EntryName(15, 0, 1, "abcdef01")
    put(series.storage, series.path(unfinished, "part-00000-of-00001.json"), b"{}")
    before = series.names()
    assert [entry.step for entry in before] == [4, 5, 10, 15]
    session.asked[4](True)
    frozen._training.checkpoints.finish()
    frozen._detach()
    assert series.names() == before


@pytest.mark.parametrize("keep", ["last 1", "last 2"])
def test_a_damaged_one_from_before_replaces_no_whole_one(configure: Configure, keep: str) -> None:
    """Checkpoints of steps 4 and 8, and 8 is damaged: what is taken from step 4 on is older by name, and whole."""
    series = configure(every="4 steps")
    run_and_die(9)
    older, damaged = series.names()
    flip(file_of(series, damaged), 0.6)
    series = configure(every="5 steps", keep=keep, resume=str(older), skipped=(str(damaged),))
    run_and_die(6)
    kept = Keep.parse(keep).last
    assert steps(series) == [8, 5, 4][: kept + 1]
    found, _ = series.newest("feed")
    assert found is not None and found.name.step == 5
    series = configure(every="9 steps", keep=keep, resume=str(found.name), skipped=(str(damaged),))
    run_and_die(12)
    assert steps(series) == [9, 5][:kept]
    assert damaged not in series.names(), "it goes when a newer one is complete"


def test_one_that_was_skipped_goes_whatever_is_wrong_with_it_but_that_of_another_job(configure: Configure) -> None:
    series = configure(every="4 steps")
    run_and_die(9)
    manifest = series.look(series.names()[0]).manifest
    assert manifest is not None
    cut, missing, unreadable, foreign = names = [replace(manifest.name, step=step) for step in range(4)]
    for name in names:
        shutil.copytree(Path(series.storage.url) / series.path(manifest.entry), file_of(series, name, ""))
        told = replace(manifest, entry=str(name), moment=replace(manifest.moment, step=name.step))
        told = replace(told, job_id="beef") if name == foreign else told
        file_of(series, name, MANIFEST).write_bytes(told.to_json())
    file_of(series, cut).write_bytes(b"x")
    file_of(series, missing).unlink()
    flip(file_of(series, unreadable, MANIFEST), 0.5)
    skipped = list(map(str, names))
    assert series.prune(Keep(9), "feed") == []
    assert series.prune(Keep(9), "feed", skipped=skipped, newest=foreign) == [], "none is newer"
    assert series.prune(Keep(9), "feed", skipped=skipped) == [cut, missing, unreadable]


def test_a_damaged_checkpoint_is_no_progress(configure: Configure, tmp_path: Path) -> None:
    """Else a job that loses all its workers before each next checkpoint would begin again for ever."""
    series = configure(every="4 steps")
    run_and_die(9)
    older, damaged = series.names()
    settings = Settings(root=series.storage.url, job_id="feed", resume=str(older), skipped=(str(damaged),))
    (tmp_path / "checkpoints.json").write_text(json.dumps(asdict(settings)))
    assert not has_advanced(tmp_path)
    configure(every="5 steps", resume=str(older), skipped=(str(damaged),))
    run_and_die(6)
    assert has_advanced(tmp_path)


def test_the_end_waits_for_the_answer_and_not_for_ever(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    series, session = configure(every="4 steps", keep="last 1"), Unanswered()
    job = make_job(session)
    with pytest.raises(Dies):
        train(set_up(job), epochs=4, body=dying_at(9))
    monkeypatch.setattr(saver, "POINTER_S", 30.0)
    answer = threading.Timer(0.05, session.asked[8], (True,))
    answer.start()
    job._training.checkpoints.finish()
    assert steps(series) == [8]
    answer.join()
    job._detach()


def whole(name: EntryName) -> bytes:
    """The manifest of a checkpoint without a tensor."""
    moment = Moment(step=name.step, epoch=0, epoch_start=0, seed=0, shards=1)
    header = {"format": 1, "tensors": [], "objects": {}, "state": {}}
    return Manifest(
        job="train",
        job_id="feed",
        series=PERIODIC,
        entry=str(name),
        moment=moment,
        generation=name.generation,
        world=1,
        taken="2026-01-02T03:04:05Z",
        files=(),
        header=header,
    ).to_json()


class Held(LocalStorage):
    """An entry of it is held by another process, as by one that has a file of it open on NFS."""

    held = ""

    def remove_directory(self, path: str) -> None:
        if self.held and path.endswith(self.held):
            raise OSError(errno.ENOTEMPTY, "Directory not empty", path)
        super().remove_directory(path)


def test_one_that_cannot_be_removed_is_the_only_old_one_that_stays(tmp_path: Path) -> None:
    storage = Held(str(tmp_path))
    series = Series(storage)
    names = [EntryName(step, 0, 1, "0" * 8) for step in range(1, 6)]
    for name in names:
        put(storage, series.path(name, "part-00000-of-00001.json"), b"")
    put(storage, series.path(names[4], "manifest.json"), whole(names[4]))
    storage.held = str(names[0])
    with pytest.raises(OSError, match="not empty"):
        series.prune(Keep(1), "feed")
    assert series.names() == [names[0], names[4]]


def test_a_link_in_an_entry_is_removed_with_it_and_not_what_it_leads_to(tmp_path: Path) -> None:
    series, name = Series(LocalStorage(str(tmp_path / "checkpoints"))), EntryName(1, 0, 1, "0" * 8)
    put(series.storage, series.path(name, "part-00000-of-00001.json"), b"")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").touch()
    (tmp_path / "checkpoints" / series.path(name) / "link").symlink_to(tmp_path / "elsewhere")
    series.remove(name)
    assert series.names() == [] and (tmp_path / "elsewhere" / "file").exists()
