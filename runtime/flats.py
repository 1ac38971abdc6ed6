"""Memory for large flat tensors, used again once nobody can read what was in it.

Fresh memory of some tens of megabytes costs several times more in page faults than the sum that is written into
it. Counting who still reads a tensor is left to torch and Python: a flat is made from a numpy array of its own,
which lives exactly as long as the last tensor, slice, array or memoryview of that flat in any thread.
"""

from __future__ import annotations

import weakref
from collections import deque

import torch

CPU = torch.device("cpu")
KEPT_MAX = 16


class Flats:
    """Uninitialised 1-D tensors of one dtype and length. Any thread may take one or let one go.

    device: on a GPU torch's own allocator does all this. pinned: a GPU copies to and from the CPU's memory.
    """

    def __init__(self, dtype: torch.dtype, elements: int, *, device: torch.device = CPU, pinned: bool = False) -> None:
        self._dtype = dtype
        self._elements = elements
        self._device = device
        self._pinned = pinned
        self._free: deque[torch.Tensor] = deque(maxlen=KEPT_MAX)

    def take(self) -> torch.Tensor:
        """A tensor of shape (elements,). Its memory comes back by itself; at most KEPT_MAX free ones are kept."""
        if self._device.type != "cpu":
            return torch.empty(self._elements, dtype=self._dtype, device=self._device)
        try:
            memory = self._free.pop()
        except IndexError:
            memory = torch.empty(self._elements, dtype=self._dtype, pin_memory=self._pinned)
        lease = memory.numpy()
        weakref.finalize(lease, self._free.append, memory).atexit = False
        return torch.from_numpy(lease)
