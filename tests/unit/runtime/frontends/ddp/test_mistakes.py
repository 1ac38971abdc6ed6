"""Scripts that break one rule of logical ranks are stopped by an error that names it; those that do what its message
says train, and so do scripts that come close."""

from __future__ import annotations

import itertools
import random
import warnings
from collections import UserDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from elastic.errors import (
    BufferChanged,
    ConfigError,
    LeftAlone,
    LeftPass,
    MidShardCollective,
    NotCarried,
    NotInPlace,
    ReadAhead,
    StateChanged,
    StrayGradient,
    TwoBackwards,
    UnknownBatches,
    UsageError,
)
from runtime.frontends.ddp.rank_script import RankScript
from tests.unit.jobs import Recorded
from tests.unit.runtime.frontends.ddp import threads
from tests.unit.runtime.frontends.ddp.threads import Main
from tests.unit.thoroughness import some

SAMPLES = 84
BATCHES = 7
"""Of an epoch, of 3 samples."""

SEEN: UserDict[str, list[Any]] = UserDict()
"""What scripts tell the test: name -> what each worker, in each turn that counts, has told. No dict, whose lists would
become shorter with each silent turn."""


@pytest.fixture(autouse=True)
def seams() -> Iterator[None]:
    SEEN.clear()
    with threads.seams():
        yield


def tell(name: str, value: object) -> None:
    if not RankScript.running().silent:
        SEEN.setdefault(name, []).append(value)


class Setup:
    """What all scripts have in common."""

    def __init__(self, batch_size: int = 3, norm: bool = False) -> None:
        dist.init_process_group("gloo")
        torch.manual_seed(1)
        x = torch.randn(SAMPLES, 4)
        data = TensorDataset(x, x.sum(1, keepdim=True))
        layers: list[nn.Module] = [nn.Linear(4, 3), nn.BatchNorm1d(3) if norm else nn.Tanh(), nn.Linear(3, 1)]
        self.model = DDP(nn.Sequential(*layers))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.sampler: DistributedSampler[Any] = DistributedSampler(data)
        self.loader: DataLoader[Any] = DataLoader(data, batch_size=batch_size, sampler=self.sampler)
        held_out = torch.arange(32.0).reshape(32, 1).expand(32, 4).contiguous()
        tests = TensorDataset(held_out, held_out[:, :1].clone())
        test_sampler: DistributedSampler[Any] = DistributedSampler(tests, shuffle=False)
        self.test_loader: DataLoader[Any] = DataLoader(tests, batch_size=4, sampler=test_sampler)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return F.mse_loss(self.model(x), y)

    def update(self, loss: Any) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = self.loss(x, y)
        self.update(loss)
        return loss.detach()  # type: ignore[no-any-return]


def trained() -> Setup:
    """After an epoch, before an evaluation."""
    setup = Setup()
    for x, y in setup.loader:
        setup.step(x, y)
    setup.model.eval()
    return setup


def stopped(main: Main, kind: type[BaseException], message: str) -> None:
    """By this error, in every worker, however many there are, if one of them has several ranks."""
    with pytest.raises(kind, match=message):
        threads.alone(main)
    assert {type(error) for error in threads.together(2, main).errors.values()} == {kind}


def trains(main: Main, steps: int | None = None, workers: Iterable[int] = (2, 4)) -> str:
    """With the same bits in every world, and what is told is told alike in all of them. Returns the digest."""
    digest, ledger = threads.alone(main)
    told = {name: values[:] for name, values in SEEN.items()}
    assert steps in (None, len(ledger))
    for count in some(tuple(workers), 1, main.__name__):
        SEEN.clear()
        outcome = threads.together(count, main)
        assert outcome.errors == {}
        assert set(outcome.digests.values()) == {digest}
        assert all(records == ledger for records in outcome.ledgers.values())
        for name, values in told.items():
            assert sorted(SEEN[name], key=repr) == sorted(values * count, key=repr)
    return digest


# ReadAhead


def list_of_the_loader() -> None:
    setup = Setup()
    for x, y in list(setup.loader):
        setup.step(x, y)


def two_batches_for_one_backward() -> None:
    setup = Setup()
    it = iter(setup.loader)
    while True:
        (x, y), (u, v) = next(it), next(it)
        setup.step(torch.cat([x, u]), torch.cat([y, v]))


def a_batch_left_out() -> None:
    setup = Setup()
    for i, (x, y) in enumerate(setup.loader):
        if i == 1:
            continue
        setup.step(x, y)


def a_batch_left_out_behind_the_model() -> None:
    setup = Setup()
    for i, (x, y) in enumerate(setup.loader):
        loss = setup.loss(x, y)
        if i == 1:
            continue
        setup.update(loss)


def a_batch_left_out_by_weight() -> None:
    """What to write instead of `continue`."""
    setup = Setup()
    for i, (x, y) in enumerate(setup.loader):
        loss = setup.loss(x, y) * float(i != 1)
        setup.update(loss)


# MidShardCollective


def called_before_backward(call: Callable[[Setup], object]) -> Main:
    def main() -> None:
        setup = Setup()
        for x, y in setup.loader:
            loss = setup.loss(x, y)
            call(setup)
            setup.update(loss)

    return main


def called_behind_each_backward(call: Callable[[Setup], object], last: bool = False) -> Main:
    """Of accumulated batches. last: behind that of the last one of a step alone, as the message says."""

    def main() -> None:
        setup = Setup()
        for i, (x, y) in enumerate(setup.loader):
            reduces = i % 2 == 1 or i + 1 == len(setup.loader)
            with nullcontext() if reduces else setup.model.no_sync():
                setup.loss(x, y).backward()
            if reduces or not last:
                call(setup)
            if reduces:
                setup.optimizer.step()
                setup.optimizer.zero_grad()

    return main


def barrier_before_the_model() -> None:
    setup = Setup()
    for x, y in setup.loader:
        dist.barrier()
        setup.step(x, y)


def evaluated_over(made: Callable[[Any, int, int], DataLoader[Any]]) -> Main:
    def main() -> None:
        setup = trained()
        setup.test_loader = made(setup.test_loader.dataset, int(dist.get_rank()), dist.get_world_size())
        tell("totals", evaluate(setup))

    return main


class RankedSampler(Sampler[int]):
    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[int]:
        return iter(range(32)[self.rank :: self.world_size])


class RankedBatches(Sampler[list[int]]):
    def __init__(self, rank: int, num_replicas: int) -> None:
        self.rank, self.num_replicas = rank, num_replicas

    def __iter__(self) -> Iterator[list[int]]:
        return ([number, number + self.num_replicas] for number in range(self.rank, 32, 2 * self.num_replicas))

    def __len__(self) -> int:
        return 16 // self.num_replicas


class RankedStream(IterableDataset[Any]):
    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[Any]:
        return iter((torch.ones(4), torch.ones(1)) for _ in range(self.rank, 32, self.world_size))


def evaluated_by_a_batch_sampler_of_its_own() -> None:
    """What it sums up is of all samples."""
    evaluated_over(lambda data, rank, ranks: DataLoader(data, batch_sampler=RankedBatches(rank, ranks)))()
    assert SEEN["totals"][0] == [496.0, 32.0]


def evaluated_over_what_all_ranks_have() -> None:
    """Every fourth sample, for all ranks alike, and other parts."""
    setup = trained()
    data: Any = setup.test_loader.dataset
    for indices in (tuple(range(0, 32, 4)), range(8), range(0, 32, 2), [0], list(range(4, 32, 4)), torch.arange(32)):
        setup.test_loader = DataLoader(Subset(data, indices), batch_size=4)  # type: ignore[arg-type]
        assert evaluate(setup) == [4.0 * sum(map(int, indices)), 4.0 * len(indices)]
    batches: Any = [np.array([0, 1]), np.array([4, 5])]
    setup.test_loader = DataLoader(data, batch_sampler=batches)
    assert evaluate(setup) == [40.0, 16.0]


