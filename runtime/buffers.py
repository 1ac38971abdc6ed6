"""A module buffer that every shard may change: how it is merged, and what it was before the pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

Merge: TypeAlias = Literal["mean", "first"]


@dataclass(slots=True, eq=False)
class Buffer:
    """BatchNorm's running statistics, or a buffer declared in register(buffers=...).

    merge: "mean" weighs the shards' values like their gradients; "first" takes the value of the first shard.
    base: during a pass the value from which every shard starts, and which newcomers and digests are given;
    None outside a pass.
    """

    name: str
    owner: torch.nn.Module
    key: str
    merge: Merge
    base: torch.Tensor | None = None

    @property
    def live(self) -> torch.Tensor:
        """The tensor the module uses now; `module.to()` replaces buffers, so it is looked up each time."""
        return self.owner.get_buffer(self.key)
