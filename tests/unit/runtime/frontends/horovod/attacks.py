"""Elastic scripts for Horovod that do what is hard to survive: many tensors, calls that are under way, gradients that
are half collected."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import elastic.horovod.torch as hvd
from runtime.frontends.horovod import current
from tests.unit.runtime.frontends.horovod.members import Worker
from tests.unit.worlds import Killed

STEPS = 4
TENSORS = 300
OPERATIONS = 1 + 3 * STEPS
"""Of many(), with those of its begin."""


def own_id() -> str:
    found: str = current._here.world._training.session.worker_id  # type: ignore[union-attr]
    return found


def many(worker: Worker, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    """A model of TENSORS parameters, of which every third is used in each second step only."""
    torch.manual_seed(1)
    model = nn.ParameterList([nn.Parameter(torch.randn(number % 5 + 1, dtype=dtype)) for number in range(TENSORS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def body(state: Any) -> None:
        while state.step < STEPS:
            optimizer.zero_grad()
            used = [weight for number, weight in enumerate(model) if number % 3 or state.step % 2]
            torch.stack([weight.float().square().sum() for weight in used]).sum().mul(1 + hvd.rank()).backward()
            optimizer.step()
            worker.sizes.append(hvd.size())
            state.step += 1
            state.commit()

    body(hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0))
    worker.weights = [float(value) for weight in model for value in weight.detach().flatten()]


def under_way(worker: Worker, calls: int = 3, dies_at: int = -1) -> None:
    """Asynchronous collectives, one of which is the last that w1 lives to see."""

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def body(state: Any) -> None:
        while state.step < STEPS:
            handles = []
            for number in range(calls):
                handles.append(hvd.allreduce_async(torch.full((5000,), 1.0 + hvd.rank()), op=hvd.Sum))
                if own_id() == "w1" and (state.step, number) == (1, dies_at):
                    raise Killed("w1")
            state.sums = [*state.sums, *(float(hvd.synchronize(handle)[0]) for handle in handles)]
            state.step += 1
            state.commit()
        worker.weights = list(state.sums)

    body(hvd.elastic.ObjectState(step=0, sums=[]))


def grouped(worker: Worker) -> None:
    """Grouped collectives in each step, of small tensors and of large ones."""

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def body(state: Any) -> None:
        while state.step < STEPS:
            rank, size = hvd.rank(), hvd.size()
            tensors = [torch.full((length,), 1.0) for length in (1, 700, 9000)]
            summed = hvd.grouped_allreduce(tensors, op=hvd.Sum)
            assert [found.sum().item() for found in summed] == [size * tensor.numel() for tensor in tensors]
            assert hvd.grouped_allreduce([torch.tensor([rank])], op=hvd.Max)[0].item() == size - 1
            gathered = hvd.grouped_allgather([torch.full((rank + 1, 2), rank), torch.full((2000,), float(rank))])
            assert gathered[0][:, 0].tolist() == [one for one in range(size) for _ in range(one + 1)]
            assert gathered[1].numel() == 2000 * size
            worker.sizes.append(size)
            state.step += 1
            state.commit()
        worker.weights = [float(state.step)]

    body(hvd.elastic.ObjectState(step=0))


def accumulated(worker: Worker, dies: str = "") -> None:
    """Two backward() calls a step; a worker dies between them."""
    torch.manual_seed(1)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), backward_passes_per_step=2)

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def body(state: Any) -> None:
        while state.step < STEPS:
            optimizer.zero_grad()
            model(torch.full((2, 3), 1.0 + hvd.rank())).square().mean().backward()
            if own_id() == dies and state.step == 2:
                raise Killed(dies)
            model(torch.full((2, 3), 2.0)).square().mean().backward()
            optimizer.step()
            state.step += 1
            state.commit()

    body(hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0))
    worker.weights = [float(value) for weight in model.parameters() for value in weight.detach().flatten()]


def rolled_back(worker: Worker, fails_at: int = 0) -> None:
    """One sample a batch; all workers raise HorovodInternalError once, between a step and its commit."""
    torch.manual_seed(1)
    model = nn.Linear(3, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    sampler = hvd.elastic.ElasticSampler(range(24), shuffle=False)

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def body(state: Any) -> None:
        for number in sampler:
            optimizer.zero_grad()
            model(torch.full((2, 3), 1.0 + number)).square().mean().backward()
            optimizer.step()
            sampler.record_batch(0, 1)
            state.step += 1
            if state.step == fails_at and not worker.calls:
                worker.calls += 1
                raise hvd.HorovodInternalError("a link of the script's own is down")
            worker.samples.append((state.step, number))
            state.commit()

    body(hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, step=0))
    worker.weights = [float(value) for weight in model.parameters() for value in weight.detach().flatten()]


def without_commits(worker: Worker) -> None:
    torch.manual_seed(1)
    model = nn.Linear(3, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def body(state: Any) -> None:
        for step in range(STEPS):
            optimizer.zero_grad()
            model(torch.full((2, 3), 1.0 + step + hvd.rank())).square().mean().backward()
            optimizer.step()
            worker.sizes.append(hvd.size())

    body(hvd.elastic.TorchState(model=model, optimizer=optimizer))
    worker.weights = [float(value) for weight in model.parameters() for value in weight.detach().flatten()]


def rows(worker: Worker, steps: int = 2) -> None:
    """Collectives of which a rank gets the part of another one, or sends its own, and their gradients: whatever a lost
    worker has brought is there as a whole, or missing as a whole."""

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def body(state: Any) -> None:
        while state.step < steps:
            _sparse()
            _exchanged()
            _gathered()
            _scattered()
            _normalized()
            state.step += 1
            state.commit()
        worker.weights = [float(state.step)]

    body(hvd.elastic.ObjectState(step=0))


def from_each_root(worker: Worker, steps: int = 2) -> None:
    """Each rank says its number. worker.samples: (root, what was said)."""

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def body(state: Any) -> None:
        while state.step < steps:
            for root in range(hvd.size()):
                said = hvd.broadcast(torch.tensor(hvd.rank()), root)
                large = hvd.broadcast_object([hvd.rank(), "x" * 5000], root)
                worker.samples += [(root, int(said)), (root, large[0])]
            state.step += 1
            state.commit()
        worker.weights = [float(number) for sample in worker.samples for number in sample]

    body(hvd.elastic.ObjectState(step=0))


def _sparse() -> None:
    ones = torch.sparse_coo_tensor(torch.tensor([[1, 2]]), torch.ones(2), (3,), check_invariants=True)
    assert hvd.sparse_allreduce_async(ones, "ones", hvd.Average)().to_dense().tolist() == [0.0, 1.0, 1.0]


def _exchanged() -> None:
    rank, size = hvd.rank(), hvd.size()
    sent = torch.tensor([[float(rank), float(to)] for to in range(size) for _ in range(to + 1)], requires_grad=True)
    got, counts = hvd.alltoall(sent, splits=range(1, size + 1))
    assert set(counts.tolist()) <= {0, rank + 1} and len(counts) == size, "each has sent its part, or is lost"
    assert got.tolist() == [[sender, rank] for sender, count in enumerate(counts.tolist()) for _ in range(count)]
    got.sum().backward()
    assert sent.grad is not None
    for to, part in enumerate(sent.grad.split([*range(1, size + 1)])):
        assert part.unique().tolist() in ([[1.0], [0.0]] if to != rank else [[1.0]])


def _gathered() -> None:
    rank = hvd.rank()
    own = torch.full((rank + 1,), float(rank), requires_grad=True)
    whole = hvd.allgather(own)
    (whole * whole.detach()).sum().backward()
    assert own.grad is not None and own.grad.tolist() == own.tolist()


def _scattered() -> None:
    given = torch.ones(7, requires_grad=True)
    hvd.reducescatter(given, op=hvd.Average).sum().backward()
    assert given.grad is not None and set(given.grad.tolist()) <= {0.0, 1.0}


def _normalized() -> None:
    norm, own = hvd.SyncBatchNorm(1), torch.tensor([[-1.0], [1.0]], requires_grad=True)
    out = norm(own)
    out.square().sum().backward()
    assert torch.allclose(out, own, atol=1e-4) and own.grad is not None and own.grad.isfinite().all()
