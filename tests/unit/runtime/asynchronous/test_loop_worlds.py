"""The loop in worlds of several workers: what each of them has of its own between two phases."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from elastic.agent.worker.node_notice import NodeNotice
from elastic.checkpoints.series import Series
from elastic.checkpoints.settings import Settings
from elastic.checkpoints.storage import storage_at
from elastic.errors import BufferChanged
from elastic.protocol.local_phase import LOST, PIECES_FELL_BACK
from runtime.asynchronous import Asynchronous, Gossip, asynchronous, loop
from runtime.asynchronous.local_training import LocalTraining
from runtime.asynchronous.loop import LocalPhase
from runtime.loop.training.calls import Calls
from runtime.loop.training.vector_sums import VectorSums
from runtime.session import Session
from tests.unit.jobs import cross_entropy, dataset, make_job
from tests.unit.runtime.asynchronous.loop_world import world_of
from tests.unit.worlds import FakeMember, Killed, World

SHARDS, EVERY, ROUNDS = 4, 3, 6
RATE, GAMMA = 0.1, 0.9


class Rates:
    """A job whose scheduler makes a learning rate of the one before, once in each inner step."""

    def __init__(self, kind: type[LocalTraining], checkpoints: Settings | None = None, phase_s: float = 1e-9) -> None:
        self.kind, self.checkpoints, self.phase_s = kind, checkpoints, phase_s
        self.steps: SimpleQueue[tuple[str, int, float]] = SimpleQueue()
        """Worker, inner steps that its scheduler counts, learning rate behind them."""
        self.evaluated: SimpleQueue[float] = SimpleQueue()

    def script(self, session: Session) -> str:
        job = make_job(session, checkpoints=self.checkpoints)
        torch.manual_seed(0)
        model = torch.nn.Linear(6, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, GAMMA)
        outer = self.kind(model, optimizer, every=EVERY)
        test = dataset(16)
        train = job.loader(dataset(48), 8, shards=SHARDS)
        job.register(model=model, optimizer=optimizer, scheduler=scheduler, outer=outer)
        for phase in asynchronous(job, train, outer=outer, total=ROUNDS, phase_s=self.phase_s):
            for x, y in phase:
                cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                for _ in range(1 + job.rank):  # each worker counts for itself
                    scheduler.step()
                self.steps.put((job.worker_id, scheduler.last_epoch, optimizer.param_groups[0]["lr"]))
            self.evaluated.put(job.evaluate(lambda x, y: {"loss": cross_entropy(model(x), y)}, test)["loss"])
        digest = job.digest()
        job.close()
        return digest

    def check(self) -> set[str]:
        """Each learning rate is what the scheduler has counted. Returns the workers."""
        seen = [self.steps.get() for _ in range(self.steps.qsize())]
        for worker, count, rate in seen:
            assert rate == pytest.approx(RATE * GAMMA**count), f"{worker} after {count}"
        assert self.evaluated.qsize() > 0
        return {worker for worker, _, _ in seen}


def run(world: World, job: Rates, **joins: int) -> None:
    world.run(job.script, **joins)
    for error in world.errors.values():
        raise error
    assert len(set(world.digests.values())) == 1


def lines_are_equal(world: World) -> None:
    """All workers send the same lines to the ledger."""
    members = [session for session in world.sessions.values() if isinstance(session, FakeMember)]
    first = {record.step: record for record in members[0].records}
    for member in members:
        for record in member.records:
            assert (record.lr, record.scalars) == (first[record.step].lr, first[record.step].scalars)


@pytest.mark.parametrize("kind", [Asynchronous, Gossip])
def test_each_worker_has_its_own_learning_rates(kind: type[LocalTraining], monkeypatch: pytest.MonkeyPatch) -> None:
    job, world = Rates(kind), world_of(3, monkeypatch)
    run(world, job)
    assert job.check() == {"w0", "w1", "w2"}
    lines_are_equal(world)


@pytest.mark.parametrize("admit_at", [2, 4])
def test_a_newcomer_has_the_rates_and_schedulers_of_one_worker(admit_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 4 it copies the state of an earlier phase, and takes over the results since then."""
    job, world = Rates(Asynchronous), world_of(2, monkeypatch)
    run(world, job, newcomers=1, asked_at=1, copy_at=2, admit_at=admit_at)
    assert job.check() == {"w0", "w1", "n0"}
    lines_are_equal(world)


