"""What --reduction fixed and --compression cost, and how close they come: `python -m tests.bench.fixed`. A minute, one
core.

Errors are those of a sum of V leaves against the sum in float64: the median relative error of an element, and the
largest error of an element relative to the largest value of its block. The exponents are those that follow from a pass
before with the same largest values, so the headroom is paid for. CPU times are those of one walk over 8 MB of float32.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from runtime.allreduce.fixed_point import int8_blocks
from runtime.allreduce.fixed_point.conversion import decode, encode, kernel
from runtime.allreduce.fixed_point.exponents import FALL, INT32, INT64, Range, exponents
from runtime.allreduce.reduction.leaves.fixed_leaves import BLOCK
from runtime.allreduce.reduction.leaves.narrow_leaves import NARROW, Narrow
from runtime.allreduce.reduction.partial_sum import add_into

ELEMENTS = 1 << 18
TIMED_ELEMENTS = 1 << 21
ROUNDS = 15


def leaves(units: int, decades: int, generator: torch.Generator) -> list[Tensor]:
    """Normal values; with decades, of so different sizes within each block."""
    spread = 10.0 ** (-decades * torch.rand(ELEMENTS, generator=generator))
    return [torch.randn(ELEMENTS, generator=generator) * spread for _ in range(units)]


def along_tree(values: Sequence[Tensor]) -> Tensor:
    """Pairs, then pairs of these: the canonical tree for a power of two."""
    sums = list(values)
    while len(sums) > 1:
        pairs = zip(sums[::2], sums[1::2], strict=True)
        sums = [add_into(left, right, torch.empty_like(left)) for left, right in pairs]
    return sums[0]


def as_blocks(values: Sequence[Tensor]) -> Tensor:
    packed = [torch.empty(int8_blocks.stored(ELEMENTS), dtype=torch.int8) for _ in values]
    for leaf, out in zip(values, packed, strict=True):
        int8_blocks.pack(leaf, out)
    found = torch.empty(ELEMENTS)
    int8_blocks.unpack(along_tree(packed), found)
    return found


def as_integers(values: Sequence[Tensor], of: Range) -> Tensor:
    units, blocks = len(values), ELEMENTS // BLOCK
    out = torch.empty(ELEMENTS, dtype=of.dtype)
    zeros = torch.zeros(blocks, dtype=torch.int16)
    tops = torch.stack([encode(leaf, zeros, BLOCK, torch.empty(ELEMENTS, dtype=torch.int64)) for leaf in values])
    chosen = exponents((tops.amax(0).int() * FALL).short(), of, units)
    total = torch.zeros(ELEMENTS, dtype=of.dtype)
    for leaf in values:
        encode(leaf, chosen, BLOCK, out)
        total += out
    found = torch.empty(ELEMENTS)
    decode(total, chosen, BLOCK, found)
    return found


def error(found: Tensor, true: Tensor) -> str:
    off = (found.double() - true).abs()
    largest = true.view(-1, BLOCK).abs().amax(1).repeat_interleave(BLOCK)
    return f"{(off / true.abs()).median():.1e}, {(off / largest).max():.1e}"


def cpu_ms(call: Callable[[], object]) -> float:
    """Median CPU time of a call, in milliseconds."""
    call()
    found = []
    for _ in range(ROUNDS):
        begun = time.process_time()
        call()
        found.append(time.process_time() - begun)
    return statistics.median(found) * 1e3


def costs(of: Range, x: Tensor, chosen: Tensor, added_ms: float) -> str:
    out, back = torch.empty(TIMED_ELEMENTS, dtype=of.dtype), torch.empty(TIMED_ELEMENTS)
    total = torch.zeros_like(out)
    to = cpu_ms(lambda: encode(x, chosen, BLOCK, out)) / added_ms
    fro = cpu_ms(lambda: decode(out, chosen, BLOCK, back)) / added_ms
    add = cpu_ms(lambda: total.add_(out)) / added_ms
    return f"{of.dtype}: to integers {to:.2f} of that, back {fro:.2f}, an add {add:.2f}"


def narrow_costs(narrow: Narrow, x: Tensor, added_ms: float) -> str:
    out, back = torch.empty(narrow.stored(TIMED_ELEMENTS), dtype=narrow.dtype), torch.empty(TIMED_ELEMENTS)
    narrow.pack(x, out)
    total = out.clone()
    to = cpu_ms(lambda: narrow.pack(x, out)) / added_ms
    fro = cpu_ms(lambda: narrow.unpack(out, back)) / added_ms
    add = cpu_ms(lambda: add_into(total, out, total)) / added_ms
    return f"to it {to:.2f} of that, back {fro:.2f}, an add {add:.2f}"


def main() -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    print("| leaves | V | float32 along the tree | fixed, int32 | fixed64 | bf16 | fp16 | int8 |")
    print("|---|---|---|---|---|---|---|---|")
    for decades in (0, 6):
        for units in (8, 64, 512):
            values = leaves(units, decades, generator)
            true = torch.stack([leaf.double() for leaf in values]).sum(0)
            ways = [along_tree(values), as_integers(values, INT32), as_integers(values, INT64)]
            ways += [along_tree([leaf.to(dtype) for leaf in values]) for dtype in (torch.bfloat16, torch.float16)]
            ways.append(as_blocks(values))
            kind = f"{decades} decades in a block" if decades else "normal"
            print(f"| {kind} | {units} | {' | '.join(error(way, true) for way in ways)} |")
    x, y = torch.randn(TIMED_ELEMENTS), torch.randn(TIMED_ELEMENTS)
    added = cpu_ms(lambda: y.add_(x))
    chosen = torch.full((TIMED_ELEMENTS // BLOCK,), 20, dtype=torch.int16)
    print(f"\nkernel compiled: {kernel() is not None}; an add of float32: {added:.2f} ms")
    for of in (INT32, INT64):
        print(costs(of, x, chosen, added))
    for compression, narrow in NARROW.items():
        print(f"{compression}: {narrow_costs(narrow, x, added)}")


if __name__ == "__main__":
    main()
