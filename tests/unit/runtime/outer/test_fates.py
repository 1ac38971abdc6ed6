"""Whatever becomes of the workers, replicas have the bits of a job of one: deaths in inner steps and in the outer
reduction, of the first worker, newcomers with an older state, a resume in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from tests.unit.features import Lion
from tests.unit.jobs import Recorded, make_job, one_thread
from tests.unit.runtime.outer.outer_jobs import Fate, OuterJob, Seen, digests, diloco, run
from tests.unit.thoroughness import EXAMPLES

KINDS: dict[str, dict[str, Any]] = {
    "DiLoCo": {},
    "reset moments": {"moments": "reset"},
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


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


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
    for workers in (2, 3, 4, 6):
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
    max_examples=EXAMPLES or 24,
    deadline=None,
    derandomize=not EXAMPLES,
    suppress_health_check=[HealthCheck.too_slow],
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
    taking = Settings(root=str(tmp_path), every="5 steps", keep="last 100")
    digest = job(kind).train(make_job(saving, checkpoints=taking), seen)
    assert digest == quiet(kind)[0]
    entry = Series(storage_at(str(tmp_path))).names()[0]
    resumed, seen = Recorded(), Seen()
    again = job(kind).train(make_job(resumed, checkpoints=Settings(root=str(tmp_path), resume=str(entry))), seen)
    assert again == digest
    assert resumed.records == saving.records[5:] and resumed.records
