"""What every shard may change of a module: a value, in most cases a buffer, and how it is merged; the mode, training or
evaluation; and what both were before the pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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


class Modes:
    """Training or evaluation mode of modules. During a pass newcomers are given the modes with which it began, whatever
    the shard in progress has set, and each shard begins with them: which shards ran here before decides nothing."""

    def __init__(self, models: Callable[[], Iterable[torch.nn.Module]] = tuple) -> None:
        """models: those whose modules are meant, with all their parts, as they are when a pass begins."""
        self._models = models
        self._before: dict[torch.nn.Module, bool] | None = None
        """None outside a pass."""

    def begin(self) -> None:
        """A pass begins with the modes that the modules have now."""
        self._before = {module: module.training for model in self._models() for module in model.modules()}

    def loaded(self) -> None:
        """A copy of the state has been loaded: during a pass its modes are those with which that begins."""
        if self._before is not None:
            self.begin()

    def restore(self) -> None:
        """A shard begins, or the pass has ended."""
        for module, mode in (self._before or {}).items():
            module.training = mode

    def end(self) -> None:
        """The pass has ended."""
        self.restore()
        self._before = None

    def training(self, module: torch.nn.Module) -> bool:
        """The mode with which the pass began; outside a pass the mode that the module has."""
        return (self._before or {}).get(module, module.training)


def described(dtype: torch.dtype, shape: torch.Size) -> str:
    """ "float32 [8, 6]"."""
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
