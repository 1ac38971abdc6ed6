"""Whatever becomes of the workers, replicas have the bits of a job of one: deaths in inner steps and in the outer
reduction, of the first worker, newcomers with an older state, a resume in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic.checkpoints.series import Series
from elastic.checkpoints.settings import Settings
from elastic.checkpoints.storage import storage_at
from runtime.loop.job import Job
from tests.unit.features import Lion
from tests.unit.jobs import Recorded, cross_entropy, dataset, make_job
from tests.unit.runtime.outer.outer_jobs import Fate, OuterJob, Seen, digests, diloco, run, small
from tests.unit.thoroughness import EXAMPLES, some
from tests.unit.worlds import World

KINDS: dict[str, dict[str, Any]] = {
    "DiLoCo": {},
    "reset moments": {"moments": "reset"},
    "mean moments": {"moments": "mean"},
    "mixed": {"alpha": 0.5},
    "streaming": {"every": 4, "fragments": 2},
    "streaming, delayed and mixed": {"every": 6, "fragments": 2, "delay": 2, "alpha": 0.25},
    "each step": {"every": 1},
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adam, fused, amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, fused=True, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "lion": lambda p: Lion(p, 0.01),
}


def job(kind: str, optimizer: str = "adamw") -> OuterJob:
    return OuterJob(diloco(**KINDS[kind]), optimizer=OPTIMIZERS[optimizer])


@cache
def quiet(kind: str, optimizer: str = "adamw") -> tuple[str, list[dict[str, float]], int]:
    """(digest, metrics, operations) of a job of one worker."""
    script = job(kind, optimizer)
    world = run(script, Fate(1))
    (digest,) = digests(world)
    return digest, script.seen["w0"].metrics, len(world.ops)


@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_workers_has_the_bits_of_one(kind: str) -> None:
    digest, metrics, _ = quiet(kind)
    for workers in some((2, 3, 4, 6), 2, kind):
        script = job(kind)
        assert digests(run(script, Fate(workers))) == {digest}
        assert [seen.metrics for seen in script.seen.values()] == [metrics] * workers


@st.composite
def fates(draw: st.DrawFn, operations: int) -> Fate:
    workers, newcomers = draw(st.integers(1, 5)), draw(st.integers(0, 2))
    steps = operations - 2  # but the first operation and the last
    admit_at = draw(st.integers(0, steps - 1))
    survivor = draw(st.integers(0, workers - 1))
    moments = st.tuples(st.integers(1, operations - 1), st.integers(0, 2))
    mortal = [f"w{i}" for i in range(workers) if i != survivor] + [f"n{i}" for i in range(newcomers)]
    kills = {worker: draw(moments) for worker in mortal if draw(st.booleans())}
    return Fate(workers, kills, newcomers, admit_at, draw(st.integers(0, admit_at)))


@settings(
    max_examples=EXAMPLES or 8, deadline=None, derandomize=not EXAMPLES, suppress_health_check=[HealthCheck.too_slow]
)
@given(data=st.data(), kind=st.sampled_from(list(KINDS)), optimizer=st.sampled_from(list(OPTIMIZERS)))
def test_any_fate_ends_in_the_bits_of_a_job_of_one(data: st.DataObject, kind: str, optimizer: str) -> None:
    digest, metrics, operations = quiet(kind, optimizer)
    fate = data.draw(fates(operations))
    script = job(kind, optimizer)
    world = run(script, fate)
    assert digests(world) == {digest}
    for name in world.digests:
        assert script.seen[name].metrics[-1] == metrics[-1]


@pytest.mark.parametrize("kind", ["DiLoCo", "streaming, delayed and mixed"])
@pytest.mark.parametrize("options", [{"compression": "bf16"}, {"compression": "int8"}, {"reduction": "fixed"}])
def test_rounded_sums_have_the_same_bits_in_any_world(kind: str, options: dict[str, str]) -> None:
    found = [
        digests(run(job(kind), fate, **options))
        for fate in (Fate(1), Fate(3, {"w0": (3, 1)}, newcomers=1, admit_at=4, copy_at=3))
    ]
    assert found[0] == found[1] and len(found[0]) == 1
    assert found[0] != {quiet(kind)[0]}


@pytest.mark.parametrize("kind", ["DiLoCo", "reset moments", "streaming, delayed and mixed"])
def test_a_resume_in_the_middle_of_an_epoch_has_the_same_bits(kind: str, tmp_path: Path) -> None:
    saving, seen = Recorded(), Seen()
    taking = Settings(root=str(tmp_path), every="3 steps", keep="last 100")
    digest = job(kind).train(make_job(saving, checkpoints=taking), seen)
    assert digest == quiet(kind)[0]
    entry = Series(storage_at(str(tmp_path))).names()[0]
    resumed, seen = Recorded(), Seen()
    again = job(kind).train(make_job(resumed, checkpoints=Settings(root=str(tmp_path), resume=str(entry))), seen)
    assert again == digest
    assert resumed.records == saving.records[3:] and resumed.records


def test_a_round_that_is_not_finite_is_skipped_by_all_and_leaves_no_trace_in_the_outer_parameters() -> None:
    """One inner step of one replica has an infinite loss."""

    def script(made: Job, model: torch.nn.Linear, optimizer: torch.optim.Optimizer) -> None:
        outer = diloco(every=4, fragments=2, alpha=0.5)(model, optimizer)
        data = made.loader(dataset(96), 8, shards=4, shuffle=True)
        made.register(model=model, optimizer=optimizer, outer=outer)
        for step in made.steps(data, total=6, outer=outer, nonfinite="skip"):
            before = [parameter.detach().clone() for parameter in model.parameters()]
            for x, y in step:
                bad = step.index == 3 and step.shard.index == 2 and step.shard.inner == 1
                (cross_entropy(model(x), y) * (torch.inf if bad else 1.0)).backward()
                optimizer.step()
                optimizer.zero_grad()
            skipped = all(map(torch.equal, before, model.parameters()))
            assert skipped == (step.index == 3) == (step.metrics.get("elastic.nonfinite", 0.0) == 1.0)

    found = set()
    for workers, kills in ((1, {}), (3, {"w0": (4, 1)})):
        world = World(workers, kills)
        world.run(small(script))
        assert set(world.errors) == set(kills), world.errors
        found |= digests(world)
    assert len(found) == 1


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=100),
    "warm-up": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.1), torch.optim.lr_scheduler.CosineAnnealingLR(o, 50)],
        milestones=[5],
    ),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)),
    "steps": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [3, 8]),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
def test_a_scheduler_counts_inner_steps_on_every_worker(name: str) -> None:
    rates: list[list[float]] = []

    def script(made: Job, model: torch.nn.Linear, optimizer: torch.optim.Optimizer) -> None:
        scheduler = SCHEDULERS[name](optimizer)
        outer = diloco()(model, optimizer)
        made.register(model=model, optimizer=optimizer, scheduler=scheduler, outer=outer)
        mine: list[float] = []
        rates.append(mine)
        for step in made.steps(shards=4, total=5, outer=outer):
            for _ in step:
                model(torch.randn(4, 6)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            assert scheduler.last_epoch == 3 * (step.index + 1)
            mine.append(optimizer.param_groups[0]["lr"])

    found = set()
    for workers in (1, 6):  # of six, two have no replica
        world = World(workers)
        world.run(small(script))
        assert world.errors == {}
        found |= digests(world)
    assert len(found) == 1
    model = torch.nn.Linear(6, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = SCHEDULERS[name](optimizer)
    alone = []
    for step in range(15):
        optimizer.step()
        scheduler.step()
        if step % 3 == 2:
            alone.append(optimizer.param_groups[0]["lr"])
    assert rates == [alone] * 7
