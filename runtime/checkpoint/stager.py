"""A copy of this member's share of the state, made at a step boundary while nothing changes it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from elastic.checkpoints.ranges import Rows
from runtime.encoding import NamedTensor

ALIGNMENT = 64
"""Every row range starts at such an offset, whatever its dtype."""


@dataclass(frozen=True, slots=True)
class Staged:
    """Rows of a tensor. shape: of the whole tensor; rows: CPU, contiguous, from `first` on."""

    name: str
    shape: tuple[int, ...]
    first: int
    rows: torch.Tensor


class Stager:
    """Memory that is kept from one checkpoint to the next: fresh pages cost more than the copy itself."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def stage(self, tensors: Sequence[NamedTensor], share: Sequence[Rows]) -> list[Staged]:
        """Copy the rows. What the last call returned is overwritten."""
        pieces = [(tensors[rows.tensor], rows) for rows in share]
        sizes = [_rows_of(tensor, rows).numel() * tensor.element_size() for (_, tensor), rows in pieces]
        offsets = [0]
        for size in sizes:
            offsets.append(offsets[-1] + math.ceil(size / ALIGNMENT) * ALIGNMENT)
        if self._buffer.numel() < offsets[-1]:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # the old memory first: there may not be room for both
            self._buffer = torch.empty(offsets[-1], dtype=torch.uint8)
        staged: list[Staged] = []
        for ((name, tensor), rows), offset, size in zip(pieces, offsets, sizes, strict=False):
            source = _rows_of(tensor, rows)
            target = self._buffer[offset : offset + size].view(tensor.dtype).reshape(source.shape)
            target.copy_(source)
            staged.append(Staged(name, tuple(tensor.shape), rows.first, target))
        return staged


def _rows_of(tensor: torch.Tensor, rows: Rows) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor if tensor.dim() == 0 else tensor[rows.first : rows.end]
