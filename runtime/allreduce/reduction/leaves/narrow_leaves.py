"""The leaves of --compression: gradients of a narrower dtype.

A leaf has, in place of the gradients of its "float32" group, a flat tensor of the narrow dtype. Each sum of two leaves
or sums has this dtype too (partial_sum.add_into). So a sum is rounded at its place in the tree, on any member, and all
tensors that members send are narrow. Buffers and gradients of float64 stay as they are.

In a block of int8 an infinity or a NaN would spoil the other values of the block. So the leaf has zero in place of such
a value, and sets the bit of its parameter in Partial.nonfinite. In the result all elements of this parameter are NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from elastic.config import Compression
from runtime.allreduce.fixed_point import int8_blocks
from runtime.allreduce.reduction.flat_pool import Flats
from runtime.allreduce.reduction.leaves.layout import FlatGroup
from runtime.allreduce.reduction.leaves.leaf_format import NamedParts, put_back_nonfinite, take_out_nonfinite
from runtime.allreduce.reduction.partial_sum import Partial
from runtime.allreduce.reduction.schedule import Cut

_WIDE = "float32"
"""The group whose gradients are converted."""


@dataclass(frozen=True, slots=True)
class Narrow:
    """A dtype. align: see LeafFormat. stored: how many elements of it so many floats take. pack, unpack: fill their
    second argument, all floats are float32."""

    dtype: torch.dtype
    align: int = 64
    stored: Callable[[int], int] = lambda floats: floats
    pack: Callable[[Tensor, Tensor], object] = lambda floats, out: out.copy_(floats)
    unpack: Callable[[Tensor, Tensor], object] = lambda narrow, out: out.copy_(narrow)


NARROW = {
    Compression.BF16: Narrow(torch.bfloat16),
    Compression.FP16: Narrow(torch.float16),
    Compression.INT8: Narrow(torch.int8, int8_blocks.CODES, int8_blocks.stored, int8_blocks.pack, int8_blocks.unpack),
}


class NarrowLeaves:
    """See LeafFormat."""

    def __init__(self, compression: Compression, groups: Mapping[str, FlatGroup], device: torch.device) -> None:
        """compression: not NONE."""
        self._narrow, self._device = NARROW[compression], device
        self._name = str(self._narrow.dtype).removeprefix("torch.")
        self.align = self._narrow.align
        self._wide = groups.get(_WIDE)
        self._gradients = self._wide.gradients if self._wide is not None else 0
        sizes = {name: group.elements - (self._gradients if name == _WIDE else 0) for name, group in groups.items()}
        sizes[self._name] = self._narrow.stored(self._gradients)
        # What a leaf has no tensor of; it has one of float64 also if no parameter of that dtype has an element.
        empty = [name for name in (_WIDE, self._name) if not sizes.get(name)]
        self.sizes = {name: size for name, size in sizes.items() if name not in empty}
        self._pools = {
            name: Flats(getattr(torch, name), size, device=device)
            for name, size in self.sizes.items()
            if name in (_WIDE, self._name)
        }

    def begin(self, pass_no: int) -> None:
        """Nothing is known from a pass before."""

    def encode(self, leaf: Partial) -> None:
        floats = leaf.flats.pop(_WIDE, None)
        if floats is None:
            return
        if self._gradients:
            leaf.flats[self._name] = narrow = self._pools[self._name].take()
            self._narrow.pack(floats[: self._gradients], narrow)
            if narrow.dtype is torch.int8 and int8_blocks.has_nonfinite(narrow):
                leaf.nonfinite = take_out_nonfinite(self._named_parts(floats))
                self._narrow.pack(floats[: self._gradients], narrow)
        if self._gradients < len(floats):
            leaf.flats[_WIDE] = self._pools[_WIDE].take().copy_(floats[self._gradients :])

    def _named_parts(self, floats: Tensor) -> NamedParts:
        """(bit in Partial.nonfinite, gradient) of each parameter."""
        assert self._wide is not None
        for i, part in zip(self._wide.numbers, self._wide.gradient_parts(floats), strict=True):
            yield 1 << i, part

    def places_of(self, group: str, lo: int, hi: int) -> Cut:
        stored = self._narrow.stored
        return ((self._name, stored(lo), stored(hi)) if group == _WIDE else (group, lo, hi),)

    def encode_part(self, group: str, lo: int, values: Tensor) -> dict[str, Tensor]:
        if group != _WIDE:
            return {group: values}
        out = torch.empty(self._narrow.stored(len(values)), dtype=self._narrow.dtype, device=values.device)
        self._narrow.pack(values, out)
        return {self._name: out}

    def misfits(self, result: Partial) -> bool:
        return False

    def decode(self, result: Partial, pools: Mapping[str, Flats]) -> Partial:
        flats = {name: flat.to(self._device) for name, flat in result.flats.items()}
        if self._wide is not None:
            floats, buffers = pools[_WIDE].take(), flats.pop(_WIDE, None)
            if self._gradients:
                gradients = floats[: self._gradients]
                self._narrow.unpack(flats.pop(self._name), gradients)
                if result.nonfinite:
                    put_back_nonfinite(self._named_parts(floats), result.nonfinite)
                if not math.isfinite(gradients.sum().item()):
                    # Which NaN a sum gives depends on where in a tensor it stands, and so on the world.
                    gradients.masked_fill_(gradients.isnan(), torch.nan)
            if buffers is not None:
                floats[self._gradients :].copy_(buffers)
            flats[_WIDE] = floats
        return replace(result, flats=flats)
