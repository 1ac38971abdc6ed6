"""Which power of two each block of a sum is counted in.

A leaf is converted before the other leaves of its pass are known. So the power comes from the largest values that the
passes before had in this block, with headroom for larger ones. Members add up the tops of all leaves by maximum, hence
each of them knows after the pass whether a leaf was too large for its integers. Then all of them compute the pass
again, with exponents that fit it.

Where a block's values become smaller, its exponent follows slowly, because they may become larger again. It also leaves
room for the largest values of the other blocks of its parameter: in an embedding the row of a rare word has small
gradients, or none, in most steps, and then one as large as those of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from runtime.allreduce.fixed_point.conversion import NOTHING

NARROW_UNITS_MAX = 64
"""With more shards a step, int32 would leave a shard less than 21 bits below the largest value of its block."""
FALL = 16
"""In how many passes with smaller values an exponent falls by 1; references are counted in such parts of 1."""

ROOM = 2
"""See `exponents`."""


@dataclass(frozen=True, slots=True)
class Range:
    """Integers of one dtype. bits: a sum of all leaves stays below 2**bits. headroom: of these, bits above the largest
    value of the passes before. highest: the largest exponent."""

    dtype: torch.dtype
    bits: int
    headroom: int
    highest: int

    def per_leaf(self, units: int) -> int:
        """Bits for one of so many leaves."""
        return self.bits - (units - 1).bit_length()


INT32 = Range(torch.int32, 30, 3, 100)
"""24 bits for the largest value of a block with 8 shards, as float32 has; 21 with 64."""
INT64 = Range(torch.int64, 61, 16, 900)


class BlockExponents:
    """The references of all blocks, which are a part of the training state. It is registered: newcomers copy it,
    checkpoints have it, and digests cover it.

    A reference is int16: FALL times an exponent e such that the values are below 2**e; NOTHING as long as all were 0.
    """

    def __init__(self, *, always_wide: bool) -> None:
        """always_wide: float32 is summed in int64, however few shards a step has."""
        self._always_wide = always_wide
        self._references: dict[str, Tensor] = {}
        self.units = 1
        """Shards of a step, the same for the whole job."""

    @property
    def wide(self) -> bool:
        """Whether float32 is summed in int64."""
        return self._always_wide or self.units > NARROW_UNITS_MAX

    def state_dict(self) -> dict[str, Any]:
        return {"references": dict(self._references)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._references = {name: reference.clone() for name, reference in state["references"].items()}

    def of(self, name: str, blocks: int) -> Tensor:
        """The references under this name; new ones if there are none, or of another number of blocks: the script has
        frozen or unfrozen parameters."""
        found = self._references.get(name)
        if found is None or len(found) != blocks:
            return torch.full((blocks,), NOTHING, dtype=torch.int16)
        return found

    def learn(self, name: str, tops: Tensor) -> None:
        """Take in the largest tops of a pass."""
        self._references[name] = followed(self.of(name, len(tops)).to(tops.device), tops)


def followed(references: Tensor, tops: Tensor) -> Tensor:
    """The references after a pass with these tops: up at once, down slowly, the same where all values were 0."""
    raised = tops.to(torch.int32) * FALL
    fallen = torch.maximum(raised, references.to(torch.int32) - 1)
    return torch.where(tops == NOTHING, references, fallen).clamp_(min=NOTHING).to(torch.int16)


@dataclass(frozen=True, slots=True)
class Owners:
    """Which parameter the values of each block are of. of: int64, one number a block; `count` where they are of several
    parameters."""

    of: Tensor
    count: int

    @staticmethod
    def find(sizes: Sequence[int], block: int, device: torch.device) -> Owners:
        """Find the owners in a tensor that has parameters of these sizes, in elements, one after the other. block:
        elements of a block."""
        ends = torch.tensor(list(accumulate(sizes)), dtype=torch.int64)
        firsts = torch.arange(0, sum(sizes), block)
        lasts = (firsts + block).clamp_(max=sum(sizes)) - 1
        first, last = (torch.searchsorted(ends, at, right=True) for at in (firsts, lasts))
        return Owners(torch.where(first == last, first, len(sizes)).to(device), len(sizes))


def exponents(references: Tensor, of: Range, units: int, owners: Owners | None = None) -> Tensor:
    """The exponent of each block, int16: values as large as those of the passes before fit with headroom, and values
    2**ROOM times as large as the largest ones of the block's parameter fit. A block without any reference gets that of
    the block with the largest values."""
    tops = torch.where(references == NOTHING, NOTHING, (references.to(torch.int32) + FALL - 1) >> FALL.bit_length() - 1)
    if owners is not None:
        largest = tops.new_full((owners.count + 1,), NOTHING).scatter_reduce_(0, owners.of, tops, "amax")
        largest[-1] = NOTHING
        near = largest[owners.of]
        tops = torch.where(near == NOTHING, tops, torch.maximum(tops, near - of.headroom + ROOM))
    tops = torch.where(tops == NOTHING, tops.amax() if len(tops) else tops, tops)
    return (of.per_leaf(units) - of.headroom - tops).clamp_(max=of.highest).to(torch.int16)


def overflowed(exponents: Tensor, tops: Tensor, of: Range, units: int) -> bool:
    """Whether a leaf with such tops may be too large for integers of these exponents."""
    return bool((tops.to(torch.int32) + exponents > of.per_leaf(units)).any())
