"""What a world of ranks can do for Horovod's names; and the world of a script that was started alone."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from runtime.frontends.horovod.arithmetic import ReduceOp, reduce_rows

SHOWN_MAX = 3
"""Tensors of a call that its text shows; of more, their number and a checksum of dtypes and shapes."""


def described(tensors: Sequence[torch.Tensor]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """dtype and shape of each."""
    return tuple((str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for tensor in tensors)


@dataclass(frozen=True, slots=True)
class Call:
    """A collective, as the script has spelled it. Ranks that meet in different calls are told of it."""

    kind: str
    name: str | None = None
    op: ReduceOp | None = None
    root: int | None = None
    tensors: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """dtype and shape of each tensor; of what may differ between ranks in its first dimension, -1 for that."""
    group: Any = field(default=None, compare=False)
    """A process group of torch.distributed; None: of all ranks."""

    @property
    def text(self) -> str:
        """As a sentence has it."""
        op = f"op={self.op.name.capitalize()}" if self.op is not None else ""
        root = f"root_rank={self.root}" if self.root is not None else ""
        each = [f"{dtype}{list(shape)}" for dtype, shape in self.tensors]
        if len(each) > SHOWN_MAX:
            each = [f"{len(each)} tensors {zlib.crc32(repr(each).encode()):x}"]
        given = [*each, op, root]
        named = f" {self.name!r}" if self.name else ""
        return f"{self.kind}({', '.join(filter(None, given))}){named}"


@dataclass(frozen=True, slots=True)
class RankStanding:
    """The rank of this process and the number of ranks: in the whole world, and on its node (local). The number of its
    node and the number of nodes (cross)."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1


class World(ABC):
    """Used by the thread of the script only. Tensors that are given are changed by reduce_into() only."""

    @property
    @abstractmethod
    def standing(self) -> RankStanding:
        """It may change between two steps of an elastic job."""

    @abstractmethod
    def reduce(self, call: Call, tensors: Sequence[torch.Tensor], op: ReduceOp) -> list[torch.Tensor]:
        """Each tensor reduced over all ranks."""

    def reduce_into(self, call: Call, tensors: Sequence[torch.Tensor], op: ReduceOp) -> None:
        """The same, which takes the place of what the tensors had."""
        for tensor, found in zip(tensors, self.reduce(call, tensors, op), strict=True):
            tensor.copy_(found)

    @abstractmethod
    def gather(self, call: Call, tensors: Sequence[torch.Tensor]) -> dict[int, list[torch.Tensor]]:
        """The tensors of each rank of the process set, by its number there; they may have different sizes in the first
        dimension. In an elastic job all tensors of a lost rank are missing, or none."""

    @abstractmethod
    def broadcast(self, call: Call, tensor: torch.Tensor, root: int) -> torch.Tensor:
        """The tensor of rank `root`."""

    @abstractmethod
    def gather_objects(self, call: Call, thing: object) -> list[Any]:
        """The object of each rank."""

    @abstractmethod
    def broadcast_object(self, call: Call, thing: object, root: int) -> Any:
        """The object of rank `root`; those of other ranks are not sent."""

    def barrier(self, call: Call) -> None:
        """Wait for all ranks."""
        self.gather_objects(call, None)

    def join(self) -> int:
        """This rank has no more data. Returns the last rank that has come here."""
        return self.standing.size - 1

    @property
    def alike_at_start(self) -> bool:
        """Whether the optimizers of all ranks become alike when training begins."""
        return False

    def will_be_alike(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """broadcast_parameters() of these: those that nobody makes alike later, so that they have to be sent now."""
        return tensors

    def optimizer_wrapped(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027  # most have nothing to do
        """A DistributedOptimizer was made."""

    def check_steps(self) -> None:  # noqa: B027  # most allow it everywhere
        """Raise ConfigError if no optimizer may step here."""

    def reduces_itself(self) -> bool:
        """Whether `end_of_gradients` reduces the gradients of a step."""
        return False

    def end_of_gradients(self, weights: Sequence[torch.Tensor]) -> bool:
        """An optimizer asks for the gradients of all ranks, which become the means. Returns whether this call has put
        them in place: False in what is done once more for another rank, and in a second call."""
        raise NotImplementedError


class OneWorld(World):
    """A script that was started with `python`."""

    @property
    def standing(self) -> RankStanding:
        return RankStanding()

    def reduce(self, call: Call, tensors: Sequence[torch.Tensor], op: ReduceOp) -> list[torch.Tensor]:
        return [reduce_rows([tensor], op) for tensor in tensors]

    def gather(self, call: Call, tensors: Sequence[torch.Tensor]) -> dict[int, list[torch.Tensor]]:
        return {0: [tensor.detach().clone() for tensor in tensors]}

    def broadcast(self, call: Call, tensor: torch.Tensor, root: int) -> torch.Tensor:
        return tensor.detach().clone()

    def gather_objects(self, call: Call, thing: object) -> list[Any]:
        return [thing]

    def broadcast_object(self, call: Call, thing: object, root: int) -> Any:
        return thing
