"""What a leaf has in place of its floats: integers (fixed_leaves.py), or narrower floats (narrow_leaves.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from runtime.allreduce.reduction.flat_pool import Flats
from runtime.allreduce.reduction.partial_sum import Partial
from runtime.allreduce.reduction.schedule import Cut


class LeafFormat(Protocol):
    """Converts the leaves and results of one Harvest: `begin` a pass, then `encode`, then `misfits`, `decode`."""

    @property
    def align(self) -> int:
        """At multiples of so many gradients of a group a part of them may begin."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Name of a dtype -> elements of a leaf's flat tensor."""

    def begin(self, pass_no: int) -> None:
        """A pass begins, or begins anew because a leaf did not fit."""

    def encode(self, leaf: Partial) -> None:
        """Replace the floats of a leaf, all in its flats."""

    def places_of(self, group: str, lo: int, hi: int) -> Cut:
        """Where a group's gradients lo..hi-1 lie, and behind that place, in another dtype, what is said of them if
        anything is, which is short."""

    def encode_part(self, group: str, lo: int, values: Tensor) -> dict[str, Tensor]:
        """A group's gradients from lo on, a multiple of `align`: name of the dtype -> tensor, for each of their
        places."""

    def misfits(self, result: Partial) -> bool:
        """Whether a leaf was too large, so that the result means nothing, and the pass has to be computed again. All
        members get the same answer."""

    def decode(self, result: Partial, pools: Mapping[str, Flats]) -> Partial:
        """The result in floats, in flat tensors of these pools. The result is not changed."""


NamedParts = Iterator[tuple[int, Tensor]]
"""(bit in Partial.nonfinite, values) of each parameter or buffer."""


def take_out_nonfinite(parts: NamedParts) -> int:
    """Put zeros in the place of infinities and NaN. Returns the bits of the parts with some."""
    bits = 0
    for bit, part in parts:
        if not bool(part.isfinite().all()):
            bits |= bit
            torch.nan_to_num(part, nan=0.0, posinf=0.0, neginf=0.0, out=part)
    return bits


def put_back_nonfinite(parts: NamedParts, bits: int) -> None:
    """Fill the parts that have one of these bits with NaN."""
    for bit, part in parts:
        if bits & bit:
            part.fill_(torch.nan)
