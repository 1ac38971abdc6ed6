"""Memory for large flat tensors, reused once nothing refers to it any more.

Fresh memory of some tens of megabytes costs several times more in page faults than the sum that is written into it.
torch counts the references to a storage: every tensor, slice, array or memoryview of a flat, in any thread, is one or
holds one.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import sys
import threading
from collections.abc import Sequence

import torch

from elastic.errors import NoMemory

ALIGNMENT = 64
"""Every tensor starts at a multiple of this many bytes, whatever its dtype will be."""
HUGE_BYTES = 8 << 20
"""From this many bytes on, memory is in huge pages if the kernel has them: the faults of 4 KiB pages cost more than a
copy into them."""


def room_for(sizes: Sequence[int]) -> list[torch.Tensor]:
    """A uint8 tensor of each size, CPU, contiguous, with undefined content. They may share one allocation.

    Raises NoMemory.
    """
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
    memory = _huge(starts[-1]) if starts[-1] >= HUGE_BYTES else torch.empty(starts[-1], dtype=torch.uint8)
    return [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def _huge(nbytes: int) -> torch.Tensor:
    """Memory in huge pages, freed with the last tensor that refers to it. Raises NoMemory."""
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise NoMemory(
            f"the system has no {nbytes:,} bytes of memory for a copy of the state; allow this process more (its "
            "container, ulimit -v, vm.overcommit_memory)"
        ) from error
    with contextlib.suppress(OSError):  # a kernel that was built without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


CPU = torch.device("cpu")
KEPT_MAX = 16


class _Memory:
    """Memory of one flat tensor after another. parts: views of it, made once."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.parts: list[torch.Tensor] = []
        self._views = 0
        """How many of the parts refer to the storage; torch gives an empty part one of its own."""
        self._storage = tensor.untyped_storage()
        self._unused = self._references()

    def _references(self) -> tuple[int, int]:
        """Counts of references to the storage's Python object, and to the storage but for the parts."""
        uses = torch._C._storage_Use_Count(self._storage._cdata)
        return sys.getrefcount(self._storage), uses - self._views

    def divide(self, like: list[torch.Tensor]) -> None:
        """Make the parts."""
        parts = list(torch._C._nn.unflatten_dense_tensors(self.tensor, like))
        self._views = sum(part.untyped_storage()._cdata == self._storage._cdata for part in parts)
        self.parts = parts

    def free(self) -> bool:
        """Whether nothing but this object refers to the memory. Then nothing else can begin to."""
        return self._references() == self._unused


class Flats:
    """Uninitialised 1-D tensors of one dtype and length. Any thread may take or release a tensor.

    like: tensors with the shapes of a flat tensor's parts, in order. device: on a GPU torch's own allocator reuses
    memory. pinned: use pinned CPU memory, for copies from and to a GPU.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        elements: int,
        *,
        like: Sequence[torch.Tensor] = (),
        device: torch.device = CPU,
        pinned: bool = False,
    ) -> None:
        self._dtype = dtype
        self._elements = elements
        self._like = list(like)
        self._device = device
        self._pinned = pinned
        self._kept: dict[int, _Memory] = {}
        """By address."""
        self._taking = threading.Lock()

    def take(self) -> torch.Tensor:
        """A tensor of shape (elements,). The memory of at most KEPT_MAX of them is kept, and reused automatically."""
        if self._device.type != "cpu":
            return torch.empty(self._elements, dtype=self._dtype, device=self._device)
        with self._taking:
            for memory in self._kept.values():
                if memory.free():
                    return memory.tensor.detach()
            tensor = torch.empty(self._elements, dtype=self._dtype, pin_memory=self._pinned)
            if len(self._kept) < KEPT_MAX:
                self._kept[tensor.data_ptr()] = _Memory(tensor)
            return tensor.detach()

    def parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of the parts of such a tensor, for use while the caller holds it: they do not keep its memory from
        being used again, their `data` does. Making them takes longer than a copy into them, if they are small."""
        memory = self._kept.get(flat.data_ptr())
        if memory is None:  # a flat tensor of another member, on a GPU, or one more than are kept
            return list(torch._C._nn.unflatten_dense_tensors(flat, self._like))
        if not memory.parts:
            memory.divide(self._like)
        return memory.parts
