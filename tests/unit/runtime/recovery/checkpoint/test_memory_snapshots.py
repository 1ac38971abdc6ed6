"""Snapshots in memory: whole or not there, one copy a machine, and gone with the job."""

from __future__ import annotations

import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from elastic.checkpoints.naming import EntryName
from elastic.checkpoints.partition import Rows
from elastic.checkpoints.policy import SNAPSHOT_COST, SNAPSHOT_LEAST_S, Every
from elastic.checkpoints.series import Series
from elastic.checkpoints.settings import Settings
from elastic.checkpoints.storage import FileSink, LocalStorage, MemoryStorage
from elastic.config import JobSpec
from elastic.errors import ConfigError
from elastic.protocol import shard_assignment
from elastic.protocol.reduction_tree import leaves
from elastic.records import host_memory, job_directory, resume
from runtime.loop.job import Job
from runtime.recovery.checkpoint import memory_snapshots
from runtime.recovery.checkpoint.stager import Stager
from runtime.recovery.state.available_memory import available_bytes
from runtime.session import LoopPlace, Session
from tests.unit.jobs import SHARDS, Recorded, configure, make_job, set_up, train
from tests.unit.worlds import FakeMember, World

WAIT_S = 30.0


@pytest.fixture(autouse=True)
def memory(tmp_path: Path) -> Path:
    """A directory as `elastic run` makes it."""
    path = tmp_path / "memory"
    path.mkdir()
    return path


class Noting(Recorded):
    """A job of one that remembers its journal."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[tuple[str, dict[str, object]]] = []

    def note(self, event: str, **fields: object) -> None:
        self.notes.append((event, fields))

    def said(self, event: str) -> list[dict[str, object]]:
        return [fields for name, fields in self.notes if name == event]


def job_with(memory: Path, session: Session, every: str = "1 step") -> Job:
    settings = Settings(memory=str(memory), snapshot_every=every, job="train", job_id="feed")
    return make_job(session, checkpoints=settings)


def series_in(memory: Path) -> Series:
    return Series(MemoryStorage(str(memory)))


def settle(job: Job) -> None:
    """What is being written is written."""
    job._training.snapshots._saver.finish(WAIT_S)


def trained(memory: Path, session: Session, every: str = "1 step", epochs: int = 2) -> str:
    job = job_with(memory, session, every)
    digest = train(set_up(job), epochs=epochs, body=lambda _: settle(job))
    settle(job)
    return digest


def resumed(memory: Path, entry: EntryName, monkeypatch: pytest.MonkeyPatch) -> tuple[str, list[int]]:
    """The digest, and the steps that were done, of a job that goes on from a snapshot."""
    settings = Settings(resume=str(entry), resume_from=str(memory), root=str(memory.parent / "none"), job_id="feed")
    configure(monkeypatch, settings)
    session = Recorded()
    digest = train(set_up(make_job(session)))
    return digest, [record.step for record in session.records]


# What is in memory


def test_a_job_goes_on_from_a_snapshot_with_the_same_bits(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = train(set_up(make_job()))
    assert trained(memory, Noting(), "2 steps") == quiet
    found, skipped = series_in(memory).newest("feed")
    assert found is not None and found.name.step == 4 and skipped == []
    assert resumed(memory, found.name, monkeypatch) == (quiet, [4, 5])


def test_every_machine_has_a_whole_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers on machine a and one on b: each machine could go on alone."""
    quiet = train(set_up(make_job()))
    nodes = {node: tmp_path / node for node in "ab"}
    for path in nodes.values():
        path.mkdir()
    world = World(3)
    world.members = ["a.0.0", "b.0.0", "a.1.0"]
    world.run(lambda session: trained(nodes[session.worker_id[0]], session, "5 steps"))
    assert world.errors == {}
    for node, workers in (("a", 2), ("b", 1)):
        found, skipped = series_in(nodes[node]).newest("feed")
        assert found is not None and found.manifest is not None and skipped == []
        assert (found.name.step, found.manifest.world, len(found.manifest.files)) == (5, workers, workers)
        assert resumed(nodes[node], found.name, monkeypatch) == (quiet, [5])


def test_time_decides_and_the_wish_of_rank_0_reaches_all(memory: Path) -> None:
    world = World(2)
    world.members = ["a.0.0", "a.1.0"]
    world.run(lambda session: trained(memory, session, "0.001 s"))
    assert world.errors == {}
    assert len(set(world.digests.values())) == 1
    found, _ = series_in(memory).newest("feed")
    assert found is not None and found.manifest is not None
    assert found.manifest.world == 2


