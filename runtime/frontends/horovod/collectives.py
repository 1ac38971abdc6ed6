"""hvd.allreduce and the other collectives, with their grouped, in-place and async forms.

All of them have come to their end when they return: a handle of an async form holds the result. Gradients are reduced
together, in one call, by DistributedOptimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from runtime.frontends.horovod.arithmetic import ReduceOp, chosen_op, pieces, scaled, split_sizes
from runtime.frontends.horovod.compression import Compression, Compressor
from runtime.frontends.horovod.current import entered, global_process_set, here
from runtime.frontends.horovod.interrupts import BadArgument
from runtime.frontends.horovod.process_sets import ProcessSet
from runtime.frontends.horovod.world import Call

Tensor: TypeAlias = torch.Tensor
Tensors: TypeAlias = Sequence[torch.Tensor]
Computed: TypeAlias = Callable[[Tensors], list[Tensor]]


class AsyncHandle:
    """What an async form returns."""

    def __init__(self, result: Any) -> None:
        self.result = result


def poll(handle: AsyncHandle) -> bool:
    """Whether synchronize() would return at once: always."""
    return True


def synchronize(handle: AsyncHandle) -> Any:
    """The result."""
    return handle.result


# What all of them have in common


def _call(
    kind: str, tensors: Tensors, name: str | None, among: ProcessSet, *, ragged: bool = False, **fields: Any
) -> Call:
    about = []
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise BadArgument(f"hvd.{kind}() of a {type(tensor).__name__}: give it a torch.Tensor")
        shape = tuple(tensor.shape)
        about.append((str(tensor.dtype).removeprefix("torch."), (-1, *shape[1:]) if ragged else shape))
    here(kind)
    if among is not global_process_set:
        among.rank()  # that it was added, and that this rank is in it
    return Call(kind, name, tensors=tuple(about), group=among.group, **fields)


def _reduced(
    kind: str, tensors: Tensors, name: str | None, op: ReduceOp, scales: tuple[float, float], among: ProcessSet
) -> list[Tensor]:
    """scales: what the tensors are multiplied by before, and behind."""
    if op is ReduceOp.ADASUM and any(not tensor.is_floating_point() for tensor in tensors):
        raise BadArgument(f"hvd.{kind}(op=hvd.Adasum) reduces floats; use hvd.Sum")
    call = _call(kind, tensors, name, among, op=op)
    found = here(kind).reduce(call, [scaled(tensor, scales[0]) for tensor in tensors], op)
    return [scaled(tensor, scales[1]) for tensor in found]


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, there: Computed, back: Computed, *tensors: Tensor) -> Any:
        found = tuple(there([tensor.detach() for tensor in tensors]))
        ctx.world, ctx.back = here("backward"), back
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with entered(ctx.world):
            return None, None, *ctx.back(gradients)


def differentiable(forward: Computed, backward: Computed) -> Any:
    """A function of tensors, whose gradient is that other function's. `backward` lives as long as the graph: it should
    hold shapes, no tensors of the call."""

    def call(tensors: Tensors) -> list[Tensor]:
        if torch.is_grad_enabled() and any(getattr(tensor, "requires_grad", False) for tensor in tensors):
            return list(_Collective.apply(forward, backward, *tensors))  # type: ignore[no-untyped-call]
        return forward(tensors)

    return call


# allreduce


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Each tensor reduced over all ranks; the mean, unless op= says otherwise. Raises CallsDiffer, BadArgument."""
    return _all(
        "grouped_allreduce", tensors, average, name, compression, op, (prescale_factor, postscale_factor), process_set
    )


def reduce_into(name: str, tensors: Tensors, op: ReduceOp, among: ProcessSet) -> None:
    """As grouped_allreduce_, without gradients of its own and without a copy."""
    call = _call("grouped_allreduce", tensors, name, among, op=op)
    here("grouped_allreduce").reduce_into(call, tensors, op)


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """As grouped_allreduce, of one tensor."""
    scales = (prescale_factor, postscale_factor)
    return _all("allreduce", [tensor], average, name, compression, op, scales, process_set)[0]


