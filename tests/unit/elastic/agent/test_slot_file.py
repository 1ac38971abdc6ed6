"""A worker id is given once, whatever happens to the agents that count."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest

from elastic.agent.process import worker_process
from elastic.agent.slot_file import SlotFile
from elastic.agent.standing_words import StandingWords
from elastic.errors import ConfigError
from elastic.protocol.messages import WorkerDead
from tests.children import child


def test_a_new_agent_goes_on_counting(tmp_path: Path) -> None:
    first = SlotFile(tmp_path / "a.slots.json")
    assert first.incarnations == {}
    first.spawned(0, 0, 2**22 + 1)
    first.spawned(1, 0, 2**22 + 2)
    first.spawned(0, 1, 2**22 + 3)
    assert SlotFile(tmp_path / "a.slots.json").incarnations == {0: 1, 1: 0}


def test_a_leader_hears_of_the_newest_worker_of_every_slot_that_a_killed_agent_left(tmp_path: Path) -> None:
    """A node of many slots, whose workers were replaced often: only so many deaths are kept."""
    slots = SlotFile(tmp_path / "a.slots.json")
    for slot in range(40):
        slots.spawned(slot, 100 + slot, 2**22 + slot)
    standing = StandingWords()
    for death in slots.deaths("a", ""):
        standing.heard(death)
    words = standing.words()
    dead = {word.worker_id for word in words if isinstance(word, WorkerDead)}
    assert dead >= {f"a.{slot}.{100 + slot - age}" for slot in range(40) for age in range(20)}


def test_a_full_disk_keeps_no_worker_from_starting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    slots = SlotFile(tmp_path / "slots")
    with monkeypatch.context() as patch:
        patch.setattr("elastic.agent.slot_file.write_atomically", full)
        slots.spawned(0, 5, 2**22 + 1)
        slots.settle()
        assert slots.incarnations == {0: 5}
    slots.settle()
    assert SlotFile(tmp_path / "slots").incarnations == {0: 5}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_why_the_file_cannot_be_written_is_named_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def broken(path: Path, content: bytes) -> None:
        raise OSError(number, os.strerror(number))

    slots = SlotFile(tmp_path / "slots")
    with monkeypatch.context() as patch:
        patch.setattr("elastic.agent.slot_file.write_atomically", broken)
        slots.spawned(0, 5, 2**22 + 1)
        assert slots.refused is not None and slots.refused.errno == number
    slots.settle()
    assert slots.refused is None and SlotFile(tmp_path / "slots").incarnations == {0: 5}


def test_a_new_agent_counts_on_from_logs_of_workers_that_a_full_disk_has_kept_out_of_the_file(tmp_path: Path) -> None:
    SlotFile(tmp_path / "a.slots.json").spawned(0, 3, 2**22 + 1)
    (tmp_path / "logs").mkdir()
    for worker in ("a.0.2", "a.0.10", "a.0.9", "a.1.0", "b.2.0", "fork-server-a", "ba.0.11"):
        (tmp_path / "logs" / f"{worker}.log").touch()
    assert SlotFile(tmp_path / "a.slots.json").incarnations == {0: 10, 1: 0}
    assert SlotFile(tmp_path / "b.slots.json").incarnations == {2: 0}


def test_what_a_killed_agent_left_running_is_ended(tmp_path: Path) -> None:
    with child("sleep", "1000") as left:
        SlotFile(tmp_path / "slots").spawned(0, 0, left.pid)
        SlotFile(tmp_path / "slots").end_leftovers()
        assert left.wait(60) == -signal.SIGKILL


def test_a_process_that_only_has_the_number_of_an_old_one_is_left_alone(tmp_path: Path) -> None:
    with child("sleep", "1000") as stranger:
        slots = SlotFile(tmp_path / "slots")
        slots.spawned(0, 0, stranger.pid)
        text = (tmp_path / "slots").read_text()
        since = worker_process.started(stranger.pid)
        (tmp_path / "slots").write_text(text.replace(f'"started": {since}', '"started": 1'))
        SlotFile(tmp_path / "slots").end_leftovers()
        assert stranger.poll() is None


@pytest.mark.parametrize("content", ["", "[]", '{"0": {}}', '{"0": {"incarnation": "x", "pid": 1, "started": 1}}'])
def test_a_damaged_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "slots").write_text(content)
    with pytest.raises(ConfigError, match="damaged"):
        SlotFile(tmp_path / "slots")
