"""Faults of a job over several nodes: where they are skipped, what is done to its files, and what its nodes leave."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from chaos_tests.cluster.cluster_job import NodesJob
from chaos_tests.failpoints.orders import FailpointOrders
from chaos_tests.nemesis import checkpoint_damage, failpoints, nodes, out_of_memory, signals
from chaos_tests.nemesis.failpoints import never_reached
from chaos_tests.nemesis.membership_view import MembershipView
from chaos_tests.nemesis.nemesis import Nemesis
from chaos_tests.nemesis.scene import NotNow, RunningFault, Scene, Teller, Victims
from chaos_tests.nemesis.signals import Impossible
from chaos_tests.scenario.catalogue import CATALOGUE
from chaos_tests.scenario.failpoints import EARLY_SENT, IN_REPETITION, IN_SHARD, SEGMENT_KEPT
from chaos_tests.scenario.faults import Damage, Ground
from chaos_tests.scenario.schedule import Planned
from chaos_tests.support import processes, resources
from elastic.checkpoints.manifest import FileEntry, Manifest, Moment
from elastic.checkpoints.naming import EntryName
from elastic.checkpoints.series import Series
from elastic.checkpoints.settings import Settings
from elastic.checkpoints.storage import LocalStorage, put
from elastic.config import JobSpec, Overlap, Reduction
from elastic.records import journal
from elastic.records.journal import Journal, journal_path
from tests.unit.elastic.checkpoints.test_checkpoint_rules import NO_STATE

SPEC = JobSpec(name="train", command=("python", "train.py"), workers=2)


def line(event: str, worker: str = "", generation: int = 1, **fields: object) -> dict[str, object]:
    return {"event": event, "worker_id": worker, "who": worker, "generation": generation, "pid": 1, **fields}


def steady() -> MembershipView:
    world = MembershipView()
    members = ["a.0.0", "b.0.0"]
    world.feed([line("committed", members=members), *(line("op_complete", member) for member in members)])
    return world


class Stage:
    """A scene, and what its harness has noted."""

    def __init__(self, home: Path, over: NodesJob | None) -> None:
        self._home = home
        world = steady()
        self._journal = Journal(journal_path(home, "harness"), "job", "harness", "harness")
        teller = Teller(self._journal, lambda text: None)
        self.scene = Scene(
            world,
            Victims(world, 1),
            teller,
            FailpointOrders(home / "failpoints"),
            home,
            "no mark",
            SPEC,
            steps=10,
            nodes=over,
        )

    def noted(self) -> list[dict[str, Any]]:
        return journal.read(journal_path(self._home, "harness"))

    def close(self) -> None:
        self._journal.close()


@pytest.fixture
def job(tmp_path: Path) -> NodesJob:
    """Of two nodes; nothing of it runs."""
    made = NodesJob(tmp_path / "job", SPEC, lambda job: None, {}, cuttable=False)
    made.name = "train-1"
    made.cluster = cast(
        Any,
        SimpleNamespace(
            home=tmp_path / "job" / "cluster",
            replicas={},
            ledgers=lambda name: sorted((tmp_path / "job" / "cluster").glob(f"*/{name}/steps.jsonl")),
            journals=list,
        ),
    )
    for node in made.nodes:
        made.place(node).mkdir(parents=True)
    return made


@pytest.fixture
def on_nodes(tmp_path: Path, job: NodesJob) -> Iterator[Stage]:
    stage = Stage(tmp_path, job)
    yield stage
    stage.close()


@pytest.fixture
def on_machine(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path, None)
    yield stage
    stage.close()


def skipped(stage: Stage, kind: str) -> str:
    """Why."""
    breaker = Nemesis([Planned(1, 0.0, kind, next(iter(CATALOGUE[kind].places), ""))], stage.scene)
    breaker.begin()
    breaker.poll([], 1)
    (noted,) = stage.noted()
    assert (noted["event"], noted["fault"]) == ("fault_skipped", kind)
    return str(noted["because"])


@pytest.mark.parametrize("kind", [name for name, fault in CATALOGUE.items() if fault.on_nodes])
def test_what_needs_nodes_is_skipped_on_one_machine(on_machine: Stage, kind: str) -> None:
    assert "several nodes" in skipped(on_machine, kind)


def test_a_point_that_no_worker_of_the_job_comes_to_is_not_waited_for(on_machine: Stage) -> None:
    assert 'overlap = "on"' in skipped(on_machine, "kill-in-overlap")


def test_nothing_else_is_done_before_a_script_that_was_killed_has_ended_its_worker(on_machine: Stage) -> None:
    scene = on_machine.scene
    scene.spec = replace(SPEC, restart=True)
    with subprocess.Popen(["sleep", "600"]) as script:
        started = [line("script_started", worker, script=script.pid, world=2) for worker in scene.world.members]
        scene.world.feed(started)
        breaker = Nemesis([Planned(1, 0.0, "kill-script"), Planned(2, 0.0, "kill-in-step", IN_SHARD)], scene)
        breaker.begin()
        breaker.poll([], 1)
        assert script.wait() == -signal.SIGKILL
    breaker.poll([], 1)
    (injected,) = on_machine.noted()
    scene.world.feed([line("worker_exited", injected["worker_id"])])
    breaker.poll([], 1)
    assert [(noted["event"], noted["number"]) for noted in on_machine.noted()[1:]] == [
        ("fault_seen", 1),
        ("fault_ended", 1),
        ("fault_skipped", 2),
    ]


@pytest.mark.parametrize("over", [False, True], ids=["too late", "the job ends first"])
@pytest.mark.parametrize(
    "kind", sorted(name for name, fault in CATALOGUE.items() if fault.spark and not fault.on_nodes)
)
def test_a_fault_whose_second_part_never_comes_is_incomplete(
    on_machine: Stage, monkeypatch: pytest.MonkeyPatch, kind: str, over: bool
) -> None:
    monkeypatch.setattr(signals, "send", lambda pids, number: None)
    scene, place = on_machine.scene, CATALOGUE[kind].places[0]
    members = ["a.0.0", "b.0.0", "c.0.0"]
    scene.world.feed([line("committed", "", 2, members=members), *(line("op_complete", one, 2) for one in members)])
    breaker = Nemesis([Planned(1, 0.0, kind, place)], scene)
    breaker.begin()
    breaker.poll([], 1)
    (struck,) = scene.victims.targeted
    scene.world.feed([line("worker_exited", struck)])
    if over:
        scene.world.feed([line("job_over")])
    else:
        (running,) = scene.running
        running.since_s = 0.0
    breaker.poll([], 2)
    noted = on_machine.noted()
    assert [one["event"] for one in noted] == ["fault_injected", "fault_incomplete", "fault_seen", "fault_ended"]
    assert noted[1]["number"] == 1 and place in noted[1]["because"]


def test_who_stops_itself_stands_still_since_then_however_late_the_harness_hears_of_it(on_machine: Stage) -> None:
    scene, stopped_ns = on_machine.scene, time.monotonic_ns()
    with subprocess.Popen(["sleep", "600"]) as worker:
        worker.send_signal(signal.SIGSTOP)
        breaker = Nemesis([Planned(1, 0.0, "freeze-in-step", IN_SHARD)], scene)
        breaker.begin()
        breaker.poll([], 1)
        ((_, armed),) = [running.armed for running in scene.running if running.armed]
        failpoints.fired(scene, {"number": 1, "worker_id": armed, "pid": worker.pid, "t_mono_ns": stopped_ns})
        breaker.heal("the test is over")
        worker.kill()
    injected = on_machine.noted()[0]
    assert (injected["event"], injected["worker_id"], injected["t_mono_ns"]) == ("fault_injected", armed, stopped_ns)


@pytest.mark.parametrize(
    ("place", "spec", "on_nodes", "why"),
    [
        (EARLY_SENT, SPEC, True, ""),
        (EARLY_SENT, replace(SPEC, overlap=Overlap.ON), False, ""),
        (EARLY_SENT, replace(SPEC, overlap=Overlap.OFF), True, 'overlap = "on"'),
        (IN_REPETITION, SPEC, True, 'reduction = "fixed"'),
        (IN_REPETITION, replace(SPEC, reduction=Reduction.FIXED64), False, ""),
        (IN_SHARD, SPEC, False, ""),
        (IN_SHARD, replace(SPEC, restart=True), False, "a script in rounds"),
        (SEGMENT_KEPT, replace(SPEC, restart=True), False, ""),
        (SEGMENT_KEPT, SPEC, False, "say --restart"),
    ],
)
def test_which_points_a_job_has(place: str, spec: JobSpec, on_nodes: bool, why: str) -> None:
    told = never_reached(place, spec, on_nodes=on_nodes)
    assert why in told and bool(why) == bool(told)


@pytest.mark.parametrize(
    ("answers", "events"),
    [
        (("FAILED_PRECONDITION", "UNAUTHENTICATED"), ["fault_injected", "fault_seen", "fault_ended"]),
        (("welcome", "FAILED_PRECONDITION"), ["fault_injected", "fault_ended"]),
    ],
    ids=["refused", "admitted"],
)
def test_an_intruder_that_is_admitted_is_a_fault_that_was_never_seen(
    on_nodes: Stage, job: NodesJob, monkeypatch: pytest.MonkeyPatch, answers: tuple[str, ...], events: list[str]
) -> None:
    asked: list[tuple[str, str, str]] = []

    def attend(replicas: tuple[str, ...], name: str, node: str, token: str) -> dict[str, str]:
        asked.append((name, node, token))
        return dict(zip(replicas, answers, strict=True))

    monkeypatch.setattr(nodes, "attend", attend)
    job.cluster.client = cast(Any, SimpleNamespace(replicas=("r0", "r1")))
    breaker = Nemesis([Planned(1, 0.0, "intrude")], on_nodes.scene)
    breaker.begin()
    for _ in range(2):
        breaker.poll([], 1)
    assert [line["event"] for line in on_nodes.noted()] == events
    assert (asked[0][0], asked[0][1] in job.nodes, len(asked[0][2])) == ("train-1", True, 64)
    answers = ("UNAVAILABLE", "FAILED_PRECONDITION")
    with pytest.raises(NotNow, match="nobody who leads answers"):
        nodes.intrude(on_nodes.scene, Planned(1, 0.0, "intrude"))


@pytest.mark.parametrize("kind", [name for name, fault in CATALOGUE.items() if fault.ground is Ground.MACHINE])
def test_what_needs_one_machine_is_skipped_on_nodes(on_nodes: Stage, kind: str) -> None:
    assert "of one machine" in skipped(on_nodes, kind)


def test_a_link_is_not_cut_where_none_can_be(on_nodes: Stage) -> None:
    assert "cannot be cut" in skipped(on_nodes, "cut-pair")


# --------------------------------------------------------------------------------------------------------- notices


class Cloud:
    """What its one node is told, and what is done to that node, in order."""

    choice = "aws"

    def __init__(self) -> None:
        self.log: list[str] = []

    def reclaim(self, within_s: float) -> None:
        self.log.append(f"goes in {within_s:g} s")

    def withdraw(self) -> None:
        self.log.append("stays")


@pytest.mark.parametrize(
    ("true", "ends"), [(True, ["goes in 0 s", "SIGKILL", "stays", "another one"]), (False, ["goes in 0 s", "stays"])]
)
def test_a_notice_ends_when_the_workers_have_left(on_nodes: Stage, job: NodesJob, true: bool, ends: list[str]) -> None:
    cloud = Cloud()
    cluster = cast(Any, job.cluster)
    cluster.clouds = {"a": cloud, "b": cloud}
    cluster.end = lambda name: cloud.log.append("SIGKILL")
    cluster.node = lambda name: cloud.log.append("another one")
    scene = on_nodes.scene
    nodes.notice_node(scene, Planned(1, 0.0, "notice-node", for_s=0.0), true=true)
    (told,) = on_nodes.noted()
    assert told["event"] == "fault_injected" and not told["lethal"], "a worker that leaves is no loss"
    breaker = Nemesis([], scene)
    breaker.poll([], 1)
    assert cloud.log == ["goes in 0 s"]
    scene.world.ended.add(told["worker_id"])
    breaker.poll([], 1)
    assert cloud.log == ends
    assert [noted["event"] for noted in on_nodes.noted()] == ["fault_injected", "fault_seen", "fault_ended"]


# ----------------------------------------------------------------------------------------------------- checkpoints


def checkpoint(series: Series, step: int, content: bytes) -> EntryName:
    name = EntryName.parse(f"step-{step:012}.0.g1-c105d2d3")
    assert name is not None
    put(series.storage, series.path(name, "part-0"), content)
    file = FileEntry("part-0", len(content), hashlib.sha256(content).hexdigest())
    moment = Moment(step=step, epoch=0, epoch_start=0, seed=0, shards=1)
    about = {"job": "train", "job_id": "feed", "series": "_periodic", "taken": "2026-01-01T00:00:00Z"}
    manifest = Manifest(entry=str(name), moment=moment, generation=1, world=1, files=(file,), header=NO_STATE, **about)
    series.publish(manifest)
    return name


@pytest.fixture
def series(job: NodesJob, tmp_path: Path) -> Series:
    """Of the job, whose nodes keep a snapshot in memory too."""
    for node in job.nodes:
        memory = tmp_path / f"memory-{node}"
        (memory / "_periodic" / "step-2").mkdir(parents=True)
        settings = Settings(root=str(tmp_path / "checkpoints"), job_id="feed", memory=str(memory))
        (job.place(node) / "checkpoints.json").write_text(json.dumps(asdict(settings)))
    return Series(LocalStorage(str(tmp_path / "checkpoints")))


OLDER, NEWER = bytes([7] * 1000), bytes(1000)


@pytest.mark.parametrize(
    ("harm", "left"),
    [
        (Damage.FLIPPED, bytes([*NEWER[:500], 1, *NEWER[501:]])),
        (Damage.TRUNCATED, NEWER[:500]),
        (Damage.SWAPPED, OLDER),
        (Damage.UNLISTED, NEWER),
    ],
)
def test_the_newest_checkpoint_is_damaged_and_no_memory_is_left(
    on_nodes: Stage, job: NodesJob, series: Series, tmp_path: Path, harm: Damage, left: bytes
) -> None:
    older, newer = checkpoint(series, 3, OLDER), checkpoint(series, 7, NEWER)
    assert checkpoint_damage.spoil(on_nodes.scene, job, harm) == str(newer)
    assert series.storage.read(series.path(newer, "part-0")) == left
    assert series.verify(series.look(newer)).problem
    assert not series.verify(series.look(older)).problem
    assert [list((tmp_path / f"memory-{node}").iterdir()) for node in job.nodes] == [[], []]


def test_two_checkpoints_that_are_equal_are_not_swapped(on_nodes: Stage, job: NodesJob, series: Series) -> None:
    _, newer = checkpoint(series, 3, NEWER), checkpoint(series, 7, NEWER)
    with pytest.raises(NotNow, match="no file that differs"):
        checkpoint_damage.spoil(on_nodes.scene, job, Damage.SWAPPED)
    assert not series.verify(series.look(newer)).problem


def test_a_checkpoint_that_is_damaged_already_is_not_damaged_again(
    on_nodes: Stage, job: NodesJob, series: Series
) -> None:
    older, newer = checkpoint(series, 3, b"abc"), checkpoint(series, 7, bytes(1000))
    checkpoint_damage.spoil(on_nodes.scene, job, Damage.FLIPPED)
    with pytest.raises(NotNow):
        checkpoint_damage.spoil(on_nodes.scene, job, Damage.FLIPPED)
    assert "damaged" in series.verify(series.look(newer)).problem
    assert not series.verify(series.look(older)).problem


def test_a_loss_of_all_lasts_until_all_are_at_work_again_and_who_begins_meanwhile_is_hit_too(on_nodes: Stage) -> None:
    scene = on_nodes.scene
    lost = RunningFault(Planned(1, 0.0, "corrupt-checkpoint"), 0.0, hit={"a.0.0", "b.0.0"}, injected=True)
    lost.reach, lost.until_steady = frozenset("ab"), True
    scene.running.append(lost)
    breaker = Nemesis([], scene)

    def hear(*lines: dict[str, object]) -> list[str]:
        told = [{**one, "t_mono_ns": 1} for one in lines]
        scene.world.feed(told)
        breaker.poll(told, 1)
        return [noted["event"] for noted in on_nodes.noted()]

    gone = [line(event, worker) for worker in ("a.0.0", "b.0.0") for event in ("member_lost", "worker_exited")]
    assert hear(*gone) == ["fault_seen"]
    assert hear(line("worker_started", "a.0.1"), line("committed", "", 2, members=["a.0.1"])) == [
        "fault_seen",
        "fault_held",
    ]
    assert hear(line("op_complete", "a.0.1", 2))[2:] == ["fault_ended"]


@pytest.mark.parametrize("began", [3, 0])
def test_a_checkpoint_is_damaged_only_if_the_job_can_go_on_from_the_one_before(
    on_nodes: Stage, job: NodesJob, series: Series, began: int
) -> None:
    newer = checkpoint(series, 7, b"abc")
    if began:
        checkpoint(series, began, b"abc")
        on_nodes.scene.world.began_step = began
    with pytest.raises(NotNow):
        checkpoint_damage.spoil(on_nodes.scene, job, Damage.FLIPPED)
    assert not series.verify(series.look(newer)).problem


def test_all_are_lost_only_if_something_newer_is_kept(on_nodes: Stage) -> None:
    assert on_nodes.scene.victims.healthy() == ["a.0.0", "b.0.0"]
    with pytest.raises(NotNow, match="nothing is kept"):
        nodes.lose_all(on_nodes.scene, Planned(1, 0.0, "kill-all"))
    on_nodes.scene.world.feed(
        [line("snapshot_complete", "a.0.0", series="_periodic", entry="step-000000000005.0.g1-c105d2d3")]
    )
    assert on_nodes.scene.world.kept_step == 5
    on_nodes.scene.world.lose_all()
    on_nodes.scene.world.feed(
        [line("snapshot_complete", "a.0.0", series="_periodic", entry="step-000000000006.0.g1-c105d2d3")]
    )
    assert on_nodes.scene.world.kept_step == 0, "it is of before, and heard of late"
    on_nodes.scene.world.feed(
        [line("snapshot_complete", "a.0.0", series="_periodic", entry="step-000000000006.0.g2-c105d2d3")]
    )
    assert on_nodes.scene.world.kept_step == 6
    on_nodes.scene.victims.targeted.add("b.0.0")
    with pytest.raises(NotNow, match="healthy"):
        nodes.lose_all(on_nodes.scene, Planned(1, 0.0, "kill-all"))


def test_all_that_hold_the_state_are_hit_once_a_replacement_is_fresh(
    on_nodes: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, planned = on_nodes.scene, Planned(1, 0.0, "fresh-quorum", place="announced")
    hit: list[list[int]] = []
    monkeypatch.setattr(signals, "send", lambda pids, number: hit.append(list(pids)))
    with pytest.raises(NotNow, match="nothing is kept"):
        nodes.lose_holders(scene, planned)
    scene.world.feed([line("snapshot_complete", "a.0.0", series="_periodic", entry="step-000000000005.0.g1-c105d2d3")])
    scene.world.pids.update({"a.0.0": 11, "b.0.0": 12})
    nodes.lose_holders(scene, planned)
    (first,) = scene.victims.targeted
    left = ({"a.0.0", "b.0.0"} - {first}).pop()
    breaker = Nemesis([], scene)

    def hear(*lines: dict[str, object]) -> None:
        told = [{**one, "t_mono_ns": 1} for one in lines]
        scene.world.feed(told)
        breaker.poll(told, 1)

    hear(line("member_lost", first), line("worker_exited", first))
    assert len(hit) == 1 and scene.world.kept_step == 5, "no replacement has come"
    hear({**line("announced", first.replace(".0.0", ".0.1"), entered=0), "pid": 13})
    assert hit[1:] == [[scene.world.pids[left]]] and scene.world.kept_step == 0


def test_all_are_lost_only_if_no_node_is_away(on_nodes: Stage) -> None:
    world = on_nodes.scene.world
    world.feed([line("member_lost", "b.0.0"), line("committed", "", 2, members=["a.0.0"])])
    world.feed([line("op_complete", "a.0.0", 2)])
    assert (on_nodes.scene.victims.healthy(), world.steady) == (["a.0.0"], True)
    with pytest.raises(NotNow, match="nodes"):
        nodes.lose_all(on_nodes.scene, Planned(1, 0.0, "kill-all"))


# ---------------------------------------------------------------------------------------------------------- memory


@contextmanager
def process(script: str) -> Iterator[subprocess.Popen[bytes]]:
    """Once the script has said something."""
    words = [sys.executable, "-S", "-u", "-c", f"import time\n{script}"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as made:
        assert made.stdout is not None and made.stdout.readline()
        yield made
        made.kill()


cgroups = pytest.mark.skipif(bool(why := out_of_memory.why_not()), reason=why)


def test_who_does_not_end_when_it_is_asked_to_is_killed_after_its_grace(
    on_machine: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the fault has ended only when the agent has seen it."""
    hasty = replace(CATALOGUE["terminate"], given={"number": signal.SIGTERM, "grace_s": 0.2})
    monkeypatch.setitem(cast(Any, CATALOGUE), "terminate", hasty)
    deaf = "import signal\nsignal.signal(15, lambda *_: print())\nprint()\nwhile True: time.sleep(600)"
    with process(deaf) as one, process(deaf) as other:
        world = on_machine.scene.world
        world.pids = {"a.0.0": one.pid, "b.0.0": other.pid}
        breaker = Nemesis([Planned(1, 0.0, "terminate")], on_machine.scene)
        breaker.begin()
        breaker.poll([], 1)
        ((hit, pid),) = [(noted["worker_id"], noted["pid"]) for noted in on_machine.noted()]
        struck = one if pid == one.pid else other
        assert struck.stdout is not None and struck.stdout.readline(), "it was asked first"
        while struck.poll() is None:
            breaker.poll([], 1)
        assert [noted["event"] for noted in on_machine.noted()] == ["fault_injected"]
        world.ended.add(hit)
        breaker.poll([], 1)
        assert [noted["event"] for noted in on_machine.noted()] == ["fault_injected", "fault_seen", "fault_ended"]
        assert (one.poll(), other.poll()).count(None) == 1


