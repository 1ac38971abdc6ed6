"""The layout of a flat tensor: the places of the parameters and buffers of one dtype."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from runtime.allreduce.reduction.buffers import Buffer
from runtime.allreduce.reduction.leaves.unpacked_leaf import owns_its_gradient

LOOSE_ELEMENTS = 4096
"""A group whose parameters have so many elements on average, or more, adds gradients without a copy before: with
smaller parameters it takes longer to find out whether the gradients may stay where they are."""


@dataclass
class FlatGroup:
    """The layout of one flat tensor, complete when one of its numbers is asked for. numbers: of the parameters, among
    all. buffers: "mean" before "rows" before "first"."""

    dtype: torch.dtype
    numbers: list[int] = field(default_factory=list)
    parameters: list[nn.Parameter] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)

    @cached_property
    def gradients(self) -> int:
        """Number of elements that are gradients; they come first."""
        return sum(parameter.numel() for parameter in self.parameters)

    @cached_property
    def weighted(self) -> int:
        """Number of elements that are multiplied by the weight: the gradients, and the "mean" buffers after them."""
        return self.gradients + sum(buffer.live.numel() for buffer in self.buffers if buffer.merge == "mean")

    @cached_property
    def elements(self) -> int:
        others = sum(buffer.live.numel() for buffer in self.buffers if buffer.merge != "mean")
        return self.weighted + others + len(self.buffers)

    @cached_property
    def rows(self) -> list[int]:
        """Numbers of the buffers that have a row of each shard."""
        return [number for number, buffer in enumerate(self.buffers) if buffer.merge == "rows"]

    @cached_property
    def like(self) -> list[torch.Tensor]:
        """Tensors with the shapes of a flat tensor's parts: each parameter, and what follows the gradients."""
        rest = torch.empty(self.elements - self.gradients, dtype=self.dtype)
        return [*self.parameters, rest]

    @cached_property
    def bits(self) -> int:
        """Partial.has_grad if each of the group's parameters has a gradient."""
        return sum(1 << i for i in self.numbers)

    def may_stay_loose(self) -> bool:
        """Whether the gradients are best added without a copy, and can be: all exist, in this dtype, and are not
        shared."""
        return self.gradients >= LOOSE_ELEMENTS * len(self.parameters) and all(
            parameter.grad is not None
            and parameter.grad.dtype == self.dtype
            and parameter.grad.layout == torch.strided
            and parameter.grad.device.type == "cpu"
            and not parameter.grad.requires_grad
            and owns_its_gradient(parameter)
            for parameter in self.parameters
        )

    def gradient_parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """A view per parameter of a flat tensor."""
        return list(torch._C._nn.unflatten_dense_tensors(flat, self.like))[:-1]

    def buffer_parts(self, rest: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """(a view per buffer, the changed flags) of the part of a flat tensor after the gradients."""
        end = rest.numel() - len(self.buffers)
        shapes = [buffer.live for buffer in self.buffers]
        return list(torch._C._nn.unflatten_dense_tensors(rest[:end], shapes)), rest[end:]
