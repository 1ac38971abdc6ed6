"""A loop as frameworks have it, on StepLoop, in worlds with deaths and newcomers: no trace of them is left."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from elastic.agent.worker.node_notice import NodeNotice
from elastic.errors import ConfigError
from runtime.data.random_state import randomness_kept
from runtime.frontends.ddp.rank_script import RankScript
from runtime.frontends.frameworks.plain_state import plain_attributes, set_attributes
from runtime.frontends.frameworks.rank_batches import RankBatches
from runtime.frontends.frameworks.step_loop import StepLoop
from runtime.loop.step import Step
from runtime.loop.training.gathering import gather
from tests.unit.jobs import dataset, make_job, one_thread
from tests.unit.thoroughness import some
from tests.unit.worlds import FakeMember, Killed, World

RANKS = 4
EPOCHS = 3
STOPPED_AT = 5
"""The step behind which the second epoch is left before its end."""


class Shard(BatchSampler):
    """As accelerate's BatchSamplerShard: rank r has the batches r, r + ranks, ... of another batch sampler."""

    def __init__(self, batch_sampler: Any, ranks: int = RANKS) -> None:
        self.batch_sampler, self.ranks, self.process_index = batch_sampler, ranks, 0

    def __iter__(self) -> Any:
        batches = list(self.batch_sampler)
        whole = len(batches) // self.ranks * self.ranks
        return iter(batches[self.process_index : whole : self.ranks])

    def __len__(self) -> int:
        return len(self.batch_sampler) // self.ranks


def loader(samples: int = 70) -> DataLoader[Any]:
    data = dataset(samples)
    return DataLoader(data, batch_sampler=Shard(BatchSampler(RandomSampler(data), 2, drop_last=True)))


class Framework:
    """Trains a classifier, and counts in attributes of its own. Two batches of a rank are a step."""

    def __init__(self, session: FakeMember) -> None:
        job = make_job(session)
        self.script = RankScript(RANKS)
        self.script.connect(job)
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.begun = self.counted = 0
        self.log: list[Any] = []
        self.found: dict[str, Any] | None = None
        self.loop = StepLoop(self.script)
        self.source = RankBatches(loader(), RANKS, 2, seed=0)

    def state_dict(self) -> dict[str, Any]:
        return plain_attributes(self, without=frozenset({"found"}))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.found = state
        set_attributes(self, state)

    def closure(self, batches: list[Any], step: Step) -> None:
        total = 0.0
        for x, y in batches:
            self.model.train()
            loss: Any = F.cross_entropy(self.model(x), y) / len(batches)
            loss.backward()
            total += float(loss.detach())
        step.log(loss=total)

    def predictions(self, batch: int) -> list[Any]:
        self.model.eval()
        with torch.no_grad():
            rows = self.model(dataset(30).tensors[0][batch * 7 : batch * 7 + 7])
        return [rows, {"sum": float(rows.sum()), "labels": rows.argmax(1)}]

    def train(self) -> str:
        loop, length = self.loop, len(self.source)
        loop.begin(self.source, self, {"model": self.model, "optimizer": self.optimizer})
        for epoch in range(loop.epoch, EPOCHS):
            position = 0
            if loop.entered:
                loop.enter(self.closure)
                set_attributes(self, self.found or {})
                if loop.epoch > epoch:
                    continue
                loop.entered, position = False, loop.position
            else:
                loop.begin_epoch(epoch)
            for _ in range(position, length):
                assert loop.next()
                self.begun += 1  # as callbacks do when a step begins
                said = loop.run(self.closure)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.counted += 1
                self.log.append([self.counted, epoch, said["loss"], self.begun])
                if self.counted % 3 == 0:
                    rows = gather(self.script.training, f"predictions {self.counted}", 5, self.predictions)
                    self.log.append([float(torch.cat([row for row, _ in rows]).sum()), rows[4][1]["labels"].tolist()])
                if self.counted == STOPPED_AT and epoch == 1:
                    break
        loop.end()
        digest = self.script.job.digest()
        self.script.job.close()
        return f"{digest} {self.log}"


def script(session: FakeMember) -> str:
    return Framework(session).train()


def alone() -> str:
    with one_thread():
        world = World(1)
        world.run(script)
    if world.errors:
        raise world.errors["w0"]
    return world.digests["w0"]


@pytest.fixture(scope="module")
def quiet() -> str:
    return alone()


def test_callbacks_are_told_once_that_their_machine_has_to_go(quiet: str) -> None:
    told: list[tuple[str, int]] = []

    class Listens:
        def on_drain(self, notice: NodeNotice) -> None:
            told.append((notice.because, framework[0].counted))

    framework: list[Framework] = []

    def hears(session: FakeMember) -> str:
        framework.append(Framework(session))
        framework[0].loop = StepLoop(framework[0].script, lambda: (object(), Listens()))
        session.going = NodeNotice(time.monotonic() + 60, "rack 7 is switched off")
        return framework[0].train()

    with one_thread():
        world = World(1)
        world.run(hears)
    assert not world.errors
    assert told == [("rack 7 is switched off", 0)]
    assert world.digests["w0"] == quiet


