"""Copies this member's share of the state, at a step boundary while nothing changes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from elastic.checkpoints.partition import Rows
from runtime.recovery.state.encoding import NamedTensor
from runtime.recovery.state.host_bytes import CHUNK_BYTES, StreamMark, chunk, copy_stream, parts_of

ALIGNMENT = 64
"""On the CPU every range of rows starts at a multiple of this many bytes, whatever its dtype."""


@dataclass(frozen=True, slots=True)
class Staged:
    """Rows of a tensor. shape: of the whole tensor. first: the first row. dtype, rows: the dtype and the shape of the
    rows. content: their bytes in row-major order: uint8, 1-D, CPU, one tensor after the other."""

    name: str
    shape: tuple[int, ...]
    first: int
    dtype: torch.dtype
    rows: tuple[int, ...]
    content: Sequence[Tensor]


Copied = Callable[[], None]
"""Returns when the rows have been copied; any thread."""


class Stager:
    """Memory that is kept from one checkpoint to the next: fresh pages cost more than the copy itself."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._chunks: list[Tensor] = []

    def stage(self, tensors: Sequence[NamedTensor], share: Sequence[Rows]) -> tuple[list[Staged], Copied]:
        """Copy the rows. The result of the last call is overwritten.

        The copies of rows on a GPU may still run when this returns: a separate stream copies them into pinned memory,
        and only the GPU's next computation waits for it, not the caller.
        """
        named = [tensors[rows.tensor] for rows in share]
        sources = [_rows_of(tensor, rows) for (_, tensor), rows in zip(named, share, strict=True)]
        gpus = list(dict.fromkeys(source.device for source in sources if source.is_cuda))
        contents, copied = self._copy_beside(gpus, sources) if gpus else self._copy(sources)
        staged = [
            Staged(name, tuple(tensor.shape), rows.first, source.dtype, tuple(source.shape), content)
            for (name, tensor), rows, source, content in zip(named, share, sources, contents, strict=True)
        ]
        return staged, copied

    def _copy(self, sources: Sequence[Tensor]) -> tuple[list[list[Tensor]], Copied]:
        offsets = [0]
        for source in sources:
            offsets.append(offsets[-1] + math.ceil(source.nbytes / ALIGNMENT) * ALIGNMENT)
        if self._buffer.numel() < offsets[-1]:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # free the old memory first: both may not fit
            self._buffer = torch.empty(offsets[-1], dtype=torch.uint8)
        contents: list[list[Tensor]] = []
        for source, offset in zip(sources, offsets, strict=False):
            target = self._buffer[offset : offset + source.nbytes]
            target.view(source.dtype).reshape(source.shape).copy_(source)
            contents.append([target])
        return contents, _at_once

    def _copy_beside(
        self, gpus: Sequence[torch.device], sources: Sequence[Tensor]
    ) -> tuple[list[list[Tensor]], Copied]:
        parts = parts_of([source.nbytes for source in sources], CHUNK_BYTES)
        self._chunks += [chunk() for _ in range(len(parts) - len(self._chunks))]
        contents: list[list[Tensor]] = [[] for _ in sources]
        with StreamMark(gpus).behind():
            at, flat = -1, self._buffer
            for memory, part in zip(self._chunks, parts, strict=False):
                used = 0
                for number, start, end in part:
                    if number != at:
                        at, flat = number, sources[number].contiguous().reshape(-1).view(torch.uint8)
                    target = memory[used : used + end - start]
                    target.copy_(flat[start:end], non_blocking=True)
                    contents[number].append(target)
                    used += end - start
            for source in sources:
                if source.is_cuda:  # else its memory could be reused before it is read
                    source.record_stream(copy_stream(source.device))
            events = [copy_stream(gpu).record_event() for gpu in gpus]
        for gpu, event in zip(gpus, events, strict=True):
            torch.cuda.current_stream(gpu).wait_event(event)  # the next computation changes the state

        def copied() -> None:
            for event in events:
                event.synchronize()

        return contents, copied


def _at_once() -> None:
    """Do nothing: the copy was complete when `stage` returned."""


def _rows_of(tensor: Tensor, rows: Rows) -> Tensor:
    tensor = tensor.detach()
    return tensor if tensor.dim() == 0 else tensor[rows.first : rows.end]
