"""The bytes of tensors, as the host reads them: views on the CPU, and copies, a part at a time, of what is on a GPU.

Copies from a GPU run beside the computation: on a stream of their own, behind what the script's stream had to do when
the tensors were as they are wanted. They go through pinned memory of one size, which torch uses again: it rounds pinned
memory up to a power of two, and keeps it for the life of the process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import TypeAlias

import torch
from torch import Tensor

from runtime.allreduce.reduction.early_sums import recorded
from runtime.allreduce.reduction.flat_pool import room_for
from runtime.recovery.state.encoding import to_blob

CHUNK_BYTES = 32 << 20
"""The size of all pinned memory for copies from a GPU, a power of two; a copy of so many bytes takes a millisecond."""

Slice: TypeAlias = tuple[int, int, int]
"""(number of the tensor, first byte, end)"""
Part: TypeAlias = tuple[Slice, ...]


def parts_of(sizes: Sequence[int], most_bytes: int) -> list[Part]:
    """Tensors of these sizes in bytes, in order, cut into parts of at most most_bytes bytes; every byte is in exactly
    one part."""
    parts: list[Part] = []
    part: list[Slice] = []
    left = most_bytes
    for number, size in enumerate(sizes):
        start = 0
        while start < size:
            end = min(size, start + left)
            part.append((number, start, end))
            left -= end - start
            start = end
            if not left:
                parts.append(tuple(part))
                part, left = [], most_bytes
    return [*parts, tuple(part)] if part else parts


def chunk() -> Tensor:
    """Pinned memory: uint8, shape (CHUNK_BYTES,), with undefined content. Raises RuntimeError if there is none."""
    return torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of this GPU for copies to the host, one for the process."""
    return torch.cuda.Stream(device)


class StreamMark:
    """What the calling thread's current stream of each of these GPUs has to do by now. No devices: all is done."""

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        self._waits = {device: recorded(device) for device in devices if device.type == "cuda"}

    @contextmanager
    def behind(self) -> Iterator[None]:
        """In the block the calling thread's current streams are the copy streams, which go on behind the mark."""
        with ExitStack() as streams:
            for device, wait in self._waits.items():
                streams.enter_context(torch.cuda.stream(copy_stream(device)))
                wait()
            yield


DONE = StreamMark()
"""The mark of tensors that are complete, or on the CPU."""


class HostBytes:
    """For one thread. The tensors must not change until the last read."""

    def __init__(self, tensors: Sequence[Tensor], mark: StreamMark = DONE) -> None:
        """mark: behind what they are complete."""
        self._tensors = [tensor.detach() for tensor in tensors]
        self._mark = mark
        self._flat: dict[int, Tensor] = {}
        self._chunk: Tensor | None = None
        self.sizes = [tensor.nbytes for tensor in tensors]
        """Bytes of each tensor."""

    def read(self, part: Sequence[Slice]) -> list[Tensor]:
        """The bytes of each slice, in row-major order: uint8, 1-D, CPU; until the next call.

        Raises ValueError if more than CHUNK_BYTES of them are on GPUs; RuntimeError if a GPU has failed.
        """
        if not any(self._tensors[number].is_cuda for number, _, _ in part):
            return [self._row_major(number)[start:end] for number, start, end in part]
        with self._mark.behind():
            found = [self._row_major(number)[start:end] for number, start, end in part]
            if sum(piece.numel() for piece in found if piece.is_cuda) > CHUNK_BYTES:
                raise ValueError(f"more than {CHUNK_BYTES} bytes at once")
            if self._chunk is None:
                self._chunk = chunk()
            used = 0
            gpus = {piece.device for piece in found if piece.is_cuda}
            for number, piece in enumerate(found):
                if piece.is_cuda:
                    found[number] = self._chunk[used : used + piece.numel()].copy_(piece, non_blocking=True)
                    used += piece.numel()
            for gpu in gpus:
                torch.cuda.current_stream(gpu).record_event().synchronize()
            return found

    def copy_to(self, rooms: Sequence[Tensor]) -> None:
        """Fill these with the bytes of each tensor. rooms: uint8, 1-D, CPU, of the tensors' sizes."""
        for part in parts_of(self.sizes, CHUNK_BYTES):
            for (number, start, end), piece in zip(part, self.read(part), strict=True):
                rooms[number][start:end].copy_(piece)

    def blobs(self) -> list[Tensor]:
        """All bytes of each tensor, in row-major order: uint8, 1-D, CPU; views where that needs no copy. Raises
        NoMemory, and RuntimeError as `read`."""
        if not any(tensor.is_cuda for tensor in self._tensors):
            return [self._row_major(number) for number in range(len(self._tensors))]
        rooms = room_for(self.sizes)
        self.copy_to(rooms)
        return rooms

    def _row_major(self, number: int) -> Tensor:
        """All bytes of a tensor, where it is; on the CPU if that needs a copy, for which a GPU may have no memory."""
        found = self._flat.get(number)
        if found is None:
            tensor = self._tensors[number]
            found = tensor.reshape(-1).view(torch.uint8) if tensor.is_contiguous() else to_blob(tensor)
            self._flat[number] = found
        return found