def test_a_resumed_job_goes_on_with_its_learning_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taking = Settings(root=str(tmp_path), every="4 steps", keep="last 100")
    run(world_of(2, monkeypatch), Rates(Asynchronous, taking))
    entry = Series(storage_at(str(tmp_path))).names()[0]
    job = Rates(Asynchronous, Settings(root=str(tmp_path), resume=str(entry)))
    world = world_of(2, monkeypatch)
    run(world, job, newcomers=1, asked_at=5, copy_at=5, admit_at=5)
    assert job.check() == {"w0", "w1", "n0"}


def test_a_phase_ends_at_once_for_a_worker_that_has_to_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only when the last end of a phase has paid: its node has little time."""
    lines = {}
    for leaver in ("", "w1"):
        job, world = Rates(Asynchronous, phase_s=60.0), world_of(3, monkeypatch, due=True)
        monkeypatch.setattr(loop, "WINDOW_S", 1e6)
        monkeypatch.setattr(FakeMember, "going", property(partial(goes, leaver)))
        run(world, job)
        job.check()
        lines[leaver] = len(world.sessions["w0"].records)
    assert lines[""] <= 3 and lines["w1"] > 6


def goes(leaver: str, session: FakeMember) -> NodeNotice | None:
    return (
        NodeNotice.begins(30.0, "it is reclaimed", "spot", "a test", signalled=False)
        if session.worker_id == leaver
        else None
    )


class Moments:
    """A job with AdamW, and how many steps its state counts before each inner step."""

    def __init__(self, kind: type[LocalTraining], shards: int, total: int, checkpoints: Settings) -> None:
        self.kind, self.shards, self.total, self.checkpoints = kind, shards, total, checkpoints
        self.counted: SimpleQueue[tuple[str, int]] = SimpleQueue()
        """Worker, steps; 0: there is no state."""

    def script(self, session: Session) -> str:
        job = make_job(session, checkpoints=self.checkpoints)
        torch.manual_seed(0)
        model = torch.nn.Linear(6, 64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        outer = self.kind(model, optimizer, every=EVERY)
        train = job.loader(dataset(48), 8, shards=self.shards)
        job.register(model=model, optimizer=optimizer, outer=outer)
        for phase in asynchronous(job, train, outer=outer, total=self.total, phase_s=1e-9):
            for x, y in phase:
                self.counted.put((job.worker_id, int(optimizer.state[model.weight].get("step", 0))))
                cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert not optimizer.state, "between two phases it is nobody's"
        digest = job.digest()
        job.close()
        return digest

    def run(self, world: World) -> dict[str, list[int]]:
        world.run(self.script)
        assert world.errors == {}
        found: dict[str, list[int]] = {}
        while not self.counted.empty():
            worker, steps = self.counted.get()
            found.setdefault(worker, []).append(steps)
        return found


@pytest.mark.parametrize("kind", [Asynchronous, Gossip])
def test_a_checkpoint_has_no_moments_of_which_each_worker_has_others(
    kind: type[LocalTraining], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers write it in parts: it would have parts of all of them; and a worker that has had no unit has none."""
    settings = Settings(root=str(tmp_path), every="1 steps", keep="last 100")
    counted = Moments(kind, 2, 2, settings).run(world_of(3, monkeypatch))
    assert counted["w0"] == list(range(len(counted["w0"]))), "each worker goes on with its own in the next phase"
    entries = Series(storage_at(str(tmp_path))).names()
    assert entries
    for entry in entries[:2]:
        resumed = Settings(root=str(tmp_path), resume=str(entry))
        assert Moments(kind, 2, 2, resumed).run(world_of(1, monkeypatch)).get("w0", [0])[0] == 0