def all_reduce_behind_the_step() -> None:
    setup = Setup()
    for x, y in setup.loader:
        loss = setup.step(x, y)
        dist.all_reduce(loss)
        tell("loss", loss.item())


def evaluate(setup: Setup, collective: Callable[[torch.Tensor], object] | None = None) -> list[float]:
    totals = torch.zeros(2)
    setup.model.eval()
    with torch.no_grad():
        for x, y in setup.test_loader:
            setup.model(x)
            totals[0] += y.sum()
            totals[1] += len(y)
            if collective is not None:
                collective(totals)
    dist.all_reduce(totals)
    setup.model.train()
    return totals.tolist()


def broadcast_in_an_evaluation() -> None:
    setup = Setup()
    for x, y in setup.loader:
        setup.step(x, y)
    evaluate(setup, lambda totals: dist.broadcast(totals, 0))


def all_reduce_behind_an_evaluation() -> None:
    setup = Setup()
    tell("before", evaluate(setup))
    for x, y in setup.loader:
        setup.step(x, y)
    tell("behind", evaluate(setup))
    assert SEEN["before"][0] == SEEN["behind"][0] == [496.0, 32.0]


def broadcast_by_rank_0() -> None:
    """What a script gives to rank 0 alone, and what each rank has itself."""
    setup = Setup()
    for i, (x, y) in enumerate(setup.loader):
        loss = setup.step(x, y)
        dist.broadcast(loss, 0)
        tell("loss of rank 0", loss.item())
        told = torch.full((), float(i) if dist.get_rank() == 0 else -1.0)
        dist.broadcast(told, 0)
        tell("told", told.item())
    assert set(SEEN["told"]) == set(map(float, range(BATCHES)))


def gathered_by_the_rank_of_its_beginning() -> None:
    """As a script has it that takes its rank from its environment."""
    setup = Setup()
    rank = int(dist.get_rank())

    def gather(value: torch.Tensor) -> list[float]:
        rows = [torch.zeros(()) for _ in range(dist.get_world_size())] if rank == 0 else None
        work = dist.gather(value, rows, dst=0, async_op=True)
        work.wait()
        again: Any = [torch.zeros(()) for _ in rows or ()]
        dist.gather(value, again)
        assert again == (rows or [])
        return [row.item() for row in again]

    for epoch in range(2):
        for x, y in setup.loader:
            loss = setup.step(x, y)
            if epoch == 0 and (rows := gather(loss)):
                tell("losses", len(set(rows)))
        if rows := gather(torch.full((), epoch + 1.0)):
            tell("epochs", rows)


def test_a_gather_wants_its_list_of_no_rank_in_particular() -> None:
    """A worker's rank of its beginning stays when it answers for rank 0, and in a silent turn it is rank 0 still."""
    digest, _ = threads.alone(gathered_by_the_rank_of_its_beginning)
    assert SEEN["losses"] == [4] * BATCHES and SEEN["epochs"] == [[1.0] * 4, [2.0] * 4]
    for kills in ({}, {"w0": (BATCHES + 3, 0)}):
        outcome = threads.together(2, gathered_by_the_rank_of_its_beginning, kills)
        assert outcome.errors == {} and set(outcome.digests.values()) == {digest}


def objects_of_all_sizes() -> None:
    setup = Setup()
    for i, (x, y) in enumerate(setup.loader):
        setup.step(x, y)
        words: list[Any] = ["w" * i, i] if dist.get_rank() == 0 else [None, None]
        dist.broadcast_object_list(words, src=0)
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, "x" * int(1 + abs(1000 * x[0, 0].item())))
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.gather_object({"sum": x.sum().item()}, gathered if dist.get_rank() == 0 else None)
        tell("objects", (words, found))
        if gathered[0] is not None:
            tell("gathered", len({entry["sum"] for entry in gathered}))
    assert [words for words, _ in SEEN["objects"]][-1] == ["w" * (BATCHES - 1), BATCHES - 1]
    assert set(SEEN["gathered"]) == {dist.get_world_size()}


def synchronised_norm() -> None:
    setup = Setup(norm=True)
    setup.model = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(setup.model.module))
    for x, y in setup.loader:
        setup.step(x, y)


def norm() -> None:
    setup = Setup(norm=True)
    for x, y in setup.loader:
        setup.step(x, y)


# TwoBackwards


def two_models_outputs() -> None:
    setup = Setup()
    for x, y in setup.loader:
        setup.optimizer.zero_grad()
        setup.loss(x, y).backward()
        setup.loss(-x, -y).backward()
        setup.optimizer.step()


def two_losses_of_one_output() -> None:
    setup = Setup()
    for x, y in setup.loader:
        out: Any = setup.model(x)
        setup.optimizer.zero_grad()
        F.mse_loss(out, y).backward(retain_graph=True)
        F.l1_loss(out, y).backward()
        setup.optimizer.step()


def two_losses_added_up() -> None:
    setup = Setup()
    for x, y in setup.loader:
        loss = setup.loss(x, y) + setup.loss(-x, -y)
        setup.update(loss)


def first_backward_without_reduction() -> None:
    """As the message of TwoBackwards says."""
    setup = Setup()
    for x, y in setup.loader:
        setup.optimizer.zero_grad()
        with setup.model.no_sync():
            setup.loss(x, y).backward()
        setup.loss(-x, -y).backward()
        setup.optimizer.step()


# LeftPass


def left_by_the_loss_of_one_rank() -> None:
    setup = Setup()
    for x, y in setup.loader:
        loss = setup.step(x, y)
        if loss.item() > 0:
            break


def left_by_the_loss_of_all_ranks() -> None:
    """As the message of LeftPass says."""
    setup = Setup()
    for i, (x, y) in enumerate(setup.loader):
        loss = setup.step(x, y)
        dist.all_reduce(loss)
        tell("loss", loss.item())
        if i > 0 and loss.item() < 6.0:
            break


def accumulated(every: int, fits: bool) -> None:
    setup = Setup()
    for i, (x, y) in enumerate(setup.loader):
        if (i + 1) % every and not (fits and i + 1 == len(setup.loader)):
            with setup.model.no_sync():
                setup.loss(x, y).backward()
        else:
            setup.loss(x, y).backward()
            setup.optimizer.step()
            setup.optimizer.zero_grad()


def test_leaving_the_loop_alone_is_named_where_each_worker_has_a_rank() -> None:
    def main() -> None:
        setup = Setup()
        for x, y in setup.loader:
            setup.step(x, y)
            if dist.get_rank() == 0:
                break

    assert {type(error) for error in threads.together(4, main).errors.values()} == {LeftAlone}


# UnknownBatches


def batches_of_a_tensor() -> None:
    setup = Setup()
    setup.step(torch.ones(2, 4), torch.ones(2, 1))


def batches_of_another_loader() -> None:
    setup = Setup()
    for x, y in DataLoader(setup.loader.dataset, batch_size=3):
        setup.step(x, y)


