"""Rounds with a quorum: late replicas count with the inner steps that they have made, dead ones are not computed again,
and newcomers begin with the outer parameters. The decisions are in tests/unit/elastic/protocol/test_outer_round.py."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic.checkpoints.series import Series
from elastic.checkpoints.settings import Settings
from elastic.checkpoints.storage import storage_at
from elastic.config import Moments
from elastic.errors import ConfigError
from runtime.loop.job import Job
from runtime.outer import DiLoCo, LocalSGD
from runtime.session import Session
from tests.unit.jobs import Recorded, cross_entropy, dataset, make_job
from tests.unit.runtime.outer.outer_jobs import MakeOuter, OuterJob, Seen, small
from tests.unit.thoroughness import EXAMPLES
from tests.unit.worlds import Killed, World

INNER_STEPS = 3
REPLICAS = 4
STEPS = 6


def op_of(step: int) -> int:
    """The operation of a step: the first one compares the initial states."""
    return step + 1


def with_quorum(least: int = 1, **options: Any) -> MakeOuter:
    chosen = {"every": INNER_STEPS} | options
    return lambda model, optimizer: DiLoCo(model, optimizer, **chosen).with_quorum(least)


def run(
    job: OuterJob,
    workers: int,
    late: Iterable[tuple[str, int]] = (),
    kills: dict[str, tuple[int, int]] | None = None,
    *,
    dies_amid: bool = False,
    **joins: int,
) -> World:
    """late: worker and step. dies_amid: as in World."""
    world = World(workers, kills)
    world.dies_amid = dies_amid
    world.late = {(worker, op_of(step)) for worker, step in late}
    world.run(job.script, **joins)
    for name, error in world.errors.items():
        if name not in (kills or {}) or not isinstance(error, Killed):
            raise error
    return world


def seen_of(job: OuterJob, name: str) -> list[dict[str, float]]:
    """By step: what became of the replicas, as the worker saw it."""
    return [
        {key.removeprefix("elastic."): metrics[key] for key in metrics if key.split(".")[-1] in COUNTED}
        for metrics in job.seen[name].metrics
    ]


COUNTED = ("replicas", "late", "lost", "inner_steps")


def test_each_worker_is_one_replica() -> None:
    for workers in (1, 3, 4, 6):  # of six, two have no replica
        job = OuterJob(with_quorum())
        world = run(job, workers)
        assert len(set(world.digests.values())) == 1
        replicas = min(workers, REPLICAS)
        steps = {"replicas": replicas, "late": 0, "lost": 0, "inner_steps": replicas * INNER_STEPS}
        for name in world.digests:
            assert seen_of(job, name) == [steps] * STEPS


@pytest.mark.parametrize("delay", [0, 2])
def test_a_late_replica_counts_with_the_inner_steps_that_it_has_made(delay: int) -> None:
    job = OuterJob(with_quorum(2, delay=delay))
    world = run(job, 3, late=[("w1", 2), ("w2", 4), ("w1", 4)])
    assert len(set(world.digests.values())) == 1
    for name in world.digests:
        seen = seen_of(job, name)
        assert [one["late"] for one in seen] == [0, 0, 1, 0, 2, 0]
        assert [one["inner_steps"] for one in seen] == [9, 9, 7, 9, 5, 9]
        assert all(one["replicas"] == 3 and one["lost"] == 0 for one in seen)
        samples = [metrics["samples"] for metrics in job.seen[name].metrics]
        assert [2 * one["inner_steps"] for one in seen] == samples


def test_schedulers_count_the_inner_steps_of_a_replica_that_made_all() -> None:
    quiet, job = OuterJob(with_quorum()), OuterJob(with_quorum())
    run(quiet, 3)
    run(job, 3, late=[("w0", 1), ("w0", 3), ("w2", 3)])
    assert {tuple(seen.rates) for seen in job.seen.values()} == {tuple(quiet.seen["w0"].rates)}


def test_a_round_in_which_no_replica_made_all_inner_steps_leaves_schedulers_alone() -> None:
    """Those with all their steps have died after the others were told to stop."""
    job = OuterJob(with_quorum())
    run(job, 2, late=[("w0", 1), ("w1", 1)])
    rates = job.seen["w0"].rates
    assert rates[0] == rates[1] > rates[2] and job.seen["w1"].rates == rates


def test_what_a_dead_worker_did_is_lost_and_not_computed_again() -> None:
    job = OuterJob(with_quorum(2))
    world = run(job, 3, kills={"w2": (op_of(2), 0)}, dies_amid=True)
    assert set(world.digests) == {"w0", "w1"} and len(set(world.digests.values())) == 1
    seen = seen_of(job, "w0")
    assert [one["replicas"] for one in seen] == [3, 3, 2, 2, 2, 2]
    assert [one["lost"] for one in seen] == [0, 0, 1, 0, 0, 0]
    assert [one["inner_steps"] for one in seen] == [9, 9, 6, 6, 6, 6]


def test_below_the_quorum_survivors_train_the_missing_replicas() -> None:
    job = OuterJob(with_quorum(3))
    world = run(job, 3, kills={"w1": (op_of(2), 0), "w2": (op_of(2), 0)})
    assert set(world.digests) == {"w0"}
    assert all(one["replicas"] >= 3 and one["lost"] == 0 for one in seen_of(job, "w0"))


def test_a_newcomer_begins_with_the_outer_state() -> None:
    for moments in ("own", "mean", "reset"):
        job = OuterJob(with_quorum(moments=moments))
        world = run(job, 2, kills={"w0": (op_of(3), 0)}, newcomers=1, asked_at=1, copy_at=1, admit_at=2)
        assert set(world.digests) == {"w1", "n0"} and len(set(world.digests.values())) == 1
        assert [one["replicas"] for one in seen_of(job, "w1")] == [2, 2, 2, 2, 2, 2]


@st.composite
def storms(draw: st.DrawFn) -> tuple[int, int, list[tuple[str, int]], dict[str, tuple[int, int]], int, int]:
    workers = draw(st.integers(1, 4))
    names = [f"w{i}" for i in range(workers)]
    late = draw(st.lists(st.tuples(st.sampled_from([*names, "n0"]), st.integers(0, STEPS - 1)), max_size=8))
    moments = st.tuples(st.integers(1, STEPS), st.integers(0, 1))
    kills = {name: draw(moments) for name in names[1:] if draw(st.booleans())}
    return workers, draw(st.integers(1, REPLICAS)), late, kills, draw(st.integers(0, 1)), draw(st.integers(0, 4))


@settings(
    max_examples=EXAMPLES or 8, deadline=None, derandomize=not EXAMPLES, suppress_health_check=[HealthCheck.too_slow]
)
@given(storm=storms())
def test_in_any_storm_all_have_the_same_weights_and_each_round_has_its_quorum(storm: Any) -> None:
    workers, least, late, kills, newcomers, admit_at = storm
    job = OuterJob(with_quorum(least))
    world = run(job, workers, late, kills, newcomers=newcomers, asked_at=0, copy_at=0, admit_at=admit_at)
    assert len(set(world.digests.values())) == 1
    assert len(seen_of(job, "w0")) == STEPS
    for step, one in enumerate(seen_of(job, "w0")):
        assert one["inner_steps"] >= one["replicas"] >= 1
        if all(told != step for _, told in late):
            assert one["replicas"] >= least and one["inner_steps"] == INNER_STEPS * one["replicas"]


@dataclass
class Trace:
    """What each replica did, by step."""

    steps: int = 4
    late: frozenset[tuple[str, int]] = frozenset()
    replicas: SimpleQueue[tuple[int, int, int, list[torch.Tensor]]] = field(default_factory=SimpleQueue)
    """(step, replica, samples of an inner step, the parameters after it), in the order of time."""
    outer: SimpleQueue[tuple[int, list[torch.Tensor]]] = field(default_factory=SimpleQueue)

    def script(self, session: Session) -> str:
        job = make_job(session)
        torch.manual_seed(0)
        model = torch.nn.Linear(6, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        outer = LocalSGD(model, optimizer, every=INNER_STEPS).with_quorum(1)
        data = job.loader(dataset(50), 7, shards=3, shuffle=True)
        job.register(model=model, optimizer=optimizer, outer=outer)
        for step in job.steps(data, total=self.steps, outer=outer):
            for x, y in step:
                cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                after = [parameter.detach().clone() for parameter in model.parameters()]
                self.replicas.put((step.index, step.shard.index, len(y), after))
            self.outer.put((step.index, [parameter.detach().clone() for parameter in model.parameters()]))
        digest = job.digest()
        job.close()
        return digest


def drained(queue: SimpleQueue[Any]) -> list[Any]:
    return [queue.get() for _ in range(queue.qsize())]


def test_differences_are_weighed_by_their_samples() -> None:
    """With LocalSGD the outer parameters are the mean of the replicas' parameters, weighed by samples."""
    trace = Trace()
    world = World(3)
    world.late = {("w0", op_of(1)), ("w2", op_of(2))}
    world.run(trace.script)
    assert world.errors == {}
    weights: dict[tuple[int, int], int] = defaultdict(int)
    last: dict[tuple[int, int], list[torch.Tensor]] = {}
    for step, replica, samples, after in drained(trace.replicas):
        if step == 0:
            continue  # some of its inner steps are rehearsals
        weights[step, replica] += samples
        last[step, replica] = after
    assert set(weights.values()) == {2, 7}, "replicas have different weights"
    compared = 0
    for step, parameters in drained(trace.outer):
        mine = [(weights[key], last[key]) for key in last if key[0] == step]
        for place, parameter in enumerate(parameters):
            if mine:
                total = sum(weight for weight, _ in mine)
                mean = sum(weight * after[place] for weight, after in mine) / total
                torch.testing.assert_close(parameter, mean, rtol=1e-5, atol=1e-6)
                compared += 1
    assert compared == 3 * 2 * (trace.steps - 1)


