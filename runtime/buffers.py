"""A value of a module that every shard may change, in most cases a buffer: how it is merged, and what it was before the
pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

import torch

from elastic.errors import NotCarried

Merge: TypeAlias = Literal["mean", "first"]
Kind: TypeAlias = tuple[torch.dtype, torch.Size]


@dataclass(slots=True, eq=False)
class Buffer:
    """BatchNorm's running statistics, or what is declared in register(buffers=...): a buffer, or a frozen parameter.

    kind: its dtype and shape, for the whole job.
    merge: "mean" weighs the shards' values like their gradients; "first" takes the value of the first shard.
    base: during a pass the value from which every shard starts, and which newcomers and digests are given;
    None outside a pass.
    """

    name: str
    owner: torch.nn.Module
    key: str
    merge: Merge
    kind: Kind
    base: torch.Tensor | None = None

    @property
    def live(self) -> torch.Tensor:
        """The tensor the module uses now; `module.to()` replaces buffers, so it is looked up each time."""
        return cast(torch.Tensor, getattr(self.owner, self.key))

    def check_kind(self) -> None:
        """Raises NotCarried if dtype or shape are not what they were when the loop began, or if it is trained now."""
        live = self.live
        if live.requires_grad:
            raise NotCarried(f"{self.name} is merged like a buffer, as register(buffers=...) says, and is trained now")
        if (live.dtype, live.shape) != self.kind:
            raise NotCarried(
                f"buffer {self.name} is {described(live.dtype, live.shape)}, and was {described(*self.kind)} when the "
                "loop began; buffers are merged, and newcomers copy them, as they were then. Give it its dtype and its "
                "full shape before the loop, and write into it (copy_, or a slice)"
            )


def described(dtype: torch.dtype, shape: torch.Size) -> str:
    """ "float32 [8, 6]"."""
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
