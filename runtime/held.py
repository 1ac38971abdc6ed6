"""A copy of the state that its donor holds, to send it to newcomers while training changes the state itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from runtime.partial import Json
from runtime.session import Op


class Room:
    """Memory for one, taken before it is needed: new pages cost more than the copy itself."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """sizes: of every tensor, in bytes."""
        self.sizes = list(sizes)
        self._memory = torch.empty(sum(sizes), dtype=torch.uint8).fill_(0)

    def fill(self, blobs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of the blobs (uint8, 1-D, of these sizes) as views of this memory."""
        copies = list(self._memory.split(self.sizes)) if self.sizes else []
        for copy, blob in zip(copies, blobs, strict=True):
            copy.copy_(blob)
        return copies


@dataclass(frozen=True, slots=True)
class HeldState:
    """What a donor sends: the state as it was when operation ``number`` was handed out."""

    number: int
    op: Op
    header: dict[str, Json]
    blobs: list[torch.Tensor]
