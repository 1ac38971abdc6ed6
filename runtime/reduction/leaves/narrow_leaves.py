"""The leaves of --compression: gradients of a narrower dtype.

A leaf has, in place of the gradients of its "float32" group, a flat tensor of the narrow dtype. All sums of two leaves
or sums are of this dtype too (partial_sum.add_into), so each is rounded at its place in the tree, whoever computes it,
and everything that is sent is as narrow. Buffers and gradients of float64 stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from elastic.config import Compression
from runtime.reduction.flat_pool import Flats
from runtime.reduction.leaves.layout import FlatGroup
from runtime.reduction.partial_sum import Partial

_WIDE = "float32"
"""The group whose gradients are converted."""
_DTYPES = {Compression.BF16: torch.bfloat16, Compression.FP16: torch.float16}


class NarrowLeaves:
    """See LeafFormat."""

    align = 64

    def __init__(self, compression: Compression, groups: Mapping[str, FlatGroup], device: torch.device) -> None:
        """compression: not NONE."""
        self._dtype, self._device = _DTYPES[compression], device
        self._narrow = str(self._dtype).removeprefix("torch.")
        self._gradients = groups[_WIDE].gradients if _WIDE in groups else 0
        sizes = {name: group.elements - self._converted(name) for name, group in groups.items()}
        self.sizes = {name: size for name, size in {**sizes, self._narrow: self._gradients}.items() if size}
        self._pools = {
            name: Flats(getattr(torch, name), size, device=device)
            for name, size in self.sizes.items()
            if name in (_WIDE, self._narrow)
        }

    def _converted(self, group: str) -> int:
        """How many elements of a group are converted, from the first on."""
        return self._gradients if group == _WIDE else 0

    def begin(self, pass_no: int) -> None:
        """Nothing is known about a pass before."""

    def encode(self, leaf: Partial) -> None:
        if (floats := leaf.flats.pop(_WIDE, None)) is None:
            return
        for name, values in ((self._narrow, floats[: self._gradients]), (_WIDE, floats[self._gradients :])):
            if len(values):
                leaf.flats[name] = self._pools[name].take().copy_(values)

    def place_of(self, group: str, lo: int, hi: int) -> tuple[str, int, int]:
        return (self._narrow if group == _WIDE else group), lo, hi

    def encode_part(self, group: str, lo: int, values: Tensor) -> dict[str, Tensor]:
        return {self._narrow: values.to(self._dtype)} if group == _WIDE else {group: values}

    def misfits(self, result: Partial) -> bool:
        return False

    def decode(self, result: Partial, pools: Mapping[str, Flats]) -> Partial:
        flats = {name: flat.to(self._device) for name, flat in result.flats.items()}
        if _WIDE in pools:
            floats, buffers = pools[_WIDE].take(), flats.pop(_WIDE, None)
            if self._gradients:
                gradients = floats[: self._gradients].copy_(flats.pop(self._narrow))
                if not math.isfinite(gradients.sum().item()):
                    # Which NaN a sum gives depends on where in a tensor it stands, and so on the world.
                    gradients.masked_fill_(gradients.isnan(), math.nan)
            if buffers is not None:
                floats[self._gradients :].copy_(buffers)
            flats[_WIDE] = floats
        return replace(result, flats=flats)