@pytest.mark.parametrize(("moments", "kept"), [("own", True), ("reset", False)])
def test_a_worker_keeps_its_own_moments(moments: Moments, kept: bool) -> None:
    counts: SimpleQueue[tuple[int, int, float]] = SimpleQueue()

    def script(job: Job, model: torch.nn.Linear, optimizer: torch.optim.Optimizer) -> None:
        outer = DiLoCo(model, optimizer, every=INNER_STEPS, moments=moments).with_quorum(1)
        job.register(model=model, optimizer=optimizer, outer=outer)
        for step in job.steps(shards=2, total=3, outer=outer):
            for shard in step:
                model(torch.randn(4, 6)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                counts.put((step.index, shard.inner, float(optimizer.state[model.weight]["step"])))
            assert not optimizer.state, "between rounds nobody has a state"

    world = World(2)
    world.run(small(script))
    assert world.errors == {} and len(set(world.digests.values())) == 1
    for step, inner, count in drained(counts):
        if step:
            assert count == inner + 1 + (INNER_STEPS * step if kept else 0)


def test_a_late_replica_that_accumulates_gradients_makes_a_step_first() -> None:
    def script(job: Job, model: torch.nn.Linear, optimizer: torch.optim.Optimizer) -> None:
        outer = DiLoCo(model, optimizer, every=6).with_quorum(1)
        job.register(model=model, optimizer=optimizer, outer=outer)
        for step in job.steps(shards=2, total=3, outer=outer):
            for shard in step:
                model(torch.randn(4, 6)).square().mean().backward()
                if shard.inner % 3 == 2:
                    optimizer.step()
                    optimizer.zero_grad()
            assert step.metrics["elastic.inner_steps"] == (6 + 3 if step.index == 1 else 12)

    world = World(2)
    world.late = {("w1", op_of(1))}
    world.run(small(script, partial(torch.optim.SGD, lr=0.1)))
    assert world.errors == {} and len(set(world.digests.values())) == 1


def test_moments_that_are_not_finite_are_not_kept() -> None:
    def script(job: Job, model: torch.nn.Linear, optimizer: torch.optim.Optimizer) -> None:
        outer = DiLoCo(model, optimizer, every=INNER_STEPS).with_quorum(1)
        job.register(model=model, optimizer=optimizer, outer=outer)
        for step in job.steps(shards=2, total=4, outer=outer, nonfinite="skip"):
            for shard in step:
                bad = (step.index, shard.index, shard.inner) == (1, 1, 1)
                (model(torch.randn(4, 6)).square().mean() * (torch.inf if bad else 1.0)).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert (step.metrics.get("elastic.nonfinite", 0.0) == 1.0) == (step.index == 1)
        assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())

    world = World(2)
    world.run(small(script))
    assert world.errors == {} and len(set(world.digests.values())) == 1


