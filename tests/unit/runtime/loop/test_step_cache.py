"""step.cached: a shard's value for all passes of a step, whoever computes it."""

from __future__ import annotations

import copy
import functools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elastic.errors import UsageError
from runtime.loop.job import Job
from runtime.loop.step import Step
from runtime.session import Session
from tests.unit.jobs import Recorded, dataset, make_job
from tests.unit.worlds import Killed, World


def registered(session: Session | None = None) -> tuple[Job, nn.Module]:
    job = make_job(session)
    model = nn.Linear(2, 2)
    job.register(model=model)
    return job, model


def draws() -> tuple[float, float, float]:
    return torch.rand(1).item(), float(np.random.rand()), random.random()


def test_a_later_pass_finds_the_value_of_the_earlier_one_and_another_step_does_not() -> None:
    job, model = registered()
    seen = []
    for step in job.steps(shards=2, total=2):
        for _ in range(3):
            for shard in step:
                seen.append((step.index, shard.index, step.cached(draws)))
                model(torch.ones(2)).sum().backward()
        model.zero_grad()
    counted = seen[2:]
    assert len(set(counted)) == 4
    assert len(counted) == 16  # two shards are rehearsed in every pass of step 0


def test_the_value_does_not_depend_on_the_pass_that_computes_it() -> None:
    """A worker that inherits a shard in the third pass has not seen the first."""
    values = []

    def value(step: Step) -> object:
        return draws(), step.shard.seed, step.shard.numpy.random()

    for computing in range(3):
        job, model = registered()
        step = next(job.steps(shards=1, total=1))
        for number in range(computing + 1):
            for _ in step:
                if number == computing:
                    values.append(step.cached(functools.partial(value, step)))
                model(torch.ones(2)).sum().backward()
        job._detach()
    assert values[-1] == values[2] == values[0]


def test_the_random_numbers_of_the_body_go_on_as_if_nothing_was_called() -> None:
    without, model = registered()
    step = next(without.steps(shards=1, total=1))
    for shard in step:
        expected = draws(), shard.generator.get_state().tolist()
        model(torch.ones(2)).sum().backward()
    cached, model = registered()
    step = next(cached.steps(shards=1, total=1))
    for _ in step:
        step.cached(lambda: torch.rand(5, generator=step.shard.generator).sum() + torch.rand(1))
        found = draws(), step.shard.generator.get_state().tolist()
        model(torch.ones(2)).sum().backward()
    assert found == expected


def test_a_value_carries_no_graph_from_one_pass_to_the_next() -> None:
    job, model = registered()
    step = next(job.steps(shards=1, total=1))
    for _ in range(2):
        for _ in step:
            features = step.cached(lambda: model(torch.ones(2)))
            assert not features.requires_grad
            model(features).sum().backward()


def test_several_calls_in_one_shard_are_told_apart_by_name_and_number() -> None:
    job, model = registered()
    step = next(job.steps(shards=1, total=1))
    found = []
    for _ in range(2):
        for _ in step:
            found.append([step.cached(lambda: draws()) for _ in range(2)])
            model(torch.ones(2)).sum().backward()
    assert found[-1] == found[-2]
    assert found[-1][0] != found[-1][1]


def test_two_lambdas_that_could_be_confused_are_noticed() -> None:
    job, model = registered()
    step = next(job.steps(shards=1, total=1))
    with pytest.raises(UsageError, match="a name of its own with `def`"):
        for _ in step:
            step.cached(lambda: 1)
            model(torch.ones(2)).sum().backward()
        for _ in step:
            step.cached(lambda: 2)


def test_outside_a_pass_there_is_no_shard_to_cache_for() -> None:
    job, _ = registered()
    with pytest.raises(UsageError, match=r"step\.cached.*|step\.shard was used outside the inner loop"):
        next(job.steps(shards=1, total=1)).cached(draws)


def ppo(session: Session) -> str:
    """Rollouts by the policy as it was when the step began, and three passes over them."""
    job = make_job(session)
    policy = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    old = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.02)
    job.register(policy=policy, old=old, optimizer=optimizer)
    data = job.loader(dataset(), 16, shards=4)
    for step in job.steps(data, total=5):
        for _ in range(3):
            for x, y in step:

                def rollout(
                    x: torch.Tensor = x, y: torch.Tensor = y
                ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
                    taken = torch.distributions.Categorical(logits=old(x))
                    action = taken.sample()
                    return action, taken.log_prob(action), (action == y).float() - 0.5

                action, before, reward = step.cached(rollout)
                ratio = (torch.distributions.Categorical(logits=policy(x)).log_prob(action) - before).exp()
                loss: Any = -torch.min(ratio * reward, ratio.clamp(0.8, 1.2) * reward).mean()
                loss.backward()
                step.log(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
        old.load_state_dict(policy.state_dict())
    digest = job.digest()
    job.close()
    return digest


@pytest.mark.parametrize("op", [2, 6, 9])
def test_ppo_has_the_same_bits_when_its_rollouts_die_with_their_worker(op: int) -> None:
    """Operations 1, 2, 3 are the passes of step 0, and so on."""
    digest = ppo(Recorded())
    world = World(3, kills={"w0": (op, 1), "w2": (op + 3, 0)})
    world.run(ppo, newcomers=1, asked_at=1, admit_at=3)
    assert {type(error) for error in world.errors.values()} == {Killed}
    assert world.digests == dict.fromkeys(("w1", "n0"), digest)
