"""The leaves of --reduction fixed: integers, whose sum has the same bits in any order (see ../../fixed_point).

A leaf has, in place of its floats, one flat tensor for each dtype of integers, and one of tops:

    "int32" or "int64"   gradients
    "int64"              also "mean" buffers | "first" buffers, as they lie in memory | how many shards changed a buffer
    "int16"              the top of each block of gradients and "mean" buffers, of which the largest counts

Integers know neither infinities nor NaN. A leaf has zeros in their place, and a bit for each parameter and buffer with
some in Partial.nonfinite. In the result all of such a parameter is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from runtime.allreduce.fixed_point.conversion import NONFINITE, decode, encode
from runtime.allreduce.fixed_point.exponents import INT32, INT64, BlockExponents, Owners, Range, exponents, overflowed
from runtime.allreduce.reduction.flat_pool import Flats
from runtime.allreduce.reduction.leaves.layout import FlatGroup
from runtime.allreduce.reduction.leaves.leaf_format import NamedParts, put_back_nonfinite, take_out_nonfinite
from runtime.allreduce.reduction.partial_sum import Partial
from runtime.allreduce.reduction.schedule import Cut

BLOCK = 256
"""Gradients in a block: 2 bytes of tops for 1024 bytes."""
BUFFER_BLOCK = 16
"""Values of buffers in a block; they are few, and a mean lies beside a variance."""


@dataclass(frozen=True, slots=True)
class _Section:
    """Elements lo..hi-1 of a group's flat tensor. They lie from `at` on in the integers, their tops from tops_at on."""

    name: str
    group: str
    lo: int
    hi: int
    range: Range
    block: int
    at: int
    tops_at: int
    owners: Owners | None

    @property
    def blocks(self) -> int:
        return -(-(self.hi - self.lo) // self.block)

    @property
    def dtype(self) -> str:
        return str(self.range.dtype).removeprefix("torch.")

    def integers(self, flats: Mapping[str, Tensor]) -> Tensor:
        return flats[self.dtype][self.at : self.at + self.hi - self.lo]

    def blocks_of(self, lo: int, hi: int) -> slice:
        """The blocks with the section's elements lo..hi-1."""
        return slice(lo // self.block, -(-hi // self.block))

    def tops(self, flats: Mapping[str, Tensor]) -> Tensor:
        return flats["int16"][self.tops_at : self.tops_at + self.blocks]


class FixedPoint:
    """See LeafFormat."""

    align = BLOCK

    def __init__(self, state: BlockExponents, groups: Mapping[str, FlatGroup], device: torch.device) -> None:
        self._state, self._groups, self._device = state, groups, device
        self._sections: list[_Section] = []
        self._verbatim: dict[str, int] = {}
        """Group -> where its "first" buffers and flags begin in "int64"."""
        self.sizes = {"int16": 0}
        for name, group in groups.items():
            narrow = name == "float32" and not state.wide
            owners = Owners.find([parameter.numel() for parameter in group.parameters], BLOCK, device)
            self._add(name, "gradients", 0, group.gradients, INT32 if narrow else INT64, BLOCK, owners)
            self._add(name, "buffers", group.gradients, group.weighted, INT64, BUFFER_BLOCK)
            if group.buffers:
                self._verbatim[name] = self.sizes.setdefault("int64", 0)
                self.sizes["int64"] += group.elements - group.weighted
        self._pools = {
            name: Flats(getattr(torch, name), size, device=device) for name, size in self.sizes.items() if size
        }
        self._pass = ""
        self._exponents: dict[str, Tensor] = {}

    def _add(
        self, group: str, what: str, lo: int, hi: int, of: Range, block: int, owners: Owners | None = None
    ) -> None:
        if lo == hi:
            return
        dtype = str(of.dtype).removeprefix("torch.")
        at = self.sizes.setdefault(dtype, 0)
        section = _Section(f"{group} {what}", group, lo, hi, of, block, at, self.sizes["int16"], owners)
        self._sections.append(section)
        self.sizes[dtype] += hi - lo
        self.sizes["int16"] += section.blocks

    def begin(self, pass_no: int) -> None:
        """Fix the exponents of a pass. Pass n of a step learns from pass n of the steps before."""
        self._pass = f"pass {pass_no}"
        for section in self._sections:
            references = self._state.of(f"{self._pass}: {section.name}", section.blocks).to(self._device)
            self._exponents[section.name] = exponents(references, section.range, self._state.units, section.owners)

    def encode(self, leaf: Partial) -> None:
        floats, leaf.flats = leaf.flats, {name: pool.take() for name, pool in self._pools.items()}
        if self._convert(floats, leaf.flats):
            leaf.nonfinite = take_out_nonfinite(self._named_parts(floats))
            self._convert(floats, leaf.flats)

    def _convert(self, floats: Mapping[str, Tensor], integers: Mapping[str, Tensor]) -> bool:
        """Returns whether there is an infinity or a NaN."""
        for section in self._sections:
            values = floats[section.group][section.lo : section.hi]
            tops = encode(values, self._exponents[section.name], section.block, section.integers(integers))
            section.tops(integers).copy_(tops)
        for name, firsts, flags in self._verbatims(integers):
            group, flat = self._groups[name], floats[name]
            values = flat[group.weighted : group.elements - len(group.buffers)]
            firsts.copy_(values.view(torch.int32 if values.dtype is torch.float32 else torch.int64))
            flags.copy_(flat[group.elements - len(group.buffers) :])
        return bool((integers["int16"] == NONFINITE).any())

    def _gradients(self, group: str) -> _Section:
        return next(section for section in self._sections if section.name == f"{group} gradients")

    def places_of(self, group: str, lo: int, hi: int) -> Cut:
        section = self._gradients(group)
        blocks = section.blocks_of(lo, hi)
        tops = "int16", section.tops_at + blocks.start, section.tops_at + blocks.stop
        return (section.dtype, section.at + lo, section.at + hi), tops

    def encode_part(self, group: str, lo: int, values: Tensor) -> dict[str, Tensor]:
        """See LeafFormat. The integers of a block with an infinity or a NaN mean nothing."""
        section = self._gradients(group)
        out = torch.empty(len(values), dtype=section.range.dtype, device=values.device)
        blocks = section.blocks_of(lo, lo + len(values))
        return {section.dtype: out, "int16": encode(values, self._exponents[section.name][blocks], section.block, out)}

    def _verbatims(self, integers: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(group, its "first" buffers, its flags) in the integers."""
        for name, at in self._verbatim.items():
            group = self._groups[name]
            verbatim = integers["int64"][at : at + group.elements - group.weighted]
            firsts = len(verbatim) - len(group.buffers)
            yield name, verbatim[:firsts], verbatim[firsts:]

    def _named_parts(self, floats: Mapping[str, Tensor]) -> NamedParts:
        """(bit in Partial.nonfinite, values) of each parameter and "mean" buffer."""
        following = sum(len(group.parameters) for group in self._groups.values())
        for name, group in self._groups.items():
            for i, part in zip(group.numbers, group.gradient_parts(floats[name]), strict=True):
                yield 1 << i, part
            if group.buffers:
                parts, _ = group.buffer_parts(floats[name][group.gradients :])
                for buffer, part in zip(group.buffers, parts, strict=True):
                    if buffer.merge == "mean":
                        yield 1 << following, part
                    following += 1

    def misfits(self, result: Partial) -> bool:
        """See LeafFormat. If so, the exponents of the next `begin` fit the leaves of this pass."""
        tops = {"int16": result.flats["int16"].to(self._device)}  # another member's result has come through the CPU
        misfits = any(
            overflowed(self._exponents[section.name], section.tops(tops), section.range, self._state.units)
            for section in self._sections
        )
        if misfits:
            self._learn(result)
        return misfits

    def _learn(self, result: Partial) -> None:
        for section in self._sections:
            self._state.learn(f"{self._pass}: {section.name}", section.tops(result.flats))

    def decode(self, result: Partial, pools: Mapping[str, Flats]) -> Partial:
        """See LeafFormat. Learns the exponents of the next pass."""
        integers = {name: flat.to(self._device) for name, flat in result.flats.items()}
        floats = {name: pools[name].take() for name in self._groups}
        for section in self._sections:
            out = floats[section.group][section.lo : section.hi]
            decode(section.integers(integers), self._exponents[section.name], section.block, out)
        for name, firsts, flags in self._verbatims(integers):
            group, flat = self._groups[name], floats[name]
            values = flat[group.weighted : group.elements - len(group.buffers)]
            raw = torch.int32 if values.dtype is torch.float32 else torch.int64
            values.copy_(firsts.to(raw).view(values.dtype))
            flat[group.elements - len(group.buffers) :].copy_(flags)
        if result.nonfinite:
            put_back_nonfinite(self._named_parts(floats), result.nonfinite)
        self._learn(result)
        return replace(result, flats=floats)
