"""A copy of the state that its donor holds, to send it to newcomers while training changes the state itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from runtime.memory import room_for
from runtime.partial import Json
from runtime.session import Op


class Room:
    """Memory for one, taken before it is needed: new pages cost more than the copy itself."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """sizes: of every tensor, in bytes."""
        self.sizes = list(sizes)
        self._tensors = room_for(sizes)
        for tensor in self._tensors:
            tensor.zero_()

    def fill(self, blobs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of the blobs (uint8, 1-D, of these sizes) in this memory."""
        for tensor, blob in zip(self._tensors, blobs, strict=True):
            tensor.copy_(blob)
        return self._tensors


@dataclass(frozen=True, slots=True)
class HeldState:
    """What a donor sends: the state as it was when operation ``number`` was handed out."""

    number: int
    op: Op
    header: dict[str, Json]
    blobs: list[torch.Tensor]