def _all(
    kind: str,
    tensors: Tensors,
    average: bool | None,
    name: str | None,
    compression: type[Compressor],
    op: int | None,
    scales: tuple[float, float],
    among: ProcessSet,
) -> list[Tensor]:
    chosen = chosen_op(average, op)

    def reduced(given: Tensors) -> list[Tensor]:
        narrow = [compression.compress(tensor) for tensor in given]
        found = _reduced(kind, [tensor for tensor, _ in narrow], name, chosen, scales, among)
        return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(found, narrow, strict=True)]

    found: list[Tensor] = differentiable(reduced, reduced)(tensors)
    return found


# The forms without compression=: name and op are other positions there


def _plain(kind: str, tensors: Tensors, *args: Any, **kwargs: Any) -> list[Tensor]:
    def reduced(
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> list[Tensor]:
        scales = (prescale_factor, postscale_factor)
        return _reduced(kind, tensors, name, chosen_op(average, op), scales, process_set)

    return reduced(*args, **kwargs)


def _into(tensors: Tensors, found: Tensors) -> list[Tensor]:
    with torch.no_grad():
        for tensor, value in zip(tensors, found, strict=True):
            tensor.copy_(value)
    return list(tensors)


def allreduce_async(tensor: Tensor, *args: Any, **kwargs: Any) -> AsyncHandle:
    """(average, name, op, prescale_factor, postscale_factor, process_set) behind the tensor."""
    return AsyncHandle(_plain("allreduce", [tensor], *args, **kwargs)[0])


def allreduce_(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Into the tensor itself."""
    return _into([tensor], _plain("allreduce", [tensor], *args, **kwargs))[0]


def allreduce_async_(tensor: Tensor, *args: Any, **kwargs: Any) -> AsyncHandle:
    return AsyncHandle(allreduce_(tensor, *args, **kwargs))


def grouped_allreduce_async(tensors: Tensors, *args: Any, **kwargs: Any) -> AsyncHandle:
    return AsyncHandle(_plain("grouped_allreduce", tensors, *args, **kwargs))


def grouped_allreduce_(tensors: Tensors, *args: Any, **kwargs: Any) -> list[Tensor]:
    """Into the tensors themselves."""
    return _into(tensors, _plain("grouped_allreduce", tensors, *args, **kwargs))


def grouped_allreduce_async_(tensors: Tensors, *args: Any, **kwargs: Any) -> AsyncHandle:
    return AsyncHandle(grouped_allreduce_(tensors, *args, **kwargs))


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Sum or average a sparse tensor over all ranks: values at equal indices are added. Returns a function that
    returns the sparse result. Raises BadArgument for another op."""
    chosen = chosen_op(None, op)
    if chosen not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise BadArgument(f"sparse gradients and op={chosen.name}: use hvd.Average, or sparse_as_dense=True")
    parts = [tensor._values(), tensor._indices().t().contiguous()]
    call = _call("sparse_allreduce", parts, name, process_set, ragged=True)
    there = here("sparse_allreduce").gather(call, parts)
    rows, places = map(torch.cat, zip(*there.values(), strict=True))
    found = torch.sparse_coo_tensor(places.t(), rows, tensor.shape, check_invariants=False)  # else torch warns
    result = found / len(there) if chosen is ReduceOp.AVERAGE else found
    return lambda: result


# allgather


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """The tensors of all ranks behind one another, which may have different sizes in the first dimension."""
    return _gathered("grouped_allgather", tensors, name, process_set)


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """As grouped_allgather, of one tensor."""
    return _gathered("allgather", [tensor], name, process_set)[0]


def _gathered(kind: str, tensors: Tensors, name: str | None, among: ProcessSet) -> list[Tensor]:
    begins: list[int] = []
    """For each tensor the number of the first row that this rank has brought."""
    shapes = [tensor.shape for tensor in tensors if isinstance(tensor, torch.Tensor)]  # `_call` refuses others

    def gather(given: Tensors) -> list[Tensor]:
        there, own = here(kind).gather(_call(kind, given, name, among, ragged=True), given), among.rank()
        found = []
        for number in range(len(given)):
            parts = {rank: _as_rows(brought[number]) for rank, brought in there.items()}
            begins.append(sum(len(part) for rank, part in parts.items() if rank < own))
            found.append(torch.cat([*parts.values()]))
        return found

    def scatter(gradients: Tensors) -> list[Tensor]:
        """Horovod's: the mean over the ranks of what they have for this rank's rows."""
        means = _reduced(kind, gradients, name, ReduceOp.AVERAGE, (1.0, 1.0), among)
        return [
            _of_shape(mean[begin:][: shape[0] if shape else 1], shape)
            for mean, begin, shape in zip(means, begins, shapes, strict=True)
        ]

    found: list[Tensor] = differentiable(gather, scatter)(tensors)
    return found


def _as_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() else tensor.reshape(1)


def _of_shape(gradient: Tensor, shape: torch.Size) -> Tensor:
    """A newcomer that goes with the results of the others has brought none of what they have gathered."""
    return gradient.reshape(shape) if gradient.numel() == shape.numel() else gradient.new_zeros(shape)


def _whole(parts: Mapping[int, Tensor], sizes: Sequence[int], like: Tensor) -> Tensor:
    """The parts of all ranks behind one another; zeros for a lost one. sizes: its rows, by rank."""
    lost = [like.new_zeros((size, *like.shape[1:])) for size in sizes]
    return torch.cat([parts.get(rank, zeros) for rank, zeros in enumerate(lost)])


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> AsyncHandle:
    return AsyncHandle(allgather(tensor.detach(), name, process_set))


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> AsyncHandle:
    return AsyncHandle(grouped_allgather([tensor.detach() for tensor in tensors], name, process_set))


# broadcast


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The tensor of rank root_rank, a number among all ranks. Raises BadArgument for a rank that there is not."""

    def send(given: Tensors) -> list[Tensor]:
        call = _call("broadcast", given, name, process_set, root=_checked_root(root_rank, process_set))
        return [here("broadcast").broadcast(call, given[0], root_rank)]

    def mean(gradients: Tensors) -> list[Tensor]:
        """Horovod's: the mean over the ranks, in the root only."""
        (found,) = _reduced("broadcast", gradients, name, ReduceOp.AVERAGE, (1.0, 1.0), process_set)
        return [found if here("broadcast").standing.rank == root_rank else torch.zeros_like(found)]

    found: list[Tensor] = differentiable(send, mean)([tensor])
    return found[0]


def _checked_root(root: int, among: ProcessSet) -> int:
    here("broadcast")
    if root not in among.ranks:
        raise BadArgument(f"broadcast(root_rank={root}): the ranks are {among.ranks}")
    return root


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Into the tensor itself."""
    return _into([tensor], [broadcast(tensor.detach(), root_rank, name, process_set)])[0]


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> AsyncHandle:
    return AsyncHandle(broadcast(tensor.detach(), root_rank, name, process_set))


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> AsyncHandle:
    return AsyncHandle(broadcast_(tensor, root_rank, name, process_set))


# alltoall and reducescatter: each rank gets all that the others bring, and keeps its part


def alltoall(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """splits: how many rows go to each rank (default: equally many). Returns what this rank is sent by all ranks, in
    rank order; with splits=, (that, how many rows each has sent). Raises BadArgument for splits that do not fit."""
    given, shape = None if splits is None else [int(size) for size in splits], tensor.shape
    sent: list[int] = []
    received: list[int] = []

    def exchange(tensors: Tensors) -> list[Tensor]:
        sent[:] = split_sizes(given, len(_as_rows(tensors[0])), process_set.size())
        found, received[:] = _exchanged(tensors[0], sent, name, process_set, [0] * len(sent))
        return [found]

    def back(gradients: Tensors) -> list[Tensor]:
        return [_of_shape(_exchanged(gradients[0], received, name, process_set, sent)[0], shape)]

    (found,) = differentiable(exchange, back)([tensor])
    return found if splits is None else (found, torch.tensor(received, dtype=torch.int32))


def _exchanged(
    tensor: Tensor, sizes: list[int], name: str | None, among: ProcessSet, lost: list[int]
) -> tuple[Tensor, list[int]]:
    """sizes: rows for each rank. lost: how many rows of zeros to return for a rank that is lost."""
    call, own = _call("alltoall", [tensor], name, among, ragged=True), among.rank()
    parts = {}
    for rank, (rows, table) in here("alltoall").gather(call, [_as_rows(tensor), torch.tensor([sizes])]).items():
        splits = table[0].tolist()
        parts[rank] = rows[sum(splits[:own]) :][: splits[own]]
    return _whole(parts, lost, _as_rows(tensor)), [len(parts.get(rank, ())) for rank in range(len(sizes))]


def alltoall_async(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> AsyncHandle:
    return AsyncHandle(alltoall(tensor.detach(), splits, name, process_set))


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Each tensor reduced, and of it the rows of this rank: equally many, the first ranks one more. Raises BadArgument
    for another reduction than hvd.Average and hvd.Sum, and for tensors without a dimension."""
    return _scattered(
        "grouped_reducescatter", tensors, name, compression, op, process_set, (prescale_factor, postscale_factor)
    )


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """As grouped_reducescatter, of one tensor."""
    scales = (prescale_factor, postscale_factor)
    return _scattered("reducescatter", [tensor], name, compression, op, process_set, scales)[0]


def _scattered(
    kind: str,
    tensors: Tensors,
    name: str | None,
    compression: type[Compressor],
    op: int,
    among: ProcessSet,
    scales: tuple[float, float],
) -> list[Tensor]:
    chosen = chosen_op(None, op)
    if chosen not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise BadArgument(f"hvd.{kind}(op={chosen.name}): it takes hvd.Average and hvd.Sum")
    if any(not tensor.dim() for tensor in tensors):
        raise BadArgument(f"hvd.{kind}() of a tensor without a dimension: it has no rows to scatter")
    lengths = [len(tensor) for tensor in tensors]

    def scatter(given: Tensors) -> list[Tensor]:
        narrow = [compression.compress(tensor) for tensor in given]
        found = _reduced(kind, [tensor for tensor, _ in narrow], name, chosen, scales, among)
        own, ranks = among.rank(), among.size()
        whole = [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(found, narrow, strict=True)]
        return [tensor.split(pieces(tensor.shape[0], ranks))[own].clone() for tensor in whole]

    def gather(gradients: Tensors) -> list[Tensor]:
        factor = scales[0] * scales[1] * (among.size() if chosen is ReduceOp.SUM else 1)
        given = [scaled(gradient, factor) for gradient in gradients]
        there = here(kind).gather(_call(kind, given, name, among, ragged=True), given)
        return [
            _whole({rank: rows[number] for rank, rows in there.items()}, pieces(length, among.size()), given[number])
            for number, length in enumerate(lengths)
        ]

    found: list[Tensor] = differentiable(scatter, gather)(tensors)
    return found


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> AsyncHandle:
    plain = Compression.none
    return AsyncHandle(reducescatter(tensor.detach(), name, plain, op, process_set, prescale_factor, postscale_factor))


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> AsyncHandle:
    given, scales = [tensor.detach() for tensor in tensors], (prescale_factor, postscale_factor)
    return AsyncHandle(_scattered("grouped_reducescatter", given, name, Compression.none, op, process_set, scales))


# Without a tensor


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait for all ranks."""
    here("barrier").barrier(_call("barrier", [], None, process_set))


def join(device: int = -1) -> int:
    """This rank has no more data: it brings zeros to every allreduce of the others, until all have called join().
    device: not looked at. Returns the last rank that did; with logical ranks, which have equally many batches, it
    returns at once. Raises BadArgument in an elastic job."""
    return here("join").join()