def draws_its_own_batches() -> None:
    def draw(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(size, 4), torch.randn(size, 1)

    dist.init_process_group("gloo")
    model = DDP(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = draw(3)
    for _ in range(4):
        loss = F.mse_loss(model(x), y)
        x, y = draw(3)
        loss.backward()
        optimizer.step()


def no_batches() -> None:
    Setup()
    RankScript.running().close()


def test_a_script_that_never_trains_is_named() -> None:
    stopped(draws_its_own_batches, UnknownBatches, "the script draws its batches itself, in test_mistakes.py:")
    stopped(
        draws_its_own_batches,
        UnknownBatches,
        r"ddp.batches\(lambda: draw\(3\), steps=N\).*write `x, y = next\(batches\)`",
    )
    with pytest.raises(UnknownBatches) as raised:
        threads.alone(draws_its_own_batches)
    assert str(raised.value).count("= draw(3)") == 2, (
        "both lines, and not `x = x.to(device)` or those of other functions"
    )
    stopped(no_batches, UnknownBatches, "ended without one step")
    assert {type(error) for error in threads.together(2, no_batches).errors.values()} == {UnknownBatches}


# NotInPlace


def before_the_loop(call: Callable[[Setup], object]) -> Main:
    def main() -> None:
        setup = Setup()
        call(setup)
        for x, y in setup.loader:
            setup.step(x, y)

    return main


def sharded(setup: Setup) -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the import compiles with what torch has deprecated itself
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(setup.model.parameters(), torch.optim.SGD, lr=0.1)


REFUSED: dict[str, Callable[[Setup], object]] = {
    "send": lambda _: dist.send(torch.ones(1), 3),
    "recv": lambda _: dist.recv(torch.ones(1), 3),
    "recv from anyone": lambda _: dist.recv(torch.ones(1)),
    "isend": lambda _: dist.isend(torch.ones(1), 3),
    "broadcast from another rank": lambda _: dist.broadcast(torch.ones(1), 1),
    "objects from another rank": lambda _: dist.broadcast_object_list([1], 1),
    "scatter": lambda _: dist.scatter(torch.ones(1), [torch.ones(1)] * 4 if dist.get_rank() == 0 else None),
    "reduce_scatter": lambda _: dist.reduce_scatter(torch.ones(1), [torch.ones(1)] * 4),
    "all_to_all": lambda _: dist.all_to_all_single(torch.ones(4), torch.ones(4)),
    "bitwise": lambda _: dist.all_reduce(torch.ones(1, dtype=torch.int64), dist.ReduceOp.BAND),
    "comm hook": lambda setup: setup.model.register_comm_hook(None, lambda state, bucket: None),
    "sharded optimizer": sharded,
    "group of some": lambda _: dist.new_group([0, 1]),
}


@pytest.mark.parametrize("call", REFUSED)
def test_what_one_rank_alone_sends_gets_or_holds_is_named(call: str) -> None:
    with pytest.raises(NotInPlace, match="does not work with logical ranks"):
        threads.alone(before_the_loop(REFUSED[call]))


def test_a_group_of_other_ranks_is_named_too() -> None:
    with pytest.raises(NotInPlace):
        threads.alone(before_the_loop(lambda _: dist.new_group([2, 3])))


def counted_by_a_range() -> None:
    setup = Setup()
    it = iter(setup.loader)
    for _ in range(4):
        x, y = next(it)
        setup.step(x, y)


def counted_by_a_zip() -> None:
    setup = Setup()
    for _, (x, y) in zip(range(4), setup.loader, strict=False):
        setup.step(x, y)


def counted_by_a_slice() -> None:
    setup = Setup()
    for _, (x, y) in enumerate(itertools.islice(setup.loader, 4)):
        setup.step(x, y)


def counted_by_a_variable() -> None:
    """As the message says."""
    setup = Setup()
    it, step = iter(setup.loader), 0
    while step < 4:
        x, y = next(it)
        setup.step(x, y)
        step += 1


def counted_by_enumerate() -> None:
    """As the message says."""
    setup = Setup()
    for i, (x, y) in enumerate(setup.loader):
        if i == 4:
            break
        setup.step(x, y)


def counted_by_a_named_range() -> None:
    setup = Setup()
    it, steps = iter(setup.loader), range(4)
    for _ in steps:
        x, y = next(it)
        setup.step(x, y)


def counted_over_a_generator() -> None:
    setup = Setup()

    def forever() -> Iterator[Any]:
        while True:
            yield from setup.loader

    for i, (x, y) in enumerate(forever()):
        if i == 4:
            break
        setup.step(x, y)


class Wrapped:
    """As a script writes it that moves batches to a device."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        for x, y in self.loader:
            yield x * 2, y


def counted_over_a_class_of_its_own() -> None:
    setup = Setup()
    for i, (x, y) in enumerate(Wrapped(setup.loader)):
        tell("number", i)
        if i == 4:
            break
        setup.step(x, y)


def cycled() -> None:
    setup = Setup()
    for i, (x, y) in enumerate(itertools.cycle(setup.loader)):
        if i == 2 * BATCHES:
            break
        setup.step(x, y)


def counted_in_a_dict() -> None:
    setup = Setup()
    it, state = iter(setup.loader), {"step": 0}
    while state["step"] < 4:
        x, y = next(it)
        setup.step(x, y)
        state["step"] += 1


def counted_in_a_namespace() -> None:
    setup = Setup()
    it, state = iter(setup.loader), SimpleNamespace(step=0)
    while state.step < 4:
        x, y = next(it)
        setup.step(x, y)
        state.step += 1


def counted_two_levels_deep() -> None:
    setup = Setup()
    it, trainer = iter(setup.loader), Trainer()
    while trainer.state.step < 4:
        x, y = next(it)
        setup.step(x, y)
        trainer.state.step += 1


class State:
    def __init__(self) -> None:
        self.step = 0


class Trainer:
    def __init__(self) -> None:
        self.state = State()


@pytest.mark.parametrize(
    "main",
    [
        counted_by_a_named_range,
        counted_in_a_dict,
        counted_in_a_namespace,
        counted_over_a_generator,
        counted_two_levels_deep,
    ],
)
def test_steps_that_are_counted_elsewhere_are_as_many_in_every_world_or_are_named(main: Main) -> None:
    found = set()
    for workers in (1, 4):
        outcome = threads.together(workers, main)
        assert all(isinstance(error, UsageError) for error in outcome.errors.values())
        found |= {len(records) for records in outcome.ledgers.values()}
    assert len(found) <= 1


def several_times_through_the_model() -> None:
    setup = Setup()
    for x, y in setup.loader:
        out = torch.zeros(())
        for _ in range(2):
            out = out + setup.model(x)
        loss: Any = F.mse_loss(out, y)
        setup.update(loss)


# StrayGradient


def gradients_never_dropped() -> None:
    setup = Setup()
    for x, y in setup.loader:
        setup.loss(x, y).backward()
        setup.optimizer.step()


def gradients_dropped_behind_the_step() -> None:
    """As the message says."""
    setup = Setup()
    for x, y in setup.loader:
        setup.loss(x, y).backward()
        setup.optimizer.step()
        setup.optimizer.zero_grad()


def weights_changed_by_hand() -> None:
    setup = Setup()
    for x, y in setup.loader:
        setup.model.zero_grad()
        setup.loss(x, y).backward()
        with torch.no_grad():
            for parameter in setup.model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.1)


def test_weights_that_no_optimizer_changes_are_named() -> None:
    for workers in (1, 4):
        errors = threads.together(workers, weights_changed_by_hand).errors
        assert errors
        assert all(isinstance(error, UsageError) for error in errors.values())


# ConfigError


def optimizer_made_late() -> None:
    setup = Setup()
    for x, y in setup.loader:
        setup.step(x, y)
        setup.optimizer = torch.optim.SGD(setup.model.parameters(), lr=0.01)


def scheduler_made_late() -> None:
    setup = Setup()
    for x, y in setup.loader:
        setup.step(x, y)
    torch.optim.lr_scheduler.StepLR(setup.optimizer, 2)


def sampler_for_two() -> None:
    setup = Setup()
    sampler: DistributedSampler[Any] = DistributedSampler(setup.loader.dataset, num_replicas=2, rank=0)
    for x, y in DataLoader(setup.loader.dataset, batch_size=3, sampler=sampler):
        setup.step(x, y)


def world_of_two() -> None:
    dist.init_process_group("gloo", rank=0, world_size=2)


def no_process_group() -> None:
    data = TensorDataset(torch.ones(8, 1))
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=4, rank=0)
    for _ in DataLoader(data, sampler=sampler):
        pass


# What works


def left_at_the_top() -> None:
    setup = Setup()
    for epoch in range(2):
        setup.sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(setup.loader):
            if i == 2:
                break
            setup.step(x, y)
        dist.barrier()


def left_at_the_bottom() -> None:
    setup = Setup()
    step = 0
    while True:
        for x, y in setup.loader:
            setup.step(x, y)
            step += 1
            if step >= 9:
                break
        if step >= 9:
            break


def left_at_the_bottom_by_enumerate() -> None:
    setup = Setup()
    for i, (x, y) in enumerate(setup.loader, 1):
        setup.step(x, y)
        if i == 3:
            break


def drawn_before_the_model() -> None:
    setup = Setup()
    for epoch in range(2):
        setup.sampler.set_epoch(epoch)
        for x, y in setup.loader:
            setup.step(x + random.random() * torch.randn_like(x), y)


def looked_at() -> None:
    """One batch is taken before the loop, to see how it looks."""
    setup = Setup()
    x, y = next(iter(setup.loader))
    tell("shape", tuple(x.shape))
    for x, y in setup.loader:
        setup.step(x, y)


def centred(kind: str) -> Main:
    """What the script keeps beside the model decides the loss: a running mean of its outputs, or how far it is."""

    def main() -> None:
        setup = Setup()
        mean, bound, sizes = torch.zeros(1), torch.zeros(()), [1.0]
        for epoch in range(2):
            setup.sampler.set_epoch(epoch)
            for x, y in setup.loader:
                out = setup.model(x)
                weight = {"in place": mean, "bound anew": bound, "list": sum(sizes) / len(sizes)}[kind]
                setup.update(F.mse_loss(out - weight, y))
                now = out.detach().mean()
                dist.all_reduce(now)
                mean.mul_(0.9).add_(now / 4)
                bound = bound * 0.9 + now / 4
                sizes.append(now.item())

    return main


@pytest.mark.parametrize("kind", ["in place", "bound anew", "list"])
def test_newcomers_get_short_tensors_and_lists(kind: str) -> None:
    main = centred(kind)
    digest, _ = threads.alone(main)
    outcome = threads.together(2, main, newcomers=1, asked_at=BATCHES, admit_at=BATCHES + 1)
    assert outcome.errors == {} and outcome.joined == {"n0": BATCHES + 1}
    assert set(outcome.digests.values()) == {digest}


def twice_under_one_number() -> None:
    setup = Setup()
    for epoch in range(3):
        setup.sampler.set_epoch(epoch + 1)
        for _ in range(2):
            for x, y in setup.loader:
                setup.step(x, y)


@pytest.mark.parametrize("epoch", [1, 3, 4])
def test_a_newcomer_finds_the_epoch_if_two_have_one_number(epoch: int) -> None:
    digest, _ = threads.alone(twice_under_one_number)
    admit = epoch * BATCHES + 1
    outcome = threads.together(2, twice_under_one_number, newcomers=1, asked_at=admit - 1, admit_at=admit)
    assert outcome.errors == {} and outcome.joined == {"n0": admit}
    assert set(outcome.digests.values()) == {digest}


def set_up_together() -> None:
    setup = Setup()
    seed = torch.full((2,), float(dist.get_rank() + 5))
    dist.broadcast(seed, 0)
    words: list[Any] = [{"lr": 0.05} if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(words, src=0)
    worlds: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(worlds, dist.get_world_size())
    group: Any = dist.new_group()
    ones = torch.ones(1)
    dist.all_reduce(ones, group=group)
    dist.barrier()
    dist.monitored_barrier()
    tell("all", (words, worlds, ones.item()))
    assert words[0] == {"lr": 0.05} and worlds == [4] * 4 and ones.item() == 4
    for parameter in setup.optimizer.param_groups:
        parameter["lr"] = words[0]["lr"]
    for x, y in setup.loader:
        setup.step(x, y)


@pytest.mark.parametrize(
    ("main", "steps"),
    [
        (left_at_the_top, 4),
        (left_at_the_bottom, 9),
        (left_at_the_bottom_by_enumerate, 3),
        (drawn_before_the_model, 2 * BATCHES),
        (looked_at, BATCHES),
        (set_up_together, BATCHES),
    ],
)
def test_scripts_that_come_close_have_the_same_bits_in_every_world(main: Main, steps: int) -> None:
    trains(main, steps, (2, 3))


@pytest.mark.parametrize("main", [left_at_the_top, left_at_the_bottom, drawn_before_the_model])
def test_they_have_them_through_deaths_and_joins(main: Main) -> None:
    digest, _ = threads.alone(main)
    for how in ({"kills": {"w0": (2, 0)}}, {"kills": {"w0": (3, 1)}}, {"newcomers": 1, "asked_at": 0, "admit_at": 1}):
        outcome = threads.together(3, main, **how)
        assert outcome.errors == {}
        assert set(outcome.digests.values()) == {digest}


def one_step_by_a_variable() -> None:
    setup = Setup()
    it, step = iter(setup.loader), 0
    while step < 1:
        x, y = next(it)
        setup.step(x, y)
        step += 1


def one_step_by_enumerate() -> None:
    setup = Setup()
    for i, (x, y) in enumerate(setup.loader):
        setup.step(x, y)
        if i == 0:
            break


def held_iterator() -> None:
    setup = Setup()
    it, step = iter(setup.loader), 0
    while True:
        x, y = next(it)
        if step == 2:
            break
        setup.step(x, y)
        step += 1
    dist.barrier()


def reduced_now_and_then() -> None:
    setup = Setup()
    for i, (x, y) in enumerate(setup.loader):
        loss = setup.step(x, y)
        if i % 3 == 1:
            dist.all_reduce(loss)
            tell("loss", loss.item())


def remembered_by_step() -> None:
    setup = Setup()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(setup.optimizer, 0.5)
    rates: dict[int, float] = {}
    for i, (x, y) in enumerate(setup.loader):
        setup.step(x, y)
        rates[i] = setup.optimizer.param_groups[0]["lr"]
        scheduler.step()
    tell("rates", list(rates.items()))


def counted_as_tensor() -> None:
    setup = Setup()
    total: Any = 0.0
    for x, y in setup.loader:
        total += torch.ones_like(setup.step(x, y))
    tell("total", float(total))


def counted_as_new_tensor() -> None:
    setup = Setup()
    total = torch.zeros(())
    for x, y in setup.loader:
        total = total + torch.ones_like(setup.step(x, y))
    tell("total", total.item())


def weighed_by(iterator: Callable[[], Any], weigh: Callable[[Any], float]) -> Main:
    def main() -> None:
        setup = Setup()
        kept = iterator()
        for x, y in setup.loader:
            setup.update(setup.loss(x, y) * weigh(kept))

    return main


def plain(batches: int = 5) -> DataLoader[Any]:
    """A loader that gives each worker the same."""
    return DataLoader(TensorDataset(torch.arange(1.0, batches + 1)), shuffle=True)


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def weighed_by_an_endless_generator(batches: int) -> Main:
    return weighed_by(lambda: endless(plain(batches)), lambda kept: next(kept)[0].item())


def trained_in_a_loop_over_another_loader() -> None:
    setup = Setup()
    it = iter(setup.loader)
    for (weight,) in plain():
        x, y = next(it)
        setup.update(setup.loss(x, y) * weight.item())


def other_loaders_in_a_turn() -> None:
    """And one that goes on between epochs."""
    setup = Setup()
    kept = endless(plain())
    for _ in range(2):
        for x, y in setup.loader:
            found = sum(weight.item() for (weight,) in plain())
            found += sum(number * weight.item() for number, (weight,) in enumerate(plain(), 1))
            found += sum((one * other).item() for (one,), (other,) in zip(plain(), plain(), strict=True))
            found += sum(weight.item() for (weight,) in Wrapping(plain()))
            found += next(endless(plain()))[0].item() + next(iter(plain()))[0].item()
            setup.update(setup.loss(x, y) * (1 + found / 1000))
        next(kept)


class Wrapping:
    """As tqdm does it."""

    def __init__(self, iterable: Iterable[Any]) -> None:
        self.iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        yield from self.iterable


def counted_without_end() -> None:
    setup = Setup()
    it = iter(setup.loader)
    for step in itertools.count():
        x, y = next(it)
        setup.step(x, y)
        if step == BATCHES - 1:
            break


def evaluated_as_tensor() -> None:
    setup = trained()
    right: Any = 0
    with torch.no_grad():
        for _x, y in setup.test_loader:
            right += (y >= 0).sum()
    found = torch.as_tensor(right).clone()
    dist.all_reduce(found)
    tell("right", found.item())


def evaluated_in_a_tensor_of_the_caller() -> None:
    setup = Setup()
    for x, y in setup.loader:
        setup.step(x, y)
    totals = torch.zeros(1)

    def validate(totals: torch.Tensor) -> None:
        setup.model.eval()
        with torch.no_grad():
            for _x, y in setup.test_loader:
                totals += len(y)

    validate(totals)
    dist.all_reduce(totals)
    tell("samples", totals.item())
    assert totals.item() == 32.0


def evaluated_in_numpy() -> None:
    setup = trained()
    count, total = 0, 0.0
    with torch.no_grad():
        for _x, y in setup.test_loader:
            count += (y.numpy() >= 0).sum()
            total += np.mean(y.numpy())
    found = torch.tensor([count, total], dtype=torch.float64)
    dist.all_reduce(found)
    tell("found", found.tolist())
    assert found.tolist() == [32.0, sum(range(32)) / 4]


def evaluated_by_extremes() -> None:
    setup = trained()
    lowest, highest = float("inf"), -float("inf")
    with torch.no_grad():
        for _x, y in setup.test_loader:
            lowest, highest = min(lowest, y.min().item() + 5), max(highest, y.max().item() - 50)
    tell("extremes", (lowest, highest))
    assert (lowest, highest) == (5.0, -19.0)


def evaluated_in_a_flag() -> None:
    setup = trained()
    bad = good = False
    with torch.no_grad():
        for _x, y in setup.test_loader:
            bad = bad or y.max().item() == 31.0
            if y.min() < 0:
                good = True
    tell("flags", (bad, good))
    assert (bad, good) == (True, False)


def evaluated_instead_of_none() -> None:
    setup = trained()
    worst: float | None = None
    with torch.no_grad():
        for _x, y in setup.test_loader:
            if worst is None or y.max().item() > worst:
                worst = y.max().item()


def evaluated_in_a_longer_tensor() -> None:
    setup = trained()
    outputs = torch.tensor([])
    with torch.no_grad():
        for x, _y in setup.test_loader:
            outputs = torch.cat([outputs, setup.model(x)])


def evaluated_in_a_list() -> None:
    setup = trained()
    means = []
    with torch.no_grad():
        for _x, y in setup.test_loader:
            means.append(y.mean().item())
    found = torch.tensor(sum(means) / len(means))
    dist.all_reduce(found)
    tell("found", found.item() / dist.get_world_size())
    assert found.item() / dist.get_world_size() == sum(range(32)) / 32


def evaluated_in_a_list_of_tensors() -> None:
    setup = trained()
    right = []
    with torch.no_grad():
        for x, y in setup.test_loader:
            right.append(setup.model(x) > y)


def evaluated_by(collect: Callable[[Iterable[Any]], object]) -> Main:
    def main() -> None:
        setup = Setup()
        setup.model.eval()
        next(iter(setup.test_loader))
        setup.model.train()
        for x, y in setup.loader:
            setup.step(x, y)
            setup.model.eval()
            collect(setup.test_loader)
            setup.model.train()

    return main


def asked_with_next(loader: Iterable[Any]) -> None:
    it = iter(loader)
    while True:
        if next(it, None) is None:
            break


def asked_in_a_generator(loader: Iterable[Any]) -> None:
    for x in (x for x, _ in loader):
        assert len(x)


def evaluated_in_part() -> None:
    setup = trained()
    total = torch.zeros(1)
    with torch.no_grad():
        for i, (_x, y) in enumerate(setup.test_loader):
            if i == 1:
                break
            total += len(y)
    dist.all_reduce(total)
    tell("samples", total.item())


def evaluated_in_the_loop() -> None:
    setup = Setup()
    for i, (x, y) in enumerate(setup.loader):
        setup.step(x, y)
        if i == 0:
            totals = evaluate(setup)
            tell("totals", totals)


def evaluated_with_all_reduce_in_the_loop(first: int) -> Main:
    def main() -> None:
        setup = trained()
        total = 0.0
        with torch.no_grad():
            for i, (_x, y) in enumerate(setup.test_loader):
                found = y.sum()
                if i >= first:
                    dist.all_reduce(found)
                total += found.item()
        tell("total", total)
        assert total == sum(range(32))

    return main


def batch_mixed_with_a_result() -> None:
    setup = trained()
    total = 0.0
    with torch.no_grad():
        for _x, y in setup.test_loader:
            found = y.sum()
            dist.all_reduce(found)
            total += y[0, 0].item() + found.item()


def two_loops_at_once() -> None:
    setup = Setup()
    for x, y in setup.loader:
        setup.step(x, y)
        for u, _v in setup.test_loader:
            with torch.no_grad():
                setup.model(u)


def test_an_evaluation_without_eval_does_not_stand_between_two_steps() -> None:
    """With several ranks a worker has left its loop in a turn."""
    errors = threads.together(threads.RANKS, two_loops_at_once).errors.values()
    assert len(errors) == threads.RANKS and {type(error) for error in errors} == {NotInPlace}
    assert all("after another loop over a DataLoader" in str(error) for error in errors)
    with pytest.raises(LeftPass, match="in a turn whose step is not over"):
        threads.alone(two_loops_at_once)


def one_function_trains_and_evaluates() -> None:
    """With gradients in the evaluation, too, which nothing asks for."""
    setup = Setup()

    def run(loader: DataLoader[Any], train: bool) -> float:
        setup.model.train(train)
        total = 0.0
        for x, y in loader:
            loss = setup.loss(x, y)
            if train:
                setup.optimizer.zero_grad()
                loss.backward()
                setup.optimizer.step()
            total += loss.item()
        return total

    for epoch in range(2):
        setup.sampler.set_epoch(epoch)
        run(setup.loader, train=True)
        tell("loss", round(run(setup.test_loader, train=False), 3))


def a_probe_with_two_kinds_of_backward() -> None:
    """It trains in eval(): one of the two comes in any case."""
    setup = Setup(batch_size=2)
    setup.model.eval()
    scaler = None
    for i, (x, y) in enumerate(setup.loader):
        loss = setup.loss(x, y)
        if scaler is not None:
            scaler.scale(loss).backward()
        elif i % 2 == 0:
            with setup.model.no_sync():
                loss.backward()
            continue
        else:
            loss.backward()
        setup.optimizer.step()
        setup.optimizer.zero_grad()


def statistics_in_an_evaluation() -> None:
    setup = Setup(norm=True)
    for x, y in setup.loader:
        setup.step(x, y)
    with torch.no_grad():
        for x, _ in setup.test_loader:
            setup.model(x)


def statistics_of_an_average(distributed: bool) -> Main:
    def main() -> None:
        setup = Setup(norm=True)
        average = torch.optim.swa_utils.AveragedModel(setup.model.module)
        for x, y in setup.loader:
            setup.step(x, y)
            average.update_parameters(setup.model.module)
        loader = setup.loader if distributed else DataLoader(setup.loader.dataset, batch_size=12)
        torch.optim.swa_utils.update_bn(loader, average)

    return main


@pytest.mark.parametrize("epoch", [0, 3])
def test_a_snapshot_of_a_later_epoch_than_the_checkpoint_is_named(epoch: int) -> None:
    def main() -> None:
        setup = Setup()
        RankScript.running().training.newcomer.data = {"sampler_epoch": epoch, "began_with": 0}
        setup.sampler.set_epoch(epoch + 1)
        for x, y in setup.loader:
            setup.step(x, y)

    with pytest.raises(ConfigError, match=r"begins with epoch 1, .* checkpoint, .* is of epoch 0.*Remove the snapshot"):
        threads.alone(main)


def stopped_by_an_evaluation() -> None:
    """Counts in plain numbers, whose number is divided by; and stops early, which a newcomer must not do earlier."""
    setup = Setup()
    best, bad, means = float("inf"), 0, []
    for epoch in range(6):
        setup.sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(setup.loader):
            setup.step(x, y)
            if i in (1, 4):
                tell("in the loop", plainly_evaluated(setup))
        mean = plainly_evaluated(setup)
        now = torch.tensor(float(abs(epoch - 1)))
        dist.all_reduce(now)
        means.append(mean)
        if now.item() < best:
            best, bad = now.item(), 0
        else:
            bad += 1
        if bad == 2:
            break
    tell("end", (len(means), best, means))


def plainly_evaluated(setup: Setup) -> float:
    setup.model.eval()
    total, number = 0.0, 0
    with torch.no_grad():
        for x, y in setup.test_loader:
            total += setup.loss(x, y).item() * len(y)
            number += len(y)
    setup.model.train()
    mean = total / number
    both = torch.tensor([total, float(number)], dtype=torch.float64)
    dist.all_reduce(both)
    assert mean == both[0].item() / both[1].item() or RankScript.running().silent
    return mean


def test_a_newcomer_has_the_results_of_the_evaluations_before_it() -> None:
    main = stopped_by_an_evaluation
    digest = trains(main, 4 * BATCHES, (2, 4))
    (end,) = SEEN["end"][:1]
    for admit in some((2 * BATCHES + 3, 1, 3 * BATCHES + 1), 1, ""):
        SEEN.clear()
        outcome = threads.together(2, main, newcomers=1, asked_at=admit - 1, admit_at=admit)
        assert outcome.errors == {} and outcome.joined == {"n0": admit}
        assert set(outcome.digests.values()) == {digest}
        assert SEEN["end"] == [end] * 3


def scheduler_at_the_top() -> None:
    setup = Setup()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(setup.optimizer, 0.9)
    for i, (x, y) in enumerate(setup.loader):
        if i > 0:
            scheduler.step()
        setup.step(x, y)


def rates_that_shrink_at_the_top() -> None:
    setup = Setup()
    for x, y in setup.loader:
        for group in setup.optimizer.param_groups:
            group["lr"] *= 0.9
        setup.step(x, y)


def test_a_rate_that_shrinks_in_each_turn_is_named() -> None:
    rate = "learning rate of optimizer, group 0"
    seen = rf"{rate} changed .* seen at .*test_mistakes\.py:\d+ in .* \({rate}: 0\.\d+ before, 0\.\d+ now\)"
    with pytest.raises(StateChanged, match=rf"{seen}.* = lr \* 0.9\*\*step`"):
        threads.alone(rates_that_shrink_at_the_top)


def scheduler_at_the_bottom() -> None:
    setup = Setup()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(setup.optimizer, 0.9)
    for x, y in setup.loader:
        setup.step(x, y)
        scheduler.step()


def rates_set_at_the_bottom() -> None:
    """By the step, relative to what they were, and by hand for the next one; other settings too."""
    setup = Setup()
    step = 0
    for epoch in range(2):
        setup.sampler.set_epoch(epoch)
        for x, y in setup.loader:
            setup.step(x, y)
            step += 1
            for group in setup.optimizer.param_groups:
                group["lr"] = 0.1 / step
                group["weight_decay"] = 0.5 * group["weight_decay"] + 0.01
                if step % 3 == 0:
                    group["momentum"] += 0.1
            tell("settings", [{k: v for k, v in g.items() if k != "params"} for g in setup.optimizer.param_groups])


def layers_frozen_by_the_step() -> None:
    setup = Setup()
    step = 0
    for epoch in range(2):
        setup.sampler.set_epoch(epoch)
        for x, y in setup.loader:
            setup.step(x, y)
            step += 1
            if step == 3:
                setup.model.module[0].requires_grad_(False)
            if step == 9:
                setup.model.module[0].requires_grad_(True)
                setup.model.module[2].requires_grad_(False)


def rates_by_the_counter_of_a_generator() -> None:
    setup = Setup()

    def batches() -> Iterator[Any]:
        number = 0
        for epoch in range(2):
            setup.sampler.set_epoch(epoch)
            for batch in setup.loader:
                number += 1
                yield number, batch

    for number, (x, y) in batches():
        for group in setup.optimizer.param_groups:
            group["lr"] = 0.1 / number
        setup.step(x, y)


def losses_weighed_by_sliding_windows() -> None:
    setup = Setup()
    popped, sliced, ring, counts = [0.0], [0.0], deque([0.0], maxlen=4), [0]
    for epoch in range(2):
        setup.sampler.set_epoch(epoch)
        for x, y in setup.loader:
            setup.update(setup.loss(x, y) * (1 + sum(popped) + sum(sliced) + sum(ring) + counts[0]))
            counts[0] += 1
            popped.append(counts[0] / 10)
            if len(popped) > 2:
                popped.pop(0)
            sliced.append(counts[0] / 10)
            sliced = sliced[-3:]
            ring.append(counts[0] / 10)


def a_rate_by_what_an_evaluation_has_listed() -> None:
    setup = Setup()
    for epoch in range(2):
        setup.sampler.set_epoch(epoch)
        for x, y in setup.loader:
            setup.step(x, y)
        setup.model.eval()
        losses, by_name = [], defaultdict(list)
        table, right = torch.zeros(9, 9, dtype=torch.int64), torch.tensor(0)
        for x, y in setup.test_loader:
            with torch.no_grad():
                losses.append(setup.loss(x, y))
            by_name["loss"].append(losses[-1].item())
            table[0, int(y.max()) % 9] += len(y)
            right += int(y.max())
        setup.model.train()
        mean = torch.stack(losses).mean()
        for tensor in (mean, table, right):
            dist.all_reduce(tensor)
        tell("whole numbers", [table[0].tolist(), right.item()])
        assert table.sum() == 32
        setup.optimizer.param_groups[0]["lr"] = 0.1 / (1 + float(mean) + max(by_name["loss"]) + len(losses))


def losses_flushed_every_third_step() -> None:
    setup = Setup()
    losses, flushed = list[torch.Tensor](), 0
    for epoch in range(2):
        setup.sampler.set_epoch(epoch)
        for x, y in setup.loader:
            losses.append(setup.step(x, y))
            if len(losses) == 3:
                dist.all_reduce(torch.stack(losses).mean())
                losses.clear()
                flushed += 1
                setup.optimizer.param_groups[0]["lr"] = 0.1 / (1 + flushed)


def layers_frozen_with_gradients_of_zero() -> None:
    """Which the momentum of a frozen layer goes on with."""
    setup = Setup()
    for group in setup.optimizer.param_groups:
        group["momentum"] = 0.9
    for epoch in range(2):
        setup.sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(setup.loader):
            setup.loss(x, y).backward()
            setup.optimizer.step()
            setup.optimizer.zero_grad(set_to_none=False)
            if i == 3:
                setup.model.module[2].requires_grad_(False)


@pytest.mark.parametrize(
    "main",
    [
        rates_set_at_the_bottom,
        layers_frozen_by_the_step,
        rates_by_the_counter_of_a_generator,
        losses_weighed_by_sliding_windows,
        a_rate_by_what_an_evaluation_has_listed,
        losses_flushed_every_third_step,
        layers_frozen_with_gradients_of_zero,
    ],
)
def test_what_a_script_sets_behind_its_step_is_set_once_a_step(main: Main) -> None:
    digest = trains(main, 2 * BATCHES, (2, 3, 4))
    for admit in some((1, 5, BATCHES + 1, BATCHES + 3), 1, main.__name__):
        outcome = threads.together(2, main, newcomers=1, asked_at=admit - 1, admit_at=admit)
        assert outcome.errors == {} and outcome.joined == {"n0": admit}
        assert set(outcome.digests.values()) == {digest}


class Moved(Recorded):
    """Its ranks are others while it is `elsewhere`, as if another worker were there still."""

    elsewhere = False

    def owned(self, units: int) -> tuple[int, ...]:
        return (units - 1,) if self.elsewhere else tuple(range(units))


def moved(*, at_the_top: bool) -> str:
    """The digest of a job which gets more ranks between the batch and the forward of step 2.

    at_the_top: of the loop, its scheduler steps.
    """

    def main() -> None:
        setup = Setup()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(setup.optimizer, 0.9)
        for i, (x, y) in enumerate(setup.loader):
            Moved.elsewhere = False
            if at_the_top and i > 0:
                scheduler.step()
            setup.step(x, y)
            if not at_the_top:
                scheduler.step()
            if i == 1 and not RankScript.running().silent:
                Moved.elsewhere = True

    return threads.run(Moved(), main)


def test_a_worker_that_gets_ranks_with_a_batch_in_its_hands_begins_with_the_first_of_them() -> None:
    digest, _ = threads.alone(scheduler_at_the_bottom)
    assert moved(at_the_top=False) == digest


def test_a_scheduler_at_the_top_steps_once_where_a_worker_gets_ranks_with_a_batch_in_its_hands() -> None:
    digest, _ = threads.alone(scheduler_at_the_top)
    assert moved(at_the_top=True) == digest


def step_with_a_closure() -> None:
    setup = Setup()
    for x, y in setup.loader:

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> float:
            setup.optimizer.zero_grad()
            loss = setup.loss(x, y)
            loss.backward()
            return float(loss.item())

        setup.optimizer.step(closure)


def test_an_optimizer_with_a_closure_is_named() -> None:
    with pytest.raises(NotInPlace, match="closure"):
        threads.alone(step_with_a_closure)


# By the tables

STOPPED: dict[str, tuple[Main, type[BaseException], str]] = {
    "a list of the loader": (list_of_the_loader, ReadAhead, "take one batch, call backward"),
    "two batches for one backward": (two_batches_for_one_backward, ReadAhead, "take one batch, call backward"),
    "a batch left out": (a_batch_left_out, ReadAhead, "take one batch, call backward"),
    "one that the model has seen": (a_batch_left_out_behind_the_model, ReadAhead, "take one batch, call backward"),
    "a collective before backward": (
        called_before_backward(lambda _: dist.all_reduce(torch.ones(1))),
        MidShardCollective,
        "between a batch and its backward",
    ),
    "one behind backward under no_sync": (
        called_behind_each_backward(lambda _: dist.all_reduce(torch.ones(1))),
        MidShardCollective,
        r"^dist.all_reduce\(.*\) was called behind a backward\(\) under no_sync.* `if accelerator.sync_gradients:`",
    ),
    "one before the model": (barrier_before_the_model, MidShardCollective, "between a batch and its backward"),
    "one of an evaluation before backward": (
        called_before_backward(evaluate),
        MidShardCollective,
        "between a batch and its backward",
    ),
    "one in an evaluation": (broadcast_in_an_evaluation, MidShardCollective, "inside the loop of an evaluation"),
    "one that comes first for a later batch": (
        evaluated_with_all_reduce_in_the_loop(1),
        MidShardCollective,
        "inside the loop of an evaluation",
    ),
    "an evaluation that is left early": (evaluated_in_part, MidShardCollective, "without `break`"),
    "synchronised batch norm": (synchronised_norm, NotCarried, "SyncBatchNorm, .* use BatchNorm"),
    "a second backward in a turn": (two_models_outputs, TwoBackwards, "Add the losses up"),
    "a second backward of one output": (two_losses_of_one_output, TwoBackwards, "a second backward"),
    "leaving the loop in a silent turn": (left_by_the_loss_of_one_rank, LeftPass, "compare what dist.all_reduce"),
    "accumulation that does not fit": (lambda: accumulated(3, False), LeftPass, "Step on the last batch too"),
    "batches of a tensor": (batches_of_a_tensor, UnknownBatches, "sampler=DistributedSampler"),
    "batches of another loader": (batches_of_another_loader, UnknownBatches, "sampler=DistributedSampler"),
    "a cycle over the batches of an epoch": (
        cycled,
        UnknownBatches,
        r"itertools.cycle\(loader\) keeps the batches of its first epoch",
    ),
    "turns counted by a range": (counted_by_a_range, NotInPlace, "counts the turns of this loop"),
    "turns counted by a zip": (counted_by_a_zip, NotInPlace, "counts the turns of this loop"),
    "turns counted by a slice": (counted_by_a_slice, NotInPlace, "counts the turns of this loop"),
    "turns counted without end": (counted_without_end, NotInPlace, r"for step in count\(...\) counts the turns"),
    "a value of a batch together with a result": (
        batch_mixed_with_a_result,
        NotInPlace,
        "total in .* by a value of the batch together with what",
    ),
    "an evaluation that collects tensors": (
        evaluated_in_a_list_of_tensors,
        NotInPlace,
        "right in .*, a list that gets other things than one number a batch",
    ),
    "an evaluation in which a number takes the place of None": (
        evaluated_instead_of_none,
        NotInPlace,
        "worst in .*, None that becomes a number of a rank's batches,",
    ),
    "an evaluation that makes a tensor longer": (
        evaluated_in_a_longer_tensor,
        NotInPlace,
        "outputs in .*, a tensor that gets longer,",
    ),
    "a gradient of the step before": (gradients_never_dropped, StrayGradient, "zero_grad"),
    "an optimizer made late": (optimizer_made_late, ConfigError, "make it before the first epoch"),
    "a scheduler made late": (scheduler_made_late, ConfigError, "make it before the first epoch"),
    "a sampler for two": (sampler_for_two, ConfigError, "leave num_replicas= out"),
    "a world of two": (world_of_two, ConfigError, "start the script with --ranks 2"),
    "no process group": (no_process_group, ConfigError, "init_process_group"),
    "batch norm that learns in an evaluation": (
        statistics_in_an_evaluation,
        BufferChanged,
        r"model 0: 1.* changed .* call model.eval\(\) before the loop",
    ),
    "batch norm of an average that does": (
        statistics_of_an_average(True),
        BufferChanged,
        r"average 0: module.1.* a DataLoader without a Distributed",
    ),
}

GOES_ON: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "count": (itertools.count, next),
    "list_iterator": (lambda: iter([1.0] * 100), next),
    "Random": (lambda: random.Random(1), lambda kept: kept.random()),
    "Generator": (lambda: np.random.default_rng(1), lambda kept: float(kept.random())),
    "RandomState": (lambda: np.random.RandomState(1), lambda kept: float(kept.rand())),
    "Generator of torch": (
        lambda: torch.Generator().manual_seed(1),
        lambda kept: torch.rand((), generator=kept).item(),
    ),
    "_SingleProcessDataLoaderIter": (
        lambda: iter(DataLoader(TensorDataset(torch.ones(100)))),
        lambda kept: next(kept)[0].item(),
    ),
}
"""Iterators and random generators, by their class."""
STOPPED |= {
    f"a {kind} that goes on": (weighed_by(*kept), NotInPlace, f"kept in .*, a {kind.split()[0]}, goes on in each turn")
    for kind, kept in GOES_ON.items()
}
STOPPED |= {
    f"a generator of another loader of {batches} batches": (
        weighed_by_an_endless_generator(batches),
        NotInPlace,
        r"without a DistributedSampler, a _Single.*, asked at .* in endless, goes on in each turn",
    )
    for batches in (1, 2, 5)
}
STOPPED["a loop over another loader"] = (trained_in_a_loop_over_another_loader, NotInPlace, "goes on in each turn")
OWN_PARTS: dict[str, Callable[[Any, int, int], DataLoader[Any]]] = {
    "a Subset": lambda data, rank, ranks: DataLoader(Subset(data, range(rank, len(data), ranks)), 4),
    "a Subset of a list": lambda data, rank, ranks: DataLoader(Subset(data, list(range(len(data)))[rank::ranks]), 4),
    "a Subset of a part": lambda data, rank, ranks: DataLoader(
        Subset(Subset(data, torch.arange(32)[rank::ranks].tolist()), range(8))
    ),
    "a range": lambda data, rank, ranks: DataLoader(data, 4, sampler=range(rank, len(data), ranks)),
    "a sampler of a part": lambda data, rank, ranks: DataLoader(
        data, sampler=SubsetRandomSampler(range(rank, len(data), ranks))
    ),
    "a sampler with a rank": lambda data, rank, ranks: DataLoader(data, 4, sampler=RankedSampler(rank, ranks)),
    "a stream with a rank": lambda data, rank, ranks: DataLoader(RankedStream(rank, ranks)),
}
"""An evaluation's loader, of a part that the script has cut out by its own rank."""
STOPPED |= {
    f"an evaluation of the part of the own rank, by {how}": (
        evaluated_over(made),
        NotInPlace,
        "the samples of one rank alone, .*DistributedSampler",
    )
    for how, made in OWN_PARTS.items()
}
WITHOUT_A_STATEMENT: dict[str, Callable[[Iterable[Any]], object]] = {
    "list()": list,
    "sum()": lambda loader: sum(len(x) for x, _ in loader),
    "a comprehension": lambda loader: [len(x) for x, _ in loader],
}
STOPPED |= {
    f"an evaluation by {name}": (
        evaluated_by(collect),
        NotInPlace,
        "a comprehension, over the batches of a DistributedSampler",
    )
    for name, collect in WITHOUT_A_STATEMENT.items()
}


@pytest.mark.parametrize(("main", "error", "said"), STOPPED.values(), ids=STOPPED)
def test_what_breaks_a_rule_is_named(main: Main, error: type[BaseException], said: str) -> None:
    stopped(main, error, said)


del STOPPED  # each turn of a script looks through what its file has at the top level


TRAINS: dict[str, tuple[Main, int | None]] = {
    "a batch whose loss does not count is a step": (a_batch_left_out_by_weight, BATCHES),
    "behind the step each rank brings its value, and all get the sum": (all_reduce_behind_the_step, BATCHES),
    "behind the step rank 0 may broadcast": (broadcast_by_rank_0, BATCHES),
    "behind an evaluation there is the sum of all batches": (all_reduce_behind_an_evaluation, BATCHES),
    "batch norm works": (norm, BATCHES),
    "two losses may be added up": (two_losses_added_up, BATCHES),
    "a collective works behind the last backward of a step": (
        called_behind_each_backward(lambda _: dist.all_reduce(torch.ones(1)), last=True),
        BATCHES // 2 + 1,
    ),
    "a second backward works if the first is under no_sync": (first_backward_without_reduction, BATCHES),
    "a loop may be left by what all_reduce gives": (left_by_the_loss_of_all_ranks, 6),
    "accumulation works with a step on the last batch": (lambda: accumulated(3, True), 3),
    "steps may be counted in a variable": (counted_by_a_variable, 4),
    "steps may be counted by enumerate": (counted_by_enumerate, 4),
    "enumerate counts the batches of a class that wraps the loader": (counted_over_a_class_of_its_own, 4),
    "a range inside a turn counts no turns": (several_times_through_the_model, BATCHES),
    "zero_grad may come behind the step": (gradients_dropped_behind_the_step, BATCHES),
    "one step by a variable": (one_step_by_a_variable, 1),
    "one step by enumerate": (one_step_by_enumerate, 1),
    "a loop left at its top may keep its iterator": (held_iterator, 2),
    "what is reduced every third step is the sum over ranks": (reduced_now_and_then, None),
    "what is remembered under the number of a step is that of the step": (remembered_by_step, None),
    "a sum that becomes a tensor counts steps": (counted_as_tensor, None),
    "a sum that is a new tensor counts steps": (counted_as_new_tensor, None),
    "an evaluation may reduce for each batch": (evaluated_with_all_reduce_in_the_loop(0), None),
    "an evaluation may keep gradients": (one_function_trains_and_evaluates, 2 * BATCHES),
    "a backward in each branch of a condition trains in eval": (a_probe_with_two_kinds_of_backward, None),
    "an evaluation may count in a tensor that was a number": (evaluated_as_tensor, None),
    "an evaluation may add to a tensor of its caller": (evaluated_in_a_tensor_of_the_caller, None),
    "an evaluation may count in numbers of numpy": (evaluated_in_numpy, None),
    "an evaluation has the lowest and the highest of all ranks": (evaluated_by_extremes, None),
    "an evaluation may have flags": (evaluated_in_a_flag, None),
    "an evaluation may keep one number a batch in a list": (evaluated_in_a_list, None),
    "an evaluation in the loop has the sum of all batches": (evaluated_in_the_loop, None),
    "batch norm of an average may learn from a plain loader": (statistics_of_an_average(False), BATCHES),
    "a scheduler may step at the top of the loop": (scheduler_at_the_top, BATCHES),
    "an evaluation may have a batch sampler of its own": (evaluated_by_a_batch_sampler_of_its_own, BATCHES),
    "an evaluation may be of a part that all ranks have": (evaluated_over_what_all_ranks_have, BATCHES),
    "another loader may be gone through in a turn": (other_loaders_in_a_turn, 2 * BATCHES),
    "a scheduler may step at the bottom of the loop": (scheduler_at_the_bottom, BATCHES),
}


@pytest.mark.parametrize(("main", "steps"), TRAINS.values(), ids=TRAINS)
def test_what_comes_close_trains(main: Main, steps: int | None) -> None:
    trains(main, steps)


del TRAINS


@pytest.mark.parametrize("collect", [asked_with_next, asked_in_a_generator])
def test_an_evaluation_may_ask_for_its_batches_in_any_loop(collect: Callable[[Iterable[Any]], object]) -> None:
    trains(evaluated_by(collect), BATCHES, (2,))


def test_behind_the_step_objects_may_differ_in_size_from_rank_to_rank_and_from_step_to_step() -> None:
    digest, _ = threads.alone(objects_of_all_sizes)
    told = SEEN["objects"][:]
    for workers in (2, 4):
        SEEN.clear()
        outcome = threads.together(workers, objects_of_all_sizes)
        assert outcome.errors == {} and set(outcome.digests.values()) == {digest}
        assert sorted(SEEN["objects"], key=repr) == sorted(told * workers, key=repr)
