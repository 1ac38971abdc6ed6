"""What the harness notes of a run, and that it ends what it has begun, also when it is interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from chaos_tests.checkers import Truth
from chaos_tests.cluster import Cluster, cluster
from chaos_tests.cluster.etcd import EtcdMembers
from chaos_tests.cluster.hosts import PREFIX
from chaos_tests.cluster.local_job import LocalJob
from chaos_tests.nemesis import signals
from chaos_tests.run import campaign, checkpoint_audit, faulty_run, publish, recorder
from chaos_tests.run.campaign import Campaign
from chaos_tests.run.checkpoint_audit import Auditor
from chaos_tests.run.recorder import Embedded, Recorder
from chaos_tests.scenario.schedule import Planned
from chaos_tests.support import processes
from elastic.checkpoints.manifest import FileEntry, Manifest, Moment
from elastic.checkpoints.naming import EntryName
from elastic.checkpoints.series import Series
from elastic.checkpoints.storage import LocalStorage, put
from elastic.errors import StoreUnavailable
from elastic.protocol.messages import Generation, Kind, Plan
from elastic.records import journal
from elastic.records.journal import Journal, journal_path
from elastic.store import chunks
from elastic.store.base import Item
from elastic.store.election import Candidate
from tests.memory_store import MemoryStore, delete_key
from tests.unit.elastic.checkpoints.test_checkpoint_rules import NO_STATE


def noted(job_dir: Path, *events: str) -> list[dict[str, object]]:
    return [line for line in journal.read(journal_path(job_dir, "harness")) if line["event"] in events]


class ShortOfBreath(MemoryStore):
    """Does not answer for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.silent = False

    def get(self, key: str, *, timeout_s: float) -> Item | None:
        if self.silent:
            raise StoreUnavailable("no answer")
        return super().get(key, timeout_s=timeout_s)

    def close(self) -> None:
        pass


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> ShortOfBreath:
    """In etcd's place, which the recorder believes to be this process."""
    store = ShortOfBreath()
    monkeypatch.setattr(recorder, "EtcdStore", lambda *_, **__: store)
    monkeypatch.setattr(processes, "services", lambda mark: {"etcd": os.getpid()})
    monkeypatch.setattr(chunks, "PIECE_BYTES", 100)
    return store


def commit(store: MemoryStore, number: int) -> None:
    leader = Candidate(store, "job", "one:1", lambda: 0.0)
    leader.stand()
    leader.chain()
    leader.commit(Generation(number, Kind.FORM, number, (), Plan(), "because"))
    leader.resign()


def test_a_record_in_pieces_is_noted_like_any_other_as_soon_as_etcd_answers(
    store: ShortOfBreath, tmp_path: Path
) -> None:
    with Recorder(tmp_path, "job", Embedded("mark")) as seen:
        seen.look(0)
        commit(store, 1)
        assert store.prefix("/elastic/job/pieces/", timeout_s=1).items
        store.silent = True
        seen.look(0)
        store.silent = False
    (line,) = noted(tmp_path, "etcd_put", "etcd_gap")
    assert (line["event"], line["number"]) == ("etcd_put", 1)


def test_a_record_of_which_a_piece_is_missing_is_a_gap(store: ShortOfBreath, tmp_path: Path) -> None:
    with Recorder(tmp_path, "job", Embedded("mark")) as seen:
        seen.look(0)
        commit(store, 1)
        delete_key(store, store.prefix("/elastic/job/pieces/", timeout_s=1).items[0].key, timeout_s=1)
    assert [line["event"] for line in noted(tmp_path, "etcd_put", "etcd_gap")] == ["etcd_gap"]


@pytest.mark.parametrize(("large_bytes", "read"), [(4, True), (3, False)])
def test_what_was_too_large_to_be_read_is_noted_as_not_read(
    large_bytes: int, read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_audit, "LARGE_BYTES", large_bytes)
    series = Series(LocalStorage(str(tmp_path / "checkpoints")))
    name = EntryName.parse("step-000000000002.0.g1-c105d2d3")
    assert name is not None
    put(series.storage, series.path(name, "part-0"), b"data")
    file = FileEntry("part-0", 4, "0" * 64)
    moment = Moment(step=2, epoch=0, epoch_start=0, seed=0, shards=1)
    about = {"job": "job", "job_id": "feed", "series": "_periodic", "taken": "2026-01-01T00:00:00Z"}
    manifest = Manifest(entry=str(name), moment=moment, generation=1, world=1, files=(file,), header=NO_STATE, **about)
    series.publish(manifest)
    with Journal(journal_path(tmp_path, "harness"), "job", "harness", "harness") as lines:
        Auditor({"n": tmp_path}, lines).look_at_all()
    (line,) = noted(tmp_path, "checkpoint_read")
    assert line["read"] is read
    assert bool(line["problem"]) is read, "its bytes are not those of its digest, which only a reader can know"


SCRIPT = """
import json, pathlib, sys, time
home = pathlib.Path(sys.argv[1])
(home / "journal").mkdir(parents=True)
(home / "job.json.new").write_text(json.dumps({"name": "job", "command": ["x"], "workers": 2}))
(home / "job.json.new").rename(home / "job.json")  # as the product does: the file is read as soon as it is there
(home / "steps.jsonl").write_text('{"step": 0}\\n')
time.sleep(600)
"""


