"""What a shard may change of a module: a value, in most cases a buffer, which is merged; and the mode, training or
evaluation. Both are kept as they were before the pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

import torch

from elastic.errors import NotCarried

Merge: TypeAlias = Literal["mean", "rows", "first"]
Kind: TypeAlias = tuple[torch.dtype, torch.Size]


@dataclass(slots=True, eq=False)
class Buffer:
    """A buffer or frozen parameter that is merged: BatchNorm's running statistics, or as in register(buffers=...).

    kind: its dtype and shape, for the whole job. merge: "mean" weighs the shards' values like their gradients; "first"
    takes the value of the first shard; "rows" takes row n from shard n, of as many rows as there are shards. base:
    during a pass the value from which every shard starts, and which copies and digests contain; None outside a pass.
    """

    name: str
    owner: torch.nn.Module
    key: str
    merge: Merge
    kind: Kind
    base: torch.Tensor | None = None

    @property
    def live(self) -> torch.Tensor:
        """The tensor that the module uses now; `module.to()` replaces buffers, so it is looked up each time."""
        return cast(torch.Tensor, getattr(self.owner, self.key))

    @property
    def start(self) -> torch.Tensor:
        """The base. Raises RuntimeError outside a pass."""
        if self.base is None:
            raise RuntimeError(f"{self.name} has no base: no pass has begun")
        return self.base

    def check_kind(self) -> None:
        """Raise NotCarried if dtype or shape have changed since the loop began, or if it is trained now."""
        live = self.live
        if live.requires_grad:
            raise NotCarried(f"{self.name} is merged like a buffer, as register(buffers=...) says, and is trained now")
        if (live.dtype, live.shape) != self.kind:
            raise NotCarried(
                f"buffer {self.name} is {described(live.dtype, live.shape)}, and was {described(*self.kind)} when the "
                "loop began; buffers are merged, and newcomers copy them, as they were then. Give it its dtype and its "
                "full shape before the loop, and write into it (copy_, or a slice)"
            )


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source to its target. A GPU is given one kernel for many tensors, if they are of one dtype."""
    if not targets:
        return
    if not targets[0].is_cuda:
        torch._foreach_copy_(targets, sources)
        return
    alike: dict[object, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        some, of = alike.setdefault((target.dtype, source.dtype), ([], []))
        some.append(target)
        of.append(source)
    for some, of in alike.values():
        torch._foreach_copy_(some, of)


def clones(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """A copy of each, with its strides, made as by `copy_all`."""
    if tensors and tensors[0].is_cuda:
        found = [torch.empty_like(tensor) for tensor in tensors]
        copy_all(found, tensors)
        return found
    return [tensor.clone() for tensor in tensors]


def changed(buffers: Sequence[Buffer]) -> torch.Tensor:
    """For each of these, at least one, whether it differs from its base now: 0 or 1, on their device. The host does not
    wait, and a GPU is given a few kernels however many there are."""
    pairs = [(buffer.live, buffer.start) for buffer in buffers]
    if not pairs[0][0].is_cuda:
        return torch.stack([(live != base).any() for live, base in pairs])
    lives, bases = (torch.cat([tensor.reshape(-1) for tensor in tensors]) for tensors in zip(*pairs, strict=True))
    differ = (lives != bases).float()
    parts = differ.split([live.numel() for live, _ in pairs])
    # An empty one has no largest value.
    return torch.stack(torch._foreach_norm([part if len(part) else differ.new_zeros(1) for part in parts], math.inf))


class Modes:
    """Training or evaluation mode of modules. During a pass, each shard begins with the modes with which the pass
    began, and newcomers get them, whatever an earlier shard has set."""

    def __init__(self, modules: Callable[[], Iterable[torch.nn.Module]] = tuple) -> None:
        """modules: returns the modules, and all their parts, when a pass begins."""
        self._modules = modules
        self._before: dict[torch.nn.Module, bool] | None = None
        """The modes with which the pass began; None outside a pass."""

    def begin(self) -> None:
        """Begin a pass with the modes that the modules have now."""
        self._before = {module: module.training for module in self._modules()}

    def loaded(self) -> None:
        """A copy of the state was loaded: if a pass is in progress, its modes are those of the copy."""
        if self._before is not None:
            self.begin()

    def restore(self) -> None:
        """Reset the modes when a shard begins, or when the pass has ended."""
        for module, mode in (self._before or {}).items():
            if module.training is not mode:  # torch's assignment takes a microsecond
                module.training = mode

    def end(self) -> None:
        """End the pass."""
        self.restore()
        self._before = None

    def training(self, module: torch.nn.Module) -> bool:
        """The mode of a module when the pass began; outside a pass its present mode."""
        return (self._before or {}).get(module, module.training)


def described(dtype: torch.dtype, shape: torch.Size) -> str:
    """A text such as "float32 [8, 6]"."""
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