def test_what_cannot_be_ended_now_is_ended_later(on_machine: Stage) -> None:
    tries: list[int] = []

    def end() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise NotNow("nobody leads")

    scene = on_machine.scene
    scene.lasts(Planned(1, 0.0, "kill-leader", for_s=0.0), end, "")
    breaker = Nemesis([], scene)
    for _ in range(5):
        breaker.poll([], 1)
    assert len(tries) == 3
    assert [noted["event"] for noted in on_machine.noted()] == ["fault_seen", "fault_ended"]


@cgroups
def test_a_process_for_which_there_is_no_memory_is_killed_by_the_kernel() -> None:
    with process("held = []\nprint()\nwhile True: held.append(bytes(4096)); time.sleep(0.0001)") as hungry:
        before_ns = time.monotonic_ns()
        assert before_ns < out_of_memory.starve(hungry.pid) < time.monotonic_ns()
        assert hungry.wait() == -signal.SIGKILL
    assert not list(out_of_memory.ROOT.glob("*/chaos-*"))


@cgroups
def test_a_process_that_asks_for_no_memory_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out_of_memory, "WAIT_S", 0.1)
    with process("print()\ntime.sleep(600)") as modest:
        home = Path(f"/proc/{modest.pid}/cgroup").read_text()
        with pytest.raises(Impossible, match="asked for no memory"):
            out_of_memory.starve(modest.pid)
        assert Path(f"/proc/{modest.pid}/cgroup").read_text() == home
        assert modest.poll() is None
    assert not list(out_of_memory.ROOT.glob("*/chaos-*"))