def test_time_decides_also_where_rank_0_is_on_a_machine_of_its_own(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more workers than shards, those that share a machine have most shards: they send fewer sums."""
    hosts = ("a", *SHARDS * ["b"])

    def owned(session: FakeMember, units: int) -> tuple[int, ...]:
        return leaves(shard_assignment.owned(units, (), hosts, 15)[session.rank])

    monkeypatch.setattr(FakeMember, "owned", owned)
    world = World(1 + SHARDS)
    world.members = ["a.0.0", *(f"b.{slot}.0" for slot in range(SHARDS))]
    (memory.parent / "a").mkdir()
    world.run(lambda session: trained(memory if session.rank else memory.parent / "a", session, "0.001 s", epochs=1))
    assert world.errors == {}
    for path in (memory, memory.parent / "a"):
        assert series_in(path).newest("feed")[0] is not None


def test_the_one_before_is_whole_until_the_next_one_is(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is held while it is written; then it is the only one."""
    write, gate, held = LocalStorage.create, threading.Event(), threading.Event()

    @contextmanager
    def slow(self: LocalStorage, path: str) -> Iterator[FileSink]:
        with write(self, path) as sink:
            if "step-000000000002" in path:
                held.set()
                assert gate.wait(WAIT_S)
            yield sink

    monkeypatch.setattr(LocalStorage, "create", slow)
    series, seen = series_in(memory), []
    job = job_with(memory, Noting())
    model, steps = set_up(job), iter(job.steps(shards=2, total=3))
    for step in steps:
        for _ in step:
            (model.model(torch.randn(4, 6)).square().mean()).backward()
        model.optimizer.step()
        model.optimizer.zero_grad()
        if step.index == 1:
            settle(job)
        if step.index == 2:
            assert held.wait(WAIT_S)
            found, skipped = series.newest("feed")
            seen.append((found and found.name.step, [entry.name.step for entry in skipped]))
            gate.set()
    job.close()
    settle(job)
    assert seen == [(1, [2])]
    assert [entry.name.step for entry in series.all("feed")] == [2]
    assert series.newest("feed")[0] is not None


class Shifting(Noting):
    """A job of one that believes it has others beside it, who write nothing."""

    others: tuple[str, ...] = ("alone.1.0",)
    number = 1

    def place(self) -> LoopPlace:
        return LoopPlace(self.number, 0, (self.worker_id, *self.others), f"{self.number:08x}{0:024x}")


def test_a_snapshot_that_lost_a_member_is_made_again_at_once_and_leaves_nothing(memory: Path) -> None:
    session = Shifting()
    job = job_with(memory, session, "1000 s")
    model = set_up(job)
    job._training.snapshots.ask()
    seen = []
    for step in job.steps(shards=2, total=6):
        for _ in step:
            (model.model(torch.randn(4, 6)).square().mean()).backward()
        model.optimizer.step()
        model.optimizer.zero_grad()
        settle(job)
        seen.append([(entry.name.step, entry.name.generation, entry.unfinished) for entry in series_in(memory).all()])
        session.number = 1 + (step.index >= 1) + (step.index >= 3)
        session.others = () if session.number == 3 else session.others
    job.close()
    wishing = "the wish travels with the first step that knows"
    assert seen == [*[[(0, 1, True)]] * 3, *[[(3, 2, True)]] * 2, [(5, 3, False)]], wishing


def test_what_others_could_not_write_is_tried_again_and_takes_no_more_memory(memory: Path) -> None:
    session = Shifting()
    job = job_with(memory, session, "1000 s")
    model = set_up(job)
    seen = []
    for step in job.steps(shards=2, total=6):
        for _ in step:
            (model.model(torch.randn(4, 6)).square().mean()).backward()
        model.optimizer.step()
        model.optimizer.zero_grad()
        settle(job)
        seen += [(entry.name.step, entry.unfinished) for entry in series_in(memory).all()]
        job._training.snapshots._last_s = -math.inf  # for ages none was complete
    job.close()
    assert seen == [(2, True), (2, True), (4, True), (4, True)]


def test_one_that_was_completed_while_it_was_removed_goes_too(memory: Path) -> None:
    """By the last of its writers, after rank 0 had given it up: it has a manifest, and lacks files."""
    trained(memory, Noting(), "2 steps", epochs=1)
    torn = series_in(memory)
    (name,) = torn.names()
    os.unlink(memory / torn.path(name, "part-00000-of-00001.safetensors"))
    assert not torn.look(name).unfinished
    trained(memory, Noting(), "4 steps")
    assert [entry.name.step for entry in torn.all()] == [4]


def test_a_directory_that_is_gone_stays_gone(memory: Path) -> None:
    quiet = train(set_up(make_job()))
    memory.rmdir()
    assert trained(memory, Noting()) == quiet
    assert not memory.exists()
    with pytest.raises(FileNotFoundError, match="has been removed"):
        series_in(memory).storage.create("_periodic/x/y").__enter__()


def test_nothing_in_memory_is_fsynced(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(descriptor: int) -> None:
        raise AssertionError("fsync")

    monkeypatch.setattr(os, "fsync", fsync)
    trained(memory, Noting())
    assert series_in(memory).newest("feed")[0] is not None


# How often


def test_auto_bounds_what_snapshots_cost() -> None:
    auto = Every.parse("auto", "snapshot")
    assert auto.snapshot_wait_s(None) == auto.snapshot_wait_s(0.01) == SNAPSHOT_LEAST_S
    assert auto.snapshot_wait_s(2.0) == 2.0 / SNAPSHOT_COST
    assert Every.parse("3 s").snapshot_wait_s(2.0) == 3
    assert Every.parse("off").snapshot_wait_s(0.0) == Every.parse("5 steps").snapshot_wait_s(0.0) == float("inf")


def test_an_interval_that_is_none_is_refused_by_its_option() -> None:
    with pytest.raises(ConfigError, match="snapshot every 'often'"):
        JobSpec(name="job", command=("train",), workers=1, snapshot_every="often")


# No room


@pytest.mark.parametrize(
    ("free", "available", "because"),
    [
        (400, 600, ""),
        (399, 10**9, r"2 copies of a state of 100 MB .* half of the 399 MB that are left in /dev/shm .*--shm-size\)"),
        (10**9, 599, r"3 copies of a state of 100 MB .* half of the 599 MB of memory that are left .*"),
    ],
)
def test_a_state_without_room_is_named_with_what_there_is(free: int, available: int, because: str) -> None:
    said = memory_snapshots.shortage(100 * 10**6, free * 10**6, available * 10**6)
    assert re.fullmatch(because, said)


def test_without_room_it_is_said_once_and_training_goes_on(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = train(set_up(make_job()))
    monkeypatch.setattr(memory_snapshots, "free_bytes", lambda path: 4096)
    world = World(2)
    world.members = ["a.0.0", "a.1.0"]
    world.run(lambda session: trained(memory, session))
    assert world.errors == {}
    assert set(world.digests.values()) == {quiet}
    said = [event for member in world.sessions.values() for event, _ in member.notes if event == "snapshots_off"]
    assert said == ["snapshots_off"]
    assert series_in(memory).names() == []


def test_of_two_that_find_no_room_at_once_one_says_so(memory: Path) -> None:
    session = Noting()
    for _ in range(2):
        job_with(memory, session)._training.snapshots._turn_off("no room")
    assert session.said("snapshots_off") == [{"because": "no room"}]


def test_memory_without_room_for_a_byte_is_turned_off_all_the_same(memory: Path) -> None:
    session = Noting()
    snapshots = job_with(memory, session)._training.snapshots
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))  # a file can be made and not written, as where it is full
    try:
        snapshots._turn_off("no room")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert snapshots._is_off
    assert session.said("snapshots_off") == [{"because": "no room"}]


@pytest.mark.parametrize("because", ["No space left on device", "No such file or directory"])
def test_memory_that_takes_no_file_or_is_removed_just_now_costs_the_snapshots_only(
    because: str, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet, session = train(set_up(make_job())), Noting()

    def refused(*_: object) -> int:
        raise OSError(28 if because.startswith("No space") else 2, because)

    monkeypatch.setattr(memory_snapshots, "open", refused, raising=False)
    monkeypatch.setattr(memory_snapshots, "free_bytes", refused if "directory" in because else lambda path: 4096)
    assert trained(memory, session) == quiet
    (said,) = session.said("snapshots_off")
    assert "/dev/shm" in str(said["because"]) or because in str(said["because"])


def test_memory_that_is_full_meanwhile_costs_the_snapshot_only(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet, write, session = train(set_up(make_job())), LocalStorage.create, Noting()

    @contextmanager
    def full(self: LocalStorage, path: str) -> Iterator[FileSink]:
        if "step-000000000003" in path:
            raise OSError(28, "No space left on device")
        with write(self, path) as sink:
            yield sink

    monkeypatch.setattr(LocalStorage, "create", full)
    assert trained(memory, session, "3 steps", epochs=2) == quiet
    (failed,) = session.said("snapshot_failed")
    assert "No space left" in str(failed["because"])


def test_room_is_that_of_the_tightest_cgroup(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (groups / "a" / "b").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:  8000 kB\n")
    (proc / "self" / "cgroup").write_text("4:memory:/elsewhere\n0::/a/b\n")
    (groups / "a" / "b" / "memory.max").write_text("max\n")
    assert available_bytes(proc, groups) == 8000 * 1024
    (groups / "a" / "memory.max").write_text("5000000\n")
    (groups / "a" / "memory.current").write_text("3000000\n")
    (groups / "a" / "memory.stat").write_text("anon 2000000\ninactive_file 400000\n")
    assert available_bytes(proc, groups) == 2_400_000


@pytest.mark.parametrize("path", ["/docker/c0ffee", "/"])
def test_room_is_also_that_of_a_cgroup_of_version_1(tmp_path: Path, path: str) -> None:
    """In a container the path is that of the host, and the container's own cgroup is mounted."""
    proc, memory = tmp_path / "proc", tmp_path / "cgroup" / "memory"
    (proc / "self").mkdir(parents=True)
    memory.mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:  8000 kB\n")
    (proc / "self" / "cgroup").write_text(f"9:name=systemd:{path}\n4:cpuset,memory:{path}\n0::{path}\n")
    (memory / "memory.usage_in_bytes").write_text("3000000\n")
    (memory / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 400000\n")
    (memory / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert available_bytes(proc, tmp_path / "cgroup") == 8000 * 1024
    (memory / "memory.limit_in_bytes").write_text("5000000\n")
    assert available_bytes(proc, tmp_path / "cgroup") == 2_400_000


# Going on


Complete = Callable[[Path, int], Series]


@pytest.fixture
def complete() -> Complete:
    """Put a whole checkpoint of a step into a directory."""

    def put(root: Path, step: int) -> Series:
        job = job_with(root, Noting(), f"{step} steps")
        train(set_up(job), epochs=step // 3 + 1, body=lambda _: settle(job))
        settle(job)
        return series_in(root)

    return put


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    path = tmp_path / "disk"
    path.mkdir()
    return path


@pytest.mark.parametrize(("in_memory", "on_disk", "chosen"), [(5, 4, 5), (4, 4, 4), (4, 5, 5)])
def test_a_job_goes_on_from_the_newest_of_memory_and_disk(
    memory: Path, disk: Path, complete: Complete, in_memory: int, on_disk: int, chosen: int
) -> None:
    series, snapshots = complete(disk, on_disk), complete(memory, in_memory)
    found = resume.decide(series, "feed", 6, snapshots)
    assert (found.step, found.memory, found.redone) == (chosen, in_memory >= on_disk, (chosen, 5))
    kind = "snapshot in memory" if found.memory else "checkpoint"
    assert f"goes on from step {chosen}, {kind} {found.checkpoint}" in next(found.sentences())


def move(one: Series, to: Series) -> None:
    """Its only entry."""
    (name,) = one.names()
    os.rename(f"{one.storage.url}/{one.path(name)}", f"{to.storage.url}/{to.path(name)}")


def test_a_snapshot_serves_where_the_newer_checkpoint_is_damaged(
    tmp_path: Path, memory: Path, disk: Path, complete: Complete
) -> None:
    series, snapshots = complete(disk, 5), complete(memory, 4)
    (name,) = series.names()
    move(complete(tmp_path, 3), series)
    part = disk / series.path(name, "part-00000-of-00001.safetensors")
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    found = resume.decide(series, "feed", 6, snapshots)
    assert (found.step, found.memory) == (4, True)
    assert [entry for entry, _ in found.skipped] == [str(name)]


def test_a_damaged_checkpoint_is_named_although_a_newer_snapshot_serves(
    tmp_path: Path, memory: Path, disk: Path, complete: Complete
) -> None:
    series, snapshots = complete(disk, 4), complete(memory, 5)
    (name,) = series.names()
    move(complete(tmp_path, 3), series)
    (disk / series.path("step-000000000002.0.g1-00000000")).mkdir()  # was never completed
    (disk / series.path(name, "part-00000-of-00001.safetensors")).write_bytes(b"torn")
    found = resume.decide(series, "feed", 6, snapshots)
    assert (found.step, found.memory) == (5, True)
    assert [entry for entry, _ in found.skipped] == [str(name)]
    assert next(found.sentences()).startswith(
        f"skipped the checkpoint {name}: its file part-00000-of-00001.safetensors"
    )


def test_a_snapshot_of_steps_that_the_ledger_lacks_or_of_another_job_is_not_used(
    memory: Path, disk: Path, complete: Complete
) -> None:
    series, snapshots = complete(disk, 4), complete(memory, 5)
    assert resume.decide(series, "feed", 4, snapshots).memory is False
    assert resume.decide(Series(LocalStorage(str(disk / "none"))), "beef", 6, snapshots).checkpoint == ""


def begun(tmp_path: Path, memory: Path, *, again: bool) -> resume.Resumption | None:
    job_dir = tmp_path / "job"
    if not again:
        (job_dir / "journal").mkdir(parents=True)
        (job_dir / "id").write_text("feed")
    spec = JobSpec(name="train", command=("true",), workers=1, snapshot_every="1 step")
    return resume.begin(spec, job_dir, again=again, memory=memory)


def test_a_run_that_goes_on_knows_where_and_leaves_no_other_snapshot(
    tmp_path: Path, memory: Path, complete: Complete
) -> None:
    """has_advanced: a run that dies before its first new snapshot must not be started for ever."""
    assert begun(tmp_path, memory, again=False) is None
    job_dir = tmp_path / "job"
    assert job_directory.read_settings(job_dir).memory == str(memory)
    assert resume.has_advanced(job_dir) is False
    snapshots = complete(memory, 4)
    assert resume.has_advanced(job_dir)
    move(complete(tmp_path, 5), snapshots)
    lines = [{"step": step} for step in range(4)]
    (job_dir / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = begun(tmp_path, memory, again=True)
    assert found is not None and (found.step, found.memory) == (4, True)
    settings = job_directory.read_settings(job_dir)
    assert (settings.resume, settings.resume_from) == (found.checkpoint, str(memory))
    assert [str(name) for name in snapshots.names()] == [found.checkpoint]
    assert resume.has_advanced(job_dir) is False
    (line,) = map(json.loads, (job_dir / "resumes.jsonl").read_text().splitlines())
    assert line["memory"] is True
    (job_dir / "checkpoints").mkdir(exist_ok=True)
    complete(job_dir / "checkpoints", 5)
    assert resume.has_advanced(job_dir)


# The directory


def test_the_directory_is_this_users_and_goes_with_its_process(tmp_path: Path) -> None:
    with host_memory.directory(tmp_path, wanted=True) as path:
        assert path is not None
        assert path.parent == tmp_path and path.stat().st_mode & 0o777 == 0o700
        (path / "content").write_text("state")
        host_memory.sweep(tmp_path)
        with host_memory.directory(tmp_path, wanted=True) as other:
            assert other is not None and other != path
            assert {path, other} == set(tmp_path.glob("elastic-*"))
        assert (path / "content").exists()
    assert list(tmp_path.glob("elastic-*")) == []


def test_what_a_killed_process_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from elastic.records import host_memory\n"
        "with host_memory.directory(Path(sys.argv[1]), wanted=True) as path:\n"
        "    print(path, flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        host_memory.sweep(tmp_path)
        assert left.is_dir(), "its process lives"
        process.send_signal(signal.SIGKILL)
    (left / "state").write_text("state")
    (tmp_path / f"elastic-{0:016x}").write_text("no directory")
    (tmp_path / "elastic-notes").mkdir()  # another program's
    with host_memory.directory(tmp_path, wanted=False) as none:
        assert none is None
    assert sorted(path.name for path in tmp_path.glob("elastic-*")) == [f"elastic-{0:016x}", "elastic-notes"]


def test_a_machine_without_such_memory_is_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for parent, because in (("none", "No such file or directory"), ("file", "Not a directory")):
        with host_memory.directory(tmp_path / parent, wanted=True) as none:
            assert none is None
        assert f"cannot be used ({because})" in capsys.readouterr().err


# On a GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_rows_of_a_gpu_are_those_of_the_moment_although_it_goes_on_computing() -> None:
    stager = Stager()
    weights = torch.arange(1 << 22, device="cuda", dtype=torch.float32)
    expected = weights.cpu()
    for _ in range(3):
        staged, copied = stager.stage([("weights", weights)], [Rows(0, 0, len(weights))])
        weights.zero_()
        copied()
        assert torch.equal(torch.cat(list(staged[0].content)).view(torch.float32), expected)
        weights.copy_(expected)