class Statistics:
    """A job with BatchNorm, and buffers with declared rules, of which each worker has its own within a phase."""

    def __init__(self, broken: str = "", kind: type[LocalTraining] = Asynchronous) -> None:
        """broken: a worker whose statistics become NaN in each phase."""
        self.broken, self.kind = broken, kind
        self.outers: dict[str, LocalTraining] = {}
        self.own: SimpleQueue[tuple[int, str, list[float], float, int]] = SimpleQueue()
        """Phase, worker, running mean, declared buffer and counter behind each of its inner steps."""
        self.common: SimpleQueue[tuple[int, str, list[float], float, int]] = SimpleQueue()
        """The same behind the phase."""

    def script(self, session: Session) -> str:
        job = make_job(session)
        torch.manual_seed(0)
        norm = torch.nn.BatchNorm1d(6)
        model = torch.nn.Sequential(norm, torch.nn.Linear(6, 2))
        mine = torch.zeros(())
        model.register_buffer("mine", mine)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        self.outers[job.worker_id] = outer = self.kind(model, optimizer, every=EVERY)
        train = job.loader(dataset(48), 8, shards=SHARDS)
        job.register(model=model, optimizer=optimizer, outer=outer, buffers={"model.mine": "first"})

        def seen(phase: int) -> tuple[int, str, list[float], float, int]:
            assert norm.running_mean is not None and norm.num_batches_tracked is not None
            return phase, job.worker_id, norm.running_mean.tolist(), float(mine), int(norm.num_batches_tracked)

        for phase in asynchronous(job, train, outer=outer, total=ROUNDS, phase_s=1e-9):
            for x, y in phase:
                cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    mine.fill_(1 + job.rank)
                    if job.worker_id == self.broken and norm.running_mean is not None:
                        norm.running_mean[0] = torch.nan
                self.own.put(seen(phase.index))
            self.common.put(seen(phase.index))
        digest = job.digest()
        job.close()
        return digest

    def run(self, world: World) -> None:
        """Check what is common behind each phase."""
        world.run(self.script)
        assert world.errors == {}
        assert len(set(world.digests.values())) == 1
        own = {(phase, worker): rest for phase, worker, *rest in drained(self.own)}
        phases = {phase for phase, _ in own}
        assert len(phases) > 3
        for phase, _, mean, mine, counted in drained(self.common):
            those = {worker: rest for (at, worker), rest in own.items() if at == phase}
            counts = [torch.tensor(rest[0]) for worker, rest in those.items() if worker != self.broken]
            if counts:
                assert torch.allclose(torch.tensor(mean), torch.stack(counts).mean(0), atol=1e-6)
            if "w0" in those:
                assert (mine, counted) == (those["w0"][1], those["w0"][2]), "the whole buffer of the oldest worker"


def drained(
    queue: SimpleQueue[tuple[int, str, list[float], float, int]],
) -> list[tuple[int, str, list[float], float, int]]:
    return [queue.get() for _ in range(queue.qsize())]


@pytest.mark.parametrize("kind", [Asynchronous, Gossip])
def test_statistics_are_the_mean_of_all_workers_behind_a_phase(
    kind: type[LocalTraining], monkeypatch: pytest.MonkeyPatch
) -> None:
    Statistics(kind=kind).run(world_of(3, monkeypatch))


