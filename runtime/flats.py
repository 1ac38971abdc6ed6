"""Memory for large flat tensors, used again once nobody can read what was in it.

Fresh memory of some tens of megabytes costs several times more in page faults than the sum that is written into
it. Counting who still reads a tensor is left to torch and Python: a flat is made from a numpy array of its own,
which lives exactly as long as the last tensor, slice, array or memoryview of that flat in any thread.
"""

from __future__ import annotations

import weakref
from collections import deque

import torch

KEPT_MAX = 16


class Flats:
    """Uninitialised 1-D CPU tensors of one dtype and length. Any thread may take one or let one go."""

    def __init__(self, dtype: torch.dtype, elements: int) -> None:
        self._dtype = dtype
        self._elements = elements
        self._free: deque[torch.Tensor] = deque(maxlen=KEPT_MAX)

    def take(self) -> torch.Tensor:
        """A tensor of shape (elements,). Its memory comes back by itself; at most KEPT_MAX free ones are kept."""
        try:
            memory = self._free.pop()
        except IndexError:
            memory = torch.empty(self._elements, dtype=self._dtype)
        lease = memory.numpy()
        weakref.finalize(lease, self._free.append, memory).atexit = False
        return torch.from_numpy(lease)
