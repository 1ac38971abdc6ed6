"""The promise in small: training has the same bits for every world, computed without any process or socket.

Simulated workers, each with its own model and optimizer, run the shards they own, fold them into roots, and all
install the sum of everybody's roots. One digest covers parameters, optimizer state and BatchNorm statistics.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from elastic.protocol.reduction_tree import Node, covers_exactly, next_fold
from elastic.protocol.sampling import SamplePlan
from runtime.allreduce.reduction.gradient_harvest import Harvest
from runtime.allreduce.reduction.partial_sum import Partial, fold
from runtime.recovery.state.training_state import Carrier, Values

SHARDS = 8
STEPS = 6
SAMPLES = 96
BATCH = 29
"""Not a multiple of the shards, so their weights differ."""


@cache
def dataset() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(12)
    inputs = torch.randn(SAMPLES, 6, generator=generator)
    return inputs, inputs.square().sum(1, keepdim=True)


class Worker:
    """What one training process holds."""

    def __init__(self, initial_seed: int = 0) -> None:
        torch.manual_seed(initial_seed)
        self.model = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1), nn.Linear(1, 1)
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.carrier = Carrier(Values())
        self.carrier.register(model=self.model, optimizer=self.optimizer)
        self.carrier.freeze()
        self.harvest = Harvest(self.carrier.parameters(), self.carrier.float_buffers(), self.carrier.int_buffers())

    def roots(self, plan: SamplePlan, step: int, shards: Sequence[int]) -> list[Partial]:
        """Compute these shards in this order, folding as soon as siblings are there."""
        self.harvest.begin_pass(5, step, 0)
        held: dict[Node, Partial] = {}
        inputs, targets = dataset()
        for shard in shards:
            self.harvest.before(shard)
            chosen = plan.indices(step // plan.steps, step % plan.steps, shard)
            loss: torch.Tensor = nn.functional.mse_loss(self.model(inputs[chosen]), targets[chosen])
            torch.autograd.backward(loss)
            weight = float(len(chosen))
            held[shard, shard + 1] = self.harvest.leaf(shard, weight, {"loss": ("mean", loss.item() * weight, weight)})
            fold_all(held)
        return list(held.values())

    def apply(self, result: Partial) -> None:
        self.harvest.install(result, "mean")
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def fold_all(held: dict[Node, Partial]) -> None:
    while (pair := next_fold(held, SHARDS)) is not None:
        left, right, above = pair
        held[above] = fold(held.pop(left), held.pop(right))


def reduce(roots: Sequence[Partial]) -> Partial:
    """What the exchange does: everybody's roots, summed along the tree, out of place."""
    assert covers_exactly([root.node for root in roots], SHARDS)
    for root in roots:
        root.settle()
    held = {
        root.node: Partial(
            root.lo,
            root.hi,
            {name: flat.clone() for name, flat in root.flats.items()},
            root.has_grad,
            root.weight,
            root.scalars,
            root.note,
        )
        for root in roots
    }
    fold_all(held)
    return held[0, SHARDS]


Ownership = Sequence[Sequence[int]]
"""Per worker its shards, in the order in which it runs them."""


def train(ownership_of: Sequence[Ownership], workers: list[Worker]) -> str:
    """Train, check that all workers are identical after every step, and return digest and losses."""
    plan = SamplePlan(SAMPLES, BATCH, SHARDS, seed=3, shuffle=True)
    losses = []
    for step, ownership in enumerate(ownership_of):
        roots = [root for worker, own in zip(workers, ownership, strict=True) for root in worker.roots(plan, step, own)]
        result = reduce(roots)
        _, total, weight = result.scalars["loss"]
        losses.append(total / weight)
        for worker in workers:
            worker.apply(result)
        assert len({worker.carrier.digest() for worker in workers}) == 1
    return json.dumps([workers[0].carrier.digest(), losses])