def test_a_worker_that_begins_its_phase_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates that it has to mirror are committed behind its beginning, those of their owner, too."""
    world, begin = world_of(3, monkeypatch), Asynchronous.begin_phase

    def begin_phase(outer: Asynchronous, phase: int, roster: list[str], *, in_step: bool) -> None:
        if outer is statistics.outers["w2"]:
            world.lock.wait(0.05)
        begin(outer, phase, roster, in_step=in_step)

    statistics = Statistics()
    monkeypatch.setattr(Asynchronous, "begin_phase", begin_phase)
    statistics.run(world)


def test_statistics_with_a_nan_are_those_of_no_other_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    Statistics(broken="w1").run(world_of(3, monkeypatch))
    alone = Statistics(broken="w0")
    world = world_of(1, monkeypatch)
    world.run(alone.script)
    assert world.errors == {}
    assert all(not any(map(math.isnan, mean)) for _, _, mean, _, _ in drained(alone.common))


class Undeclared:
    """A job whose body changes a buffer of which nobody has said how to merge it."""

    def script(self, session: Session) -> str:
        job = make_job(session)
        model, mine = torch.nn.Linear(6, 2), torch.zeros(())
        model.register_buffer("mine", mine)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        outer = Asynchronous(model, optimizer, every=EVERY)
        train = job.loader(dataset(48), 8, shards=SHARDS)
        job.register(model=model, optimizer=optimizer, outer=outer)
        for phase in asynchronous(job, train, outer=outer, total=ROUNDS, phase_s=1e-9):
            for x, y in phase:
                cross_entropy(model(x), y).backward()
                optimizer.step()
                mine.fill_(1 + job.rank)
        return ""


def test_a_buffer_that_changes_must_be_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of(2, monkeypatch)
    world.run(Undeclared().script)
    assert {type(error) for error in world.errors.values()} == {BufferChanged}
    assert "register(buffers=" in str(world.errors["w0"])


@pytest.mark.parametrize("kind", [Asynchronous, Gossip])
def test_who_leaves_behind_the_sum_of_a_phase_has_lost_nothing(
    kind: type[LocalTraining], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As planned: the change takes effect behind any operation. The leaver has said before what it has done."""
    job, world = Rates(kind), world_of(3, monkeypatch)
    whole = VectorSums.sum
    made: SimpleQueue[int] = SimpleQueue()

    def left_behind_it(sums: VectorSums, label: str, *others: Any) -> Any:
        found = whole(sums, label, *others)
        if label.startswith("phase 3,") and world.sessions["w2"] is sums._calls._session:
            raise Killed("w2")
        return found

    def counted(phase: LocalPhase, unit: int) -> Any:
        if phase._phases.inner == 0:
            made.put(unit)
        return batch(phase, unit)

    batch = LocalPhase._batch
    monkeypatch.setattr(VectorSums, "sum", left_behind_it)
    monkeypatch.setattr(LocalPhase, "_batch", counted)
    world.run(job.script)
    assert {name: type(error) for name, error in world.errors.items()} == {"w2": Killed}
    records = world.sessions["w0"].records
    assert sum(record.scalars[LOST] for record in records) == 0
    units = Counter(made.get() for _ in range(made.qsize()))
    assert units.keys() == set(range(SHARDS * ROUNDS))
    assert units.total() <= SHARDS * ROUNDS + 1, "only the unit that it was at is trained again"


def test_whoever_has_left_and_is_taken_back_says_what_may_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has heard that it may go, behind the call with which the phase begins; then all others have died."""
    job, world = Rates(Asynchronous), world_of(1, monkeypatch)
    hooks: SimpleQueue[Any] = SimpleQueue()
    calls = 0

    def before_leaving(session: FakeMember, call: Any) -> None:
        hooks.put(call)

    def put_back(outer: Asynchronous, own: Any) -> None:
        fell_back.put(list(outer._fell_back))
        back(outer, own)

    def collective(these: Calls, kind: Any, label: str, *others: Any) -> Any:
        nonlocal calls
        found = together(these, kind, label, *others)
        calls += label == "roster"
        if label == "roster" and calls == 3:
            hooks.get()()
        return found

    together, back = Calls.collective, Asynchronous.put_back
    fell_back: SimpleQueue[list[Any]] = SimpleQueue()
    monkeypatch.setattr(FakeMember, "before_leaving", before_leaving)
    monkeypatch.setattr(Asynchronous, "put_back", put_back)
    monkeypatch.setattr(Calls, "collective", collective)
    run(world, job)
    fallen = [bool(fell_back.get()) for _ in range(fell_back.qsize())]
    assert fallen[:4] == [False, False, True, False]
    session = world.sessions["w0"]
    assert [event for event, _ in session.notes].count("pieces_fell_back") == 1
    assert sum(record.scalars.get(PIECES_FELL_BACK, 0.0) for record in session.records) > 0