def test_a_machine_without_memory_cgroups_says_so(tmp_path: Path) -> None:
    assert "no memory cgroups" in out_of_memory.why_not(tmp_path)
    (tmp_path / "memory" / "memory.limit_in_bytes").mkdir(parents=True)
    assert "do not limit memory" in out_of_memory.why_not(tmp_path)
    assert [path.name for path in (tmp_path / "memory").iterdir()] == ["memory.limit_in_bytes"]


# -------------------------------------------------------------------------------------------------- what is left


def told(step: int, generation: int, loss: float = 1.0) -> dict[str, object]:
    scalars = {"loss": loss}
    return {"step": step, "epoch": 0, "generation": generation, "world_size": 2, "lr": [], "scalars": scalars}


def put_ledger(job: NodesJob, node: str, *lines: Mapping[str, object]) -> None:
    text = "".join(json.dumps(one) + "\n" for one in lines)
    (job.place(node) / "steps.jsonl").write_text(text)


def test_of_a_step_that_was_done_again_the_first_line_counts(job: NodesJob) -> None:
    put_ledger(job, "a", told(0, 1), told(1, 5))
    put_ledger(job, "b", told(1, 1), told(2, 5))
    job.gather()
    lines = [json.loads(text) for text in (job.dir / "steps.jsonl").read_text().splitlines()]
    assert [(one["step"], one["generation"]) for one in lines] == [(0, 1), (1, 1), (2, 5)]