def test_what_lasts_is_ended_also_when_the_run_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled = tmp_path / "faulty" / "chaos.fill"

    def fill(directory: Path) -> Callable[[], None]:
        (directory / "chaos.fill").touch()
        return lambda: (directory / "chaos.fill").unlink()

    def interrupted(job: LocalJob, deadline_s: float) -> int | None:
        job.until("the disk is full", filled.exists, 60.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(signals, "fill", fill)
    monkeypatch.setattr(LocalJob, "ended", interrupted)
    monkeypatch.setattr(campaign, "elastic_run", lambda directory, *_: [sys.executable, "-c", SCRIPT, str(directory)])
    (tmp_path / "quiet").mkdir()
    (tmp_path / "quiet" / "steps.jsonl").touch()
    asked = Campaign(tmp_path, ("train.py",), 2, "kill", 1, 5.0, (Planned(1, 0.0, "disk-full"),))
    with pytest.raises(KeyboardInterrupt):
        faulty_run.faulty_run(asked, 5.0)
    assert noted(tmp_path / "faulty", "fault_injected") and not filled.exists()


ENDS_EARLY = """
import json, pathlib, sys
home = pathlib.Path(sys.argv[1])
(home / "journal").mkdir(parents=True)
(home / "result.json").write_text(json.dumps({"exit_code": 4, "because": "every copy is lost", "digest": ""}))
(home / "job.json.new").write_text(json.dumps({"name": "job", "command": ["x"], "workers": 2}))
(home / "job.json.new").rename(home / "job.json")
sys.exit(4)
"""


def test_a_run_with_faults_that_never_comes_to_its_first_step_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = [sys.executable, "-c", ENDS_EARLY]
    monkeypatch.setattr(campaign, "elastic_run", lambda directory, *_: [*run, str(directory)])
    (tmp_path / "quiet").mkdir()
    (tmp_path / "quiet" / "job.json").write_text(json.dumps({"name": "job", "command": ["x"], "workers": 2}))
    planned = (Planned(1, 0.0, "kill"),)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"chaos-{0:016x}").mkdir()
    asked = faulty_run.faulty_run(Campaign(tmp_path, ("train.py",), 2, "kill", 1, 5.0, planned), 5.0)
    assert not list(tmp_path.glob("chaos-*")), "nor what a run that was killed has left"
    told = {finding.invariant.number: finding.verdict for finding in publish.report(asked)}
    assert told["I12"].answer is Truth.FALSE and "every copy is lost" in told["I12"].because
    assert told["I16"].because == "no fault was injected: 1 skipped, the first because the run is over"


def test_a_disk_is_not_left_full_if_filling_it_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(file: object, block: int) -> None:
        assert (tmp_path / "chaos.fill").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(signals, "SMALL_DISK_BYTES", 1 << 62)
    monkeypatch.setattr(signals, "_write_until_full", interrupted)
    with pytest.raises(KeyboardInterrupt):
        signals.fill(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_members_of_etcd_that_were_started_are_ended_if_another_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, start = [], EtcdMembers.start

    def second_fails(members: EtcdMembers, number: int) -> None:
        if number:
            raise OSError("no more processes")
        start(members, number)
        started.append(members._members[number])

    monkeypatch.setattr(EtcdMembers, "start", second_fails)
    with pytest.raises(OSError, match="no more"):
        EtcdMembers("sleep", tmp_path, 3)
    assert [process.returncode is not None for process in started] == [True]


class NoEtcd:
    endpoints: tuple[str, ...] = ()

    def wait_healthy(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_what_a_killed_cluster_has_left_is_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Cluster, "_etcd_of", lambda *_: NoEtcd())
    monkeypatch.setattr(Cluster, "await_nodes", lambda *_: None)
    abandoned = tmp_path / f"elastic-cluster-{0:016x}"
    abandoned.mkdir()
    with Cluster(tmp_path, replicas=0) as one, Cluster(tmp_path, replicas=0):
        assert not abandoned.exists() and one._own.path.is_dir()
    assert not list(tmp_path.glob("elastic-cluster-*"))


ENDS = """
import signal
from chaos_tests.support.processes import exit_on_signals
exit_on_signals()
try:
    print("up", flush=True)
    while True: signal.pause()
finally:
    print("in order")
"""


@pytest.mark.parametrize("ignored", [False, True], ids=["", "nohup"])
def test_a_closed_terminal_ends_a_run_in_order_unless_it_is_to_outlive_that(ignored: bool) -> None:
    words = ["nohup"] if ignored else []
    with subprocess.Popen([*words, sys.executable, "-c", ENDS], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None and run.stdout.readline() == "up\n"
        run.send_signal(signal.SIGHUP)
        if ignored:
            run.send_signal(signal.SIGTERM)
        assert run.stdout.read() == "in order\n"
    assert run.returncode == 128 + (signal.SIGTERM if ignored else signal.SIGHUP)


def test_a_cluster_that_is_closed_has_ended_what_its_daemons_had_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here something that does not end by itself when its daemon is gone."""
    daemon = 'setsid sleep 600 & echo $! > "$0.tmp"; mv "$0.tmp" "$0"; wait'
    told = tmp_path / "pid"
    monkeypatch.setattr(cluster, "PREFIX", (*PREFIX, "sh", "-c", daemon, str(told)))
    monkeypatch.setattr(cluster, "CLOSE_S", 0.1)
    monkeypatch.setattr(Cluster, "_etcd_of", lambda *_: NoEtcd())
    monkeypatch.setattr(Cluster, "await_nodes", lambda *_: None)
    with Cluster(tmp_path, replicas=0, nodes=("a",)):
        deadline_s = time.monotonic() + 60.0
        while not told.exists() and time.monotonic() < deadline_s:
            time.sleep(0.01)  # a file of another process: there is nothing to wait on
        pid = int(told.read_text())
        assert os.path.isdir(f"/proc/{pid}")
    assert processes.await_exits([pid], within_s=60.0) == set()
