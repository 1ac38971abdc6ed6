"""torchft's names: what they do in a script of logical ranks, and what is refused with what to write instead.

The training itself is in ddp/test_worlds.py, with tests/ddp_scripts/replica_groups.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic.torchft
from elastic.errors import ConfigError, NotCarried
from runtime.frontends.ddp.rank_script import RankScript
from runtime.frontends.torchft import GROUP, GROUPS, Manager, OptimizerWrapper, tell_script
from tests.unit.jobs import Recorded, make_job
from tests.unit.runtime.frontends.ddp import threads

DATA = TensorDataset(torch.arange(8))


@pytest.fixture
def script() -> Iterator[RankScript]:
    """A script of four ranks that this thread runs."""
    with threads.seams():
        found = RankScript(4)
        found.connect(make_job(Recorded()))
        found.enter()
        yield found


def test_every_name_is_there() -> None:
    for name in elastic.torchft.__all__:
        assert callable(getattr(elastic.torchft, name))
    with pytest.raises(AttributeError, match="HSDP"):
        elastic.torchft.HSDP  # noqa: B018
    for name in ("DiLoCo", "LocalSGD"):
        with pytest.raises(NotCarried, match=rf"outer=elastic\.{name}\("):
            getattr(elastic.torchft, name)


@pytest.mark.parametrize("make", [lambda: Manager(None), lambda: elastic.torchft.DistributedSampler(DATA, 0, 4)])
def test_outside_of_logical_ranks_it_says_how_to_start(make: Any) -> None:
    with pytest.raises(ConfigError, match="elastic run --ranks N"):
        make()


def test_a_script_is_told_its_number_and_how_many_groups_there_are(script: RankScript) -> None:
    os.environ.pop(GROUPS, None)
    tell_script()
    assert (os.environ[GROUP], os.environ[GROUPS]) == ("0", "4")
    tell_script()
    os.environ[GROUPS] = "2"
    with pytest.raises(ConfigError, match=r"NUM_REPLICA_GROUPS=2.*--ranks 2"):
        tell_script()


def test_the_sampler_is_that_of_a_group_of_one_rank(script: RankScript) -> None:
    for named in ({"replica_rank": 1}, {"replica_group_id": 1}):
        sampler = elastic.torchft.DistributedSampler(DATA, num_replica_groups=4, shuffle=False, **named)
        assert (sampler.num_replicas, list(sampler)) == (4, [1, 5])
    with pytest.raises(ConfigError, match="num_replica_groups=2"):
        elastic.torchft.DistributedSampler(DATA, 0, 2)
    for group in ({"group_rank": 1, "num_replicas": 1}, {"group_rank": 0, "num_replicas": 2}):
        with pytest.raises(ConfigError, match="one rank here"):
            elastic.torchft.DistributedSampler(DATA, 0, 4, **group)


def test_a_manager_takes_what_is_about_connections_and_refuses_the_rest(
    script: RankScript, capsys: pytest.CaptureFixture[str]
) -> None:
    manager = Manager(
        pg=elastic.torchft.ProcessGroupGloo(timeout=5), min_replica_size=2, lighthouse_addr="x:1", rank=0, world_size=1
    )
    assert "--min-workers" in capsys.readouterr().out
    assert (manager.current_step(), manager.num_participants(), manager.is_participating()) == (0, 4, True)
    for refused in ({"world_size_mode": "FIXED_WITH_SPARES"}, {"world_size": 2}, {"replicas": 3}):
        with pytest.raises(ConfigError, match=next(iter(refused))):
            Manager(None, **refused)


def test_steps_are_counted_and_kept_as_the_state_of_the_job(script: RankScript) -> None:
    manager = Manager(None)
    assert script.objects.by_kind["manager"] == [manager]
    assert manager.should_commit() and manager.should_commit()
    assert (manager.current_step(), manager.batches_committed()) == (2, 8)
    other = Manager(None)
    other.load_state_dict(manager.state_dict())
    assert (other.current_step(), other.batches_committed()) == (2, 8)


def test_a_sum_that_a_death_would_change_is_refused_with_what_to_write(script: RankScript) -> None:
    with pytest.raises(NotCarried, match=r"leave the call out.*torch\.distributed\.all_reduce"):
        Manager(None).allreduce(torch.zeros(2))


class Says:
    """A manager that says whether a step counts."""

    def __init__(self) -> None:
        self.commits, self.began = True, 0

    def start_quorum(self) -> None:
        self.began += 1

    def should_commit(self) -> bool:
        return self.commits


def test_the_optimizer_is_the_one_inside() -> None:
    weight = nn.Parameter(torch.ones(2))
    manager: Any = Says()
    inner = torch.optim.SGD([weight], lr=1.0, momentum=0.5)
    optimizer = OptimizerWrapper(manager, inner)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.zero_grad()
    assert manager.began == 1
    weight.sum().backward()
    optimizer.step()
    scheduler.step()
    assert weight.tolist() == [0.0, 0.0] and inner.param_groups[0]["lr"] == 0.5
    manager.commits = False
    optimizer.step()
    assert weight.tolist() == [0.0, 0.0]
    assert optimizer.state_dict() == inner.state_dict() and optimizer.state is inner.state
    added = nn.Parameter(torch.zeros(1))
    optimizer.add_param_group({"params": [added]})
    assert len(inner.param_groups) == 2
    optimizer.load_state_dict(inner.state_dict())
    with pytest.raises(ConfigError, match="closure"):
        optimizer.step(lambda: 0.0)