def test_epochs_are_as_long_as_the_framework_makes_them(quiet: str) -> None:
    assert quiet.count("], [") > 10
    assert len(RankBatches(loader(), RANKS, 2, seed=0)) == 4, "35 batches of 4 ranks, two of a rank in a step"
    assert "[5, 1, " in quiet and "[6, 2, " in quiet, "the second epoch ends behind its first step"


@pytest.mark.parametrize("workers", [2, 3, 6])
def test_every_world_has_the_same_bits_and_log(workers: int, quiet: str) -> None:
    with one_thread():
        world = World(workers)
        world.run(script)
    assert {name: str(error) for name, error in world.errors.items()} == {}
    assert set(world.digests.values()) == {quiet}


DEATHS = [(operation, units) for operation in range(14) for units in (0, 1)]
JOINS = [(step, behind) for step in range(8) for behind in (0, 1, 2)]


@pytest.mark.parametrize(("operation", "units"), some(DEATHS, 8, "deaths"))
def test_a_death_in_any_operation_leaves_no_trace(operation: int, units: int, quiet: str) -> None:
    """Also between the two operations of an evaluation."""
    with one_thread():
        world = World(3, kills={"w0": (operation, units)})
        world.run(script)
    assert {name for name, error in world.errors.items() if not isinstance(error, Killed)} == set()
    assert set(world.digests.values()) == {quiet}


@pytest.mark.parametrize(("step", "behind"), some(JOINS, 8, "joins"))
def test_a_newcomer_goes_on_where_the_others_are(step: int, behind: int, quiet: str) -> None:
    """In the middle of an epoch, in the step that ends one early, and with a copy of an earlier step."""
    with one_thread():
        world = World(2)
        world.run(script, newcomers=1, asked_at=max(0, step - behind), copy_at=max(0, step - behind), admit_at=step)
    assert {name: str(error) for name, error in world.errors.items()} == {}
    assert world.digests == dict.fromkeys(("w0", "w1", "n0"), quiet)


def test_values_of_any_kind_and_size_are_gathered() -> None:
    values: list[Any] = [
        {"none": None, "text": "ä", "numbers": (1, -0.0, float("inf"))},
        torch.tensor([float("nan"), -0.0, 1e-45]),
        [torch.arange(5, dtype=torch.int64) * 2**60, torch.tensor([True, False]), torch.ones(3, 0)],
        torch.randn(50_000, dtype=torch.float64),
        torch.randn(3, 5, dtype=torch.bfloat16).t(),
    ]
    values += [torch.tensor([number]) for number in range(100)]  # more parts than units
    with one_thread():
        world = World(3, kills={"w1": (2, 1)})

        def run(session: FakeMember) -> str:
            framework = Framework(session)
            framework.loop.begin(framework.source, framework, {"model": framework.model})
            framework.loop.begin_epoch(0)
            assert framework.loop.next()
            framework.loop.run(framework.closure)
            found = gather(framework.script.training, "values", len(values), values.__getitem__)
            framework.loop.end()
            assert [_bytes(one) for one in found] == [_bytes(value) for value in values]
            framework.script.job.close()
            return "same"

        world.run(run)
    assert world.digests == {"w0": "same", "w2": "same"}


def _bytes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.contiguous().view(torch.uint8).tolist()
    if isinstance(value, list | tuple):
        return [type(value), *map(_bytes, value)]
    return repr(value)


def test_a_loader_that_gives_every_rank_the_same_is_refused() -> None:
    data = TensorDataset(torch.zeros(8, 1))
    with pytest.raises(ConfigError, match="every rank the same samples"):
        RankBatches(DataLoader(data, batch_size=2), RANKS, 1, seed=0)
    RankBatches(DataLoader(data, batch_size=2), 1, 1, seed=0)


def test_a_dataset_without_random_access_is_refused() -> None:
    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(3))

    with pytest.raises(ConfigError, match="Stream has no random access"):
        RankBatches(DataLoader(Stream()), 1, 1, seed=0)


def test_ranks_with_unequally_many_batches_are_refused() -> None:
    class Uneven(Shard):
        def __iter__(self) -> Any:
            return iter(list(self.batch_sampler)[self.process_index :: self.ranks])

    data = dataset(18)
    with pytest.raises(ConfigError, match="even_batches"):
        RankBatches(DataLoader(data, batch_sampler=Uneven(BatchSampler(range(18), 2, False))), RANKS, 1, seed=0)


def test_the_order_of_an_epoch_does_not_depend_on_what_was_asked_before() -> None:
    def indices(source: RankBatches, epoch: int) -> Any:
        return [source.samples(epoch, step) for step in range(len(source))]

    with randomness_kept():
        first, second = (RankBatches(loader(), RANKS, 2, seed=0) for _ in range(2))
        forwards = [indices(first, epoch) for epoch in (0, 1, 2, 3)]
        torch.manual_seed(99)
        backwards = [indices(second, epoch) for epoch in (3, 0, 2, 1, 0)]
    assert forwards[0] != forwards[1]
    assert backwards == [forwards[epoch] for epoch in (3, 0, 2, 1, 0)]