@cache
def quiet_run() -> str:
    return train([[range(SHARDS)]] * STEPS, [Worker()])


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_every_world_size_trains_the_same_bits(world_size: int) -> None:
    ownership = [range(SHARDS)[rank::world_size] for rank in range(world_size)]
    assert train([ownership] * STEPS, [Worker() for _ in range(world_size)]) == quiet_run()


def test_a_worker_without_shards_holds_the_same_bits() -> None:
    assert train([[range(SHARDS), []]] * STEPS, [Worker(), Worker()]) == quiet_run()


def test_other_sums_than_the_trees_would_show() -> None:
    """Otherwise the tests above could not fail: the same gradients added from left to right train other bits."""
    plan = SamplePlan(SAMPLES, BATCH, SHARDS, seed=3, shuffle=True)
    worker = Worker()
    for step in range(STEPS):
        total, *others = [worker.roots(plan, step, [shard])[0] for shard in range(SHARDS)]
        for leaf in others:
            total = fold(total, leaf)
        worker.apply(total)
    assert worker.carrier.digest() != json.loads(quiet_run())[0]


@st.composite
def ownerships(draw: st.DrawFn) -> list[Ownership]:
    """For each step any split of the shards over four workers, and any order in which each runs its own."""
    steps: list[Ownership] = []
    for _ in range(STEPS):
        owners = draw(st.lists(st.integers(0, 3), min_size=SHARDS, max_size=SHARDS))
        order = draw(st.permutations(range(SHARDS)))
        steps.append([[shard for shard in order if owners[shard] == rank] for rank in range(4)])
    return steps


@settings(max_examples=6)
@given(ownerships())
def test_it_does_not_matter_who_computes_which_shard_when(ownership_of: list[Ownership]) -> None:
    assert train(ownership_of, [Worker() for _ in range(4)]) == quiet_run()


def test_a_newcomer_with_a_copy_of_the_state_is_a_member_like_any_other() -> None:
    """4 workers, then 3, 1, 2 and 4: each newcomer starts from other weights and copies a survivor's state."""
    plan = SamplePlan(SAMPLES, BATCH, SHARDS, seed=3, shuffle=True)
    workers: list[Worker] = []
    for step, world_size in enumerate((4, 3, 1, 2, 4, 4)):
        workers = workers[:world_size]
        while len(workers) < world_size:
            newcomer = Worker(initial_seed=len(workers) if workers else 0)
            if workers:
                header, blobs = workers[0].carrier.capture()
                newcomer.carrier.load(json.loads(json.dumps(header)), [blob.clone() for blob in blobs])
            elif step:
                raise AssertionError("somebody always survives")
            workers.append(newcomer)
        roots = [
            root
            for rank, worker in enumerate(workers)
            for root in worker.roots(plan, step, range(SHARDS)[rank::world_size])
        ]
        result = reduce(roots)
        for worker in workers:
            worker.apply(result)
    assert {worker.carrier.digest() for worker in workers} == {json.loads(quiet_run())[0]}


def test_a_shard_computed_again_after_an_interruption_changes_nothing() -> None:
    """The orphans of a lost worker are run by the others, on top of what they already folded."""
    plan = SamplePlan(SAMPLES, BATCH, SHARDS, seed=3, shuffle=True)
    survivors = [Worker(), Worker()]
    for step in range(STEPS):
        lost = Worker()
        header, blobs = survivors[0].carrier.capture()
        lost.carrier.load(header, blobs)
        lost.roots(plan, step, [2, 6])
        own = ([0, 1, 4], [3, 5, 7])
        orphans = ([2], [6])
        roots = [
            root
            for worker, first, then in zip(survivors, own, orphans, strict=True)
            for root in worker.roots(plan, step, [*first, *then])
        ]
        result = reduce(roots)
        for worker in survivors:
            worker.apply(result)
    assert {worker.carrier.digest() for worker in survivors} == {json.loads(quiet_run())[0]}
