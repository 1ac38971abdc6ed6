"""The conversions of conversion.py in one walk through a GPU's memory. Triton compiles them; it comes with builds of
torch for CUDA.

The bits are those of kernel.c and of torch: a scale is a power of two, so no product has a rounding of its own that
another order of operations, or a fused one, could change.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS = 2048
"""Elements that one GPU program converts; a power of two."""
_OPTIONS = {"enable_fp_fusion": False}
"""For the compiler. No bit here depends on it; Triton 3.9 warns where it is left open, as 3.10 changes the default."""


@triton.jit
def _encode(values, scales, out, bits, count, block: tl.constexpr, rows: tl.constexpr, wide: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    at = row[:, None] * block + tl.arange(0, block)[None, :]
    here, begun = at < count, row * block < count
    x = tl.load(values + at, mask=here, other=0.0)
    if wide:  # noqa: SIM108  # at compile time
        raw = x.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    else:
        raw = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.store(bits + row, tl.max(raw, axis=1), mask=begun)
    scale = tl.load(scales + row, mask=begun, other=0.0)
    scaled = x.to(scale.dtype) * scale[:, None]
    down = tl.floor(scaled)
    whole = down.to(out.dtype.element_ty)
    over = scaled - down
    up = (over > 0.5) | ((over == 0.5) & ((whole & 1) == 1))
    tl.store(out + at, whole + up.to(whole.dtype), mask=here)


@triton.jit
def _decode(total, scales, out, count, block: tl.constexpr, rows: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    at = row[:, None] * block + tl.arange(0, block)[None, :]
    here = at < count
    scale = tl.load(scales + row, mask=row * block < count, other=0.0)
    values = tl.load(total + at, mask=here, other=0).to(tl.float64) * scale[:, None]
    tl.store(out + at, values.to(out.dtype.element_ty), mask=here)


def fits(block: int) -> bool:
    """Whether blocks of so many elements can be converted."""
    return block & (block - 1) == 0


def encode(values: Tensor, scales: Tensor, block: int, out: Tensor, bits: Tensor) -> None:
    """Fill out with round(values * scale), half to even, and bits with the bits of the largest absolute value of each
    block. scales, bits: shape (ceil(n / block),); bits: integers of the size of values."""
    rows = max(_ELEMENTS // block, 1)
    with torch.cuda.device(values.device):
        _encode[(triton.cdiv(len(scales), rows),)](
            values,
            scales,
            out,
            bits,
            len(values),
            block=block,
            rows=rows,
            wide=values.dtype is torch.float64,
            **_OPTIONS,
        )


def decode(total: Tensor, scales: Tensor, block: int, out: Tensor) -> None:
    """Fill out with total * scale, in float64, rounded to out's dtype."""
    rows = max(_ELEMENTS // block, 1)
    with torch.cuda.device(total.device):
        _decode[(triton.cdiv(len(scales), rows),)](total, scales, out, len(total), block=block, rows=rows, **_OPTIONS)
