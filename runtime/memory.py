"""New memory for much data at once."""

from __future__ import annotations

import contextlib
import errno
import mmap
from collections.abc import Sequence

import torch

from elastic.errors import NoMemory

ALIGNMENT = 64
"""Every tensor starts at such an offset, whatever its dtype will be."""
HUGE_BYTES = 8 << 20
"""From so many bytes on memory comes in huge pages, where the kernel has them: the faults of 4 KiB pages cost more than
copying into them does."""


def room_for(sizes: Sequence[int]) -> list[torch.Tensor]:
    """A uint8 tensor of each size, CPU, contiguous; what they hold is undefined. They may share one allocation.

    Raises NoMemory.
    """
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
    memory = _huge(starts[-1]) if starts[-1] >= HUGE_BYTES else torch.empty(starts[-1], dtype=torch.uint8)
    return [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def _huge(nbytes: int) -> torch.Tensor:
    """Freed with the last tensor that refers to it."""
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise NoMemory(
            f"the system has no {nbytes:,} bytes of memory for a copy of the state; allow this process more (its "
            "container, ulimit -v, vm.overcommit_memory)"
        ) from error
    with contextlib.suppress(OSError):  # a kernel that was built without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)
