"""One NaN is like another on every worker, also in its sign: what a script makes of it depends on its bits."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from functools import partial

import pytest
import torch

from runtime.loop.job import Job
from runtime.recovery.state.encoding import decode, encode
from runtime.session import Session
from tests.unit.jobs import Recorded, cross_entropy, dataset, make_job
from tests.unit.worlds import World


def bits(value: float) -> str:
    return struct.pack(">d", value).hex()


NEGATIVE = -math.nan
QUIET_BITS = bits(math.nan)


def test_the_two_nans_of_this_test_differ() -> None:
    assert math.copysign(1.0, NEGATIVE) < 0 < math.copysign(1.0, math.nan) and bits(NEGATIVE) != QUIET_BITS


def written_down(job: Job) -> None:
    """A script that keeps the bits of what it is told of NaNs."""
    model = torch.nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    job.register(model=model, optimizer=optimizer)
    job.state.setdefault(kept=torch.zeros(8, dtype=torch.float64), last=0.0)
    data = dataset()
    for step in job.steps(job.loader(data, 10, shards=4), total=4):
        for x, y in step:
            cross_entropy(model(x), y).backward()
            step.log(loss=NEGATIVE if step.shard.index == step.index else 1.0, sum={"all": NEGATIVE})
        optimizer.step()
        optimizer.zero_grad()
        found = job.evaluate(lambda x, y: {"score": NEGATIVE}, data, batch_size=10)
        for value in (step.metrics["loss"], step.metrics["all"], found["score"]):
            assert bits(value) == QUIET_BITS
        job.state.kept[step.index] = step.metrics["loss"]
        job.state.last = NEGATIVE


def run(script: Callable[[Job], None], session: Session) -> str:
    job = make_job(session)
    script(job)
    return job.digest()


def test_what_a_step_and_an_evaluation_tell_of_nans_has_the_same_bits_in_every_world() -> None:
    quiet = run(written_down, Recorded())
    world = World(3)
    world.run(partial(run, written_down), newcomers=1, asked_at=1, copy_at=1, admit_at=1)
    assert world.errors == {} and world.digests == dict.fromkeys(("w0", "w1", "w2", "n0"), quiet)


@pytest.mark.parametrize("value", [NEGATIVE, math.nan, -math.inf, math.inf, -0.0])
def test_the_state_is_carried_with_the_sign_of_what_is_no_number(value: float) -> None:
    carried = json.loads(json.dumps(encode(value, "x", []), allow_nan=False))
    assert bits(decode(carried, lambda _: torch.empty(0))) == bits(value)