@pytest.mark.parametrize("moments", ["own", "mean"])
def test_a_job_goes_on_from_its_checkpoint(moments: str, tmp_path: Path) -> None:
    saving, seen = Recorded(), Seen()
    taking = Settings(root=str(tmp_path), every="3 steps", keep="last 100")
    OuterJob(with_quorum(moments=moments)).train(make_job(saving, checkpoints=taking), seen)
    entry = Series(storage_at(str(tmp_path))).names()[0]
    resumed, again = Recorded(), Seen()
    going_on = make_job(resumed, checkpoints=Settings(root=str(tmp_path), resume=str(entry)))
    OuterJob(with_quorum(moments=moments)).train(going_on, again)
    assert [record.step for record in resumed.records] == [record.step for record in saving.records[3:]]
    assert again.rates == seen.rates[3:]
    assert again.metrics[0]["samples"] == seen.metrics[3]["samples"]
    assert all(record.samples == [] for record in resumed.records), "which were used is known to each replica only"


@pytest.mark.parametrize("options", [{"compression": "bf16"}, {"compression": "int8"}, {"reduction": "fixed"}])
def test_rounded_sums_are_the_same_on_all_workers(options: dict[str, str]) -> None:
    job = OuterJob(with_quorum(2))
    world = World(3, {"w0": (op_of(3), 0)}, **options)
    world.late = {("w1", op_of(1)), ("w2", op_of(3))}
    world.run(job.script)
    assert set(world.errors) == {"w0"} and len(set(world.digests.values())) == 1


def test_what_does_not_go_together_is_refused() -> None:
    model = torch.nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for options in ({"fragments": 2}, {"alpha": 0.5}):
        with pytest.raises(ConfigError, match="with_quorum"):
            DiLoCo(model, optimizer, every=4, **options).with_quorum(1)
    with pytest.raises(ConfigError, match="min_replicas=0"):
        DiLoCo(model, optimizer, every=4).with_quorum(0)
    job = OuterJob(with_quorum(REPLICAS + 1))
    with pytest.raises(ConfigError, match=f"min_replicas={REPLICAS + 1} of {REPLICAS} replicas"):
        run(job, 1)


def test_the_user_is_told_what_a_round_is(capsys: pytest.CaptureFixture[str]) -> None:
    run(OuterJob(with_quorum(2)), 1)
    line = next(line for line in capsys.readouterr().out.splitlines() if "a round" in line)
    assert "up to 4 replicas x 3 inner steps, over when 2 have made them and 0 s later" in line