@pytest.mark.parametrize(
    ("other", "said"), [(json.dumps(told(0, 1, loss=2.0)), "step 0 differs in scalars"), ("{", "line 1 is damaged")]
)
def test_two_nodes_that_tell_a_step_differently_leave_what_they_have_and_the_difference(
    job: NodesJob, other: str, said: str
) -> None:
    put_ledger(job, "a", told(0, 1), told(1, 1))
    (job.place("b") / "steps.jsonl").write_text(f"{other}\n")
    job.gather()
    assert [json.loads(text)["step"] for text in (job.dir / "steps.jsonl").read_text().splitlines()] == [0, 1]
    (noted,) = journal.read_all(job.dir)
    assert noted["event"] == "ledgers_differ" and said in noted["because"]


def test_a_job_over_nodes_has_ended_when_one_of_them_was_told(job: NodesJob) -> None:
    assert job.exit_code() is None
    (job.place("b") / "result.json").write_text(json.dumps({"exit_code": 4}))
    assert job.exit_code() == 4


def test_daemons_may_stay_when_a_job_has_ended_but_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "living", lambda mark: {os.getpid()})
    monkeypatch.setattr(resources, "GONE_S", 0.1)
    monkeypatch.setattr(resources, "ENDS_S", 0.1)
    before = resources.Before.now(tmp_path)
    assert resources.left("mark", set(), tmp_path, before, frozenset({os.getpid()})) == ()
    (tmp_path / "x").touch()
    assert resources.left("mark", set(), tmp_path, before, frozenset({os.getpid()})) == ("temporary x is left",)
    (found, _) = resources.left("mark", set(), tmp_path, before)
    assert found.startswith(f"process {os.getpid()} is left")
