"""The ranks of torch.distributed: of torchrun, and of one round of `elastic run --restart`."""

from __future__ import annotations

import atexit
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from runtime.frontends.horovod.arithmetic import ReduceOp, fused, mean_of, put_back, reduce_rows
from runtime.frontends.horovod.call_matching import JOIN, agreed, heard, said
from runtime.frontends.horovod.interrupts import CallsDiffer, HorovodInternalError
from runtime.frontends.horovod.world import Call, RankStanding, World, described

_OF_TORCH = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.AVERAGE: dist.ReduceOp.SUM,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
}

_GLOO_ADDS = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int32, torch.int64),
}
"""Tensors of other dtypes are gathered, and reduced by each rank."""


def _close() -> None:
    """Gloo's threads have to end before the interpreter does: else it ends by SIGABRT at times."""
    if dist.is_initialized():
        dist.destroy_process_group()


def standing_of(environment: Mapping[str, str], rank: int, size: int) -> RankStanding:
    """environment: with the variables of torchrun; those that are missing mean one node."""

    def number(name: str, default: int) -> int:
        return int(environment.get(name) or default)

    local_size = number("LOCAL_WORLD_SIZE", size)
    return RankStanding(
        rank,
        size,
        number("LOCAL_RANK", rank % local_size),
        local_size,
        number("GROUP_RANK", rank // local_size),
        number("GROUP_WORLD_SIZE", max(1, size // local_size)),
    )


class TorchWorld(World):
    """Each collective costs one small message more, by which the ranks tell each other which one it is."""

    def __init__(self) -> None:
        """Opens the process group, unless the script has done so. It is gloo's: what Horovod's scripts reduce beside
        gradients is in host memory; that of a script which has opened one for NCCL is used as it is. It stays open
        behind hvd.shutdown(), as torchrun's store cannot be met in twice."""
        if not dist.is_initialized():
            dist.init_process_group("gloo")
            atexit.register(_close)
        self._last_joined = -1

    @property
    def standing(self) -> RankStanding:
        return standing_of(os.environ, dist.get_rank(), dist.get_world_size())

    def reduce(self, call: Call, tensors: Sequence[torch.Tensor], op: ReduceOp) -> list[torch.Tensor]:
        self._agree(call)
        return self._reduced(call, tensors, op)

    def _reduced(self, call: Call, tensors: Sequence[torch.Tensor], op: ReduceOp) -> list[torch.Tensor]:
        found = []
        for tensor in tensors:
            if op is ReduceOp.ADASUM or tensor.dtype not in _GLOO_ADDS:
                found.append(reduce_rows(self._gathered(call, tensor), op).reshape(tensor.shape))
                continue
            out = tensor.detach().clone(memory_format=torch.contiguous_format)
            with _named(call):
                dist.all_reduce(out, _OF_TORCH[op], group=call.group)
            size = dist.get_world_size(call.group)
            found.append(mean_of(out, size) if op is ReduceOp.AVERAGE else out)
        return found

    def reduce_into(self, call: Call, tensors: Sequence[torch.Tensor], op: ReduceOp) -> None:
        """As few vectors, but for Adasum, which looks at each tensor for itself."""
        if op is ReduceOp.ADASUM:
            super().reduce_into(call, tensors, op)
            return
        vectors = fused(tensors)
        put_back(self.reduce(replace(call, tensors=described(vectors)), vectors, op), tensors)

    def gather(self, call: Call, tensors: Sequence[torch.Tensor]) -> dict[int, list[torch.Tensor]]:
        self._agree(call)
        of_each = [self._gathered(call, tensor) for tensor in tensors]
        return {rank: [rows[rank] for rows in of_each] for rank in range(dist.get_world_size(call.group))}

    def _gathered(self, call: Call, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Each rank fills up to the longest, as all_gather takes tensors of one shape only. A tensor without a
        dimension has one row, and comes back with a dimension."""
        own, rest = _as_bytes(tensor), tensor.shape[1:]
        width = math.prod(rest) * tensor.element_size()
        size = dist.get_world_size(call.group)
        with _named(call):
            rows = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
            dist.all_gather(rows, torch.tensor([tensor.shape[0] if tensor.dim() else 1]), group=call.group)
            counts = [int(row) for row in rows]
            padded = own.new_zeros(max(counts) * width)
            padded[: own.numel()] = own
            found = [torch.empty_like(padded) for _ in range(size)]
            dist.all_gather(found, padded, group=call.group)
        return [
            row[: count * width].clone().view(tensor.dtype).reshape(count, *rest)
            for row, count in zip(found, counts, strict=True)
        ]

    def broadcast(self, call: Call, tensor: torch.Tensor, root: int) -> torch.Tensor:
        self._agree(call)
        out = _as_bytes(tensor).clone()
        with _named(call):
            dist.broadcast(out, root, group=call.group)
        return out.view(tensor.dtype).reshape(tensor.shape)

    def gather_objects(self, call: Call, thing: object) -> list[Any]:
        self._agree(call)
        found: list[Any] = [None] * dist.get_world_size(call.group)
        with _named(call):
            dist.all_gather_object(found, thing, group=call.group)
        return found

    def broadcast_object(self, call: Call, thing: object, root: int) -> Any:
        self._agree(call)
        box = [thing if dist.get_rank() == root else None]
        with _named(call):
            dist.broadcast_object_list(box, root, group=call.group)
        return box[0]

    def barrier(self, call: Call) -> None:
        """What the ranks tell each other is all of it: one that has joined makes no other call for it."""
        self._agree(call)

    def join(self) -> int:
        """Zeros for every allreduce of the others, until all have come here."""
        while True:
            try:
                call = self._agree(JOIN)
            except CallsDiffer:  # the others', who raise it
                continue
            if call == JOIN:
                break
            zeros = [torch.zeros(shape, dtype=getattr(torch, dtype)) for dtype, shape in call.tensors]
            if call.kind != "barrier":
                assert call.op is not None
                self._reduced(call, zeros, call.op)
        last, self._last_joined = self._last_joined, -1
        return last

    def _agree(self, call: Call) -> Call:
        """What all ranks are about to do. Raises CallsDiffer, in all of them alike."""
        message = torch.frombuffer(bytearray(said(call)), dtype=torch.uint8)
        rows = self._gathered(call, message)
        calls = [heard(row.numpy().tobytes()) for row in rows]
        joined = [rank for rank, one in enumerate(calls) if one == JOIN]
        if self._last_joined < 0 or len(joined) < len(calls):
            self._last_joined = max((rank for rank, one in enumerate(calls) if one != JOIN), default=len(calls) - 1)
        return agreed(calls)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A vector of uint8: gloo does not send all dtypes."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class _named:  # a context manager, as contextlib's are written
    """What torch.distributed raises, as Horovod does: a lost peer is no mistake of the script."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, HorovodInternalError):
            raise HorovodInternalError(f"{self._call.text} failed: {error}") from error
