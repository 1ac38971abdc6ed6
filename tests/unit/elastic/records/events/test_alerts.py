"""What a person hears of although the job goes on."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from elastic.records.events.alerts import Alerts
from elastic.records.journal import Journal, journal_path


def notices_of(job_dir: Path) -> Alerts:
    (job_dir / "job.json").touch()
    return Alerts(job_dir)


def test_each_notice_is_told_once_in_the_order_of_time_and_torn_lines_are_left_out(tmp_path: Path) -> None:
    notices = notices_of(tmp_path)
    assert notices.poll() == []
    with (
        Journal(journal_path(tmp_path, "local.1.0"), "job", "local.1.0", "local", "local.1.0") as worker,
        Journal(journal_path(tmp_path, "a-rendezvous"), "job", "a-rendezvous", "local") as leader,
    ):
        worker.write("initial_state_copied", source="local.0.0")
        leader.write("refused", worker_id="local.2.1", because="its numerics differ")
        leader.write("slot_given_up", slot="local.2", because="local.2.1 exited with 2; max_restarts=0\nTraceback")
        worker.write("ring_up")
        leader.write("fork_server_unusable", from_outside=True, because="the fork server killed by SIGKILL")
        said = notices.poll()
        assert [text.split(" ", 1)[0] for text in said] == ["the", "local.2.1", "slot"]
        assert "initial parameters of local.1.0 differed from rank 0's and were copied from local.0.0" in said[0]
        assert said[1] == "local.2.1 is refused: its numerics differ"
        assert said[2].endswith("see its log in logs/\nTraceback")
        with journal_path(tmp_path, "local.1.0").open("ab") as torn:
            torn.write(b'{"t_mono_ns": 1, "event": "refu\n{"t_mono_ns": 2, "ev')
        assert notices.poll() == []
        leader.write("refused", worker_id="local.2.2", because="again")
        leader.write("fork_server_unusable", from_outside=False, because="clone3 is not allowed here")
        refused, cold = notices.poll()
        leader.write("slots_not_written", because="[Errno 30] Read-only file system: 'job/local.slots.json'")
        (slots,) = notices.poll()
        assert slots.startswith(
            "node local cannot write down which workers it has started, and training goes on: [Errno"
        )
        leader.write("newcomer_awaited", worker_id="local.2.3", outdated=3)
        leader.write("newcomer_awaited", worker_id="local.2.3", missed=2)  # nothing is wrong with its copy
        (waits,) = notices.poll()
        assert waits.startswith("training waits until local.2.3 has the state: members train faster than it copies")
        assert "by 3 copies that were out of date" in waits
        leader.write("newcomer_hung", worker_id="local.2.3", because="invited, and not ready after 300 s")
        (hung,) = notices.poll()
        assert refused == "local.2.2 is refused: again"
        assert hung.startswith("the replacement local.2.3 is ended, and its slot gets another process: invited, and")
        assert cold.endswith("start with an interpreter of their own: clone3 is not allowed here")


def test_a_traceback_is_told_once_however_many_workers_it_ends(tmp_path: Path) -> None:
    notices = notices_of(tmp_path)
    boom, other = ("Traceback (most recent call last):\nValueError: " + what for what in ("boom", "another"))
    with Journal(journal_path(tmp_path, "agent"), "job", "agent", "local") as agent:
        for worker, words in (("local.0.0", boom + "\n"), ("local.1.0", boom), ("local.2.0", other)):
            agent.write("worker_failed", worker_id=worker, because="exited with 1 at train.py:7", words=words)
        agent.write("worker_failed", worker_id="local.3.0", because="exited with 3", words="")
        agent.write("worker_failed", worker_id="local.4.0", because="exited with 4", words="", replaced=False)
        agent.write("slot_given_up", slot="local.2", because=f"local.2.1 exited with 1; max_restarts=0\n{other}")
        said = notices.poll()
    replaced = "{} exited with {}, and is replaced; its log is in logs/"
    assert said[0] == replaced.format("local.0.0", "1 at train.py:7") + f"\n{boom}"
    assert said[1] == replaced.format("local.1.0", "1 at train.py:7")
    assert said[2] == replaced.format("local.2.0", "1 at train.py:7") + f"\n{other}"
    assert said[3] == replaced.format("local.3.0", "3")
    assert said[4] == "local.4.0 exited with 4 after the job was complete; its log is in logs/"
    assert "\n" not in said[5]
    assert notices.has_told(boom) and notices.has_told(other + "\n")
    assert not notices.has_told("") and not notices.has_told("ValueError")


def test_a_slot_that_is_given_up_is_told_with_its_traceback_by_the_leaders_line_alone(tmp_path: Path) -> None:
    notices = notices_of(tmp_path)
    because = "local.0.0 exited with 1; max_restarts=0\nValueError: boom"
    with Journal(journal_path(tmp_path, "agent"), "job", "agent", "local") as agent:
        agent.write("slot_given_up", slot=0, because=because)
        agent.write("slot_given_up", slot="local.0", because=because)
    (said,) = notices.poll()
    assert said.startswith("slot local.0 gets no worker any more: local.0.0 exited")
    assert said.endswith("\nValueError: boom")


def test_what_a_node_makes_of_its_notices_is_told(tmp_path: Path) -> None:
    notices = notices_of(tmp_path)
    with Journal(journal_path(tmp_path, "agent-a"), "job", "agent-a", "a") as agent:
        agent.write("node_leaves", seconds_left=119.8, because="EC2 will stop it")
        agent.write("node_late", because="EC2 will stop it")
        agent.write("node_stays", because="the notice was taken back")
        agent.write("advised", because="EC2 recommends to leave")
        agent.write("notices_unreadable", source="EC2", because="GET ...: timed out")
        agent.write("snapshots_off", because="no room")
    assert notices.poll() == [
        "node a has to go within 120 s: EC2 will stop it",
        "node a has not left yet; if others go on, its workers are ended now",
        "node a stays: the notice was taken back",
        "node a is told, and stays: EC2 recommends to leave",
        "node a cannot read the notices of EC2, and goes on asking: GET ...: timed out",
        "the state is not kept in the memory of node a, and the job goes on without: no room; if all workers die at "
        "once, the job goes on from a checkpoint; give it memory, or say --snapshot-every off",
    ]


def test_a_full_disk_is_told_once_and_its_end_by_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notices, free = notices_of(tmp_path), 0
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free))
    assert notices.poll() == [f"no room in {tmp_path}: training goes on, and what it writes waits for room"]
    assert notices.poll() == []
    free = 1 << 20
    with Journal(journal_path(tmp_path, "agent-a"), "job", "agent-a", "a") as agent:
        agent.write("ledger_late", seconds=3.04, because="No space left on device", step=7)
    assert notices.poll() == [
        "steps.jsonl could not be written for 3.0 s (No space left on device); no line of it is missing"
    ]


def test_a_job_directory_that_is_removed_is_told_once(tmp_path: Path) -> None:
    job_dir = tmp_path / "job"
    job_dir.mkdir()
    notices = notices_of(job_dir)
    assert notices.poll() == []
    job_dir.rename(tmp_path / "moved")
    (told,) = notices.poll()
    assert told.startswith(f"{job_dir} was removed or moved while the job ran, and with it its ledger, logs and")
    (job_dir / "journal").mkdir(parents=True)
    assert notices.poll() == []


def test_a_person_who_wants_to_see_the_members_hears_of_a_loss_with_its_time_and_of_a_newcomer(tmp_path: Path) -> None:
    (tmp_path / "job.json").touch()
    quiet, told = Alerts(tmp_path), Alerts(tmp_path, members=True)
    with Journal(journal_path(tmp_path, "leader"), "job", "leader", "local") as leader:
        leader.write("member_lost", worker_id="local.1.0", because="killed by SIGKILL")
        leader.write("quiesce_started", 1, because="local.1.0 lost: killed by SIGKILL")
        leader.write("quiesce_complete")
        leader.write("committed", 2, kind="loss", members=["local.0.0"])
        leader.write("published", 2, kind="loss")
        assert told.poll() == []
        for event in ("ring_up", "redo_started", "op_complete"):
            leader.write(event, 2, worker_id="local.0.0", op=7)
        leader.write("joined", 3, worker_id="local.1.1", op=9)
        loss, joined = told.poll()
    assert re.fullmatch(r"local\.1\.0 lost: killed by SIGKILL; the others go on after \d+ ms", loss)
    assert joined == "local.1.1 has joined" and quiet.poll() == []
