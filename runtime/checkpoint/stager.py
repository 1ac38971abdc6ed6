"""Copies this member's share of the state, at a step boundary while nothing changes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from elastic.checkpoints.partition import Rows
from runtime.state.encoding import NamedTensor

ALIGNMENT = 64
"""Every range of rows starts at a multiple of this many bytes, whatever its dtype."""


@dataclass(frozen=True, slots=True)
class Staged:
    """Rows of a tensor. shape: of the whole tensor. rows: CPU, contiguous, from row `first` on."""

    name: str
    shape: tuple[int, ...]
    first: int
    rows: torch.Tensor


Copied = Callable[[], None]
"""Returns when the rows have been copied; any thread."""


class Stager:
    """Memory that is kept from one checkpoint to the next: fresh pages cost more than the copy itself."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._stream: torch.cuda.Stream | None = None

    def stage(self, tensors: Sequence[NamedTensor], share: Sequence[Rows]) -> tuple[list[Staged], Copied]:
        """Copy the rows. The result of the last call is overwritten.

        The copies of rows on a GPU may still run when this returns: a separate stream copies them into pinned memory,
        and only the GPU's next computation waits for it, not the caller.
        """
        pieces = [(tensors[rows.tensor], rows) for rows in share]
        sizes = [_rows_of(tensor, rows).numel() * tensor.element_size() for (_, tensor), rows in pieces]
        offsets = [0]
        for size in sizes:
            offsets.append(offsets[-1] + math.ceil(size / ALIGNMENT) * ALIGNMENT)
        device = next((tensor.device for (_, tensor), _ in pieces if tensor.is_cuda), None)
        if self._buffer.numel() < offsets[-1]:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # free the old memory first: both may not fit
            self._buffer = torch.empty(offsets[-1], dtype=torch.uint8, pin_memory=device is not None)
        staged: list[Staged] = []
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for ((name, tensor), rows), offset, size in zip(pieces, offsets, sizes, strict=False):
            source = _rows_of(tensor, rows)
            target = self._buffer[offset : offset + size].view(tensor.dtype).reshape(source.shape)
            copies.append((target, source))
            staged.append(Staged(name, tuple(tensor.shape), rows.first, target))
        if device is not None:
            return staged, self._copy_beside(device, copies)
        for target, source in copies:
            target.copy_(source)
        return staged, _at_once

    def _copy_beside(self, device: torch.device, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Copied:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        computing = torch.cuda.current_stream(device)
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            for target, source in copies:
                target.copy_(source, non_blocking=True)
                if source.is_cuda:
                    source.record_stream(self._stream)  # else its memory could be reused before it is read
            event = self._stream.record_event()
        computing.wait_event(event)  # the next computation changes the state
        copied: Copied = event.synchronize
        return copied


def _at_once() -> None:
    """Do nothing: the copy was complete when `stage` returned."""


def _rows_of(tensor: torch.Tensor, rows: Rows) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor if tensor.dim() == 0 else tensor[rows.first : rows.end]
