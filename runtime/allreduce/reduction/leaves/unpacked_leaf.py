"""The values of a flat tensor before they are packed: gradients stay where backward left them until they are added.

Copying a shard's gradients into a flat tensor before they are added to the sibling's would read and write each of them
once more. So a leaf may keep the gradients themselves, provided that nothing else can change them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from runtime.allreduce.reduction.flat_pool import Flats


class Loose:
    """parts: the parts of the flat tensor, in order, CPU, of its dtype, with the shapes of room's; they must not
    change any more. room: gives flat tensors as long as all parts together."""

    def __init__(self, parts: Sequence[Tensor], room: Flats) -> None:
        self._parts = list(parts)
        self._room = room

    @property
    def parts(self) -> Sequence[Tensor]:
        return self._parts

    def flat(self) -> Tensor:
        """All parts in one new flat tensor."""
        flat = self._room.take()
        torch._foreach_copy_(self._room.parts(flat), self._parts)
        return flat

    def plus(self, right: Loose | Tensor) -> Tensor:
        """``self + right`` in a new flat tensor. right: has the same parts."""
        return self._sum(self._parts, right._parts if isinstance(right, Loose) else self._room.parts(right))

    def added_to(self, left: Tensor) -> Tensor:
        """``left + self`` in a new flat tensor."""
        return self._sum(self._room.parts(left), self._parts)

    def _sum(self, left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
        flat = self._room.take()
        for into, a, b in zip(self._room.parts(flat), left, right, strict=True):
            torch.add(a, b, out=into)
        return flat


def owns_its_gradient(parameter: nn.Parameter) -> bool:
    """Whether nothing but the parameter refers to its dense gradient: no variable, view, array, graph or parameter.

    Only then nothing can write to the gradient after it was taken.
    """
    return parameter.grad is not None and _references(parameter.grad) == _of_sole_owner()


def _references(gradient: Tensor) -> tuple[int, ...]:
    """Counts of references to the Python object, its storage's object, the tensor and the storage, this call's too."""
    storage = gradient.untyped_storage()
    of_tensor = gradient._use_count()  # type: ignore[attr-defined, unused-ignore]
    of_storage = torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined, unused-ignore]
    return (sys.getrefcount(gradient), sys.getrefcount(storage), of_tensor, of_storage)


@functools.cache
def _of_sole_owner() -> tuple[int, ...]:
    """The result of `_references` for a gradient that only its parameter refers to, in this version of torch."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    return _references(parameter.grad)
