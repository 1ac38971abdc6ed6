"""Floats in a quarter of their bytes: blocks of integers of 8 bits and a step, which is 1 / 127 of the largest value.

    252 bytes   codes, -127 to 127
    4 bytes     the step, float32; NaN: the block has an infinity or a NaN

A value is code * step. It is rounded up or down at random, with the probability that makes the error 0 on average: a
value that is small in its block would else be 0 in every step of a training. The random numbers follow from the step,
whose last bits are different in every block, so the same values always give the same bits, and nothing has to be
remembered. The sum of two blocks is rounded in the same way to a step of its own.

kernel.c does it in one walk through memory, if a compiler was there when the project was installed; else torch does it,
with the same bits.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from runtime.allreduce.fixed_point.conversion import address, native_for

CODES = 252
"""Values of a block."""
BLOCK_BYTES = 256
_STEPS = 127
_LEAST = 2.0**-100
"""Blocks without a larger value are zeros: the inverse of their step would not be a float."""
_FINITE_BITS = 0x7F800000
_MIX = 0x9E3779B1
_ROWS = 256
"""Blocks that torch converts at once on a CPU, so that they stay in the processor's cache."""


def stored(values: int) -> int:
    """Bytes of so many values."""
    return -(-values // CODES) * BLOCK_BYTES


def pack(values: Tensor, out: Tensor) -> None:
    """Fill out with the blocks of values. values: float32, shape (n,), contiguous. out: int8, shape (stored(n),)."""
    if (library := native_for(values)) is not None:
        library.pack_int8(address(values), ctypes.c_int64(len(values)), address(_dither()), address(out))
        return
    full = len(values) // CODES * CODES
    blocks = out.view(-1, BLOCK_BYTES)
    _round(values[:full].view(-1, CODES), blocks[: full // CODES])
    if full < len(values):
        last = values.new_zeros((1, CODES))
        last[0, : len(values) - full] = values[full:]
        _round(last, blocks[-1:])


def unpack(packed: Tensor, out: Tensor) -> None:
    """Fill out with the values. Shapes and dtypes: as for `pack`."""
    if (library := native_for(packed)) is not None:
        library.unpack_int8(address(packed), ctypes.c_int64(len(out)), address(out))
        return
    values = _values(packed.view(-1, BLOCK_BYTES)).view(-1)
    out.copy_(values[: len(out)])


def add(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """Fill out, which may be left or right, with the blocks of their sums, and return it."""
    if (library := native_for(out)) is not None:
        blocks = ctypes.c_int64(len(out) // BLOCK_BYTES)
        library.add_int8(address(left), address(right), blocks, address(_dither()), address(out))
        return out
    rows = [tensor.view(-1, BLOCK_BYTES) for tensor in (left, right, out)]
    step = _ROWS if out.device.type == "cpu" else max(len(rows[0]), 1)
    for at in range(0, len(rows[0]), step):
        a, b, into = (row[at : at + step] for row in rows)
        _round(_values(a).add_(_values(b)), into)
    return out


def has_nonfinite(packed: Tensor) -> bool:
    """Whether a block has an infinity or a NaN."""
    return bool(_steps(packed.view(-1, BLOCK_BYTES)).isnan().any())


def _round(values: Tensor, blocks: Tensor) -> None:
    """Fill blocks with values, shape (number of blocks, CODES). As round_block in kernel.c."""
    largest = values.abs().amax(1) if len(values) else values.new_zeros(0)
    bits = largest.view(torch.int32)
    steps = torch.full_like(largest, _STEPS)  # not a number: torch would multiply by an inverse, with other bits
    step, inverse = largest / steps, steps / largest
    bad, small = bits >= _FINITE_BITS, largest < _LEAST
    step[bad], inverse[bad] = torch.nan, 0.0
    step[small], inverse[small] = 0.0, 0.0
    shift = (step.view(torch.int32).to(torch.int64) * _MIX >> 8 & 0xFFFFFF).to(torch.int32)
    up = (_dither().to(values.device) ^ shift[:, None]).to(torch.float32).mul_(2.0**-24)
    codes = up.add_(values * inverse[:, None]).floor_().clamp_(-_STEPS, _STEPS)
    codes[bad] = 0.0
    blocks[:, :CODES] = codes.to(torch.int8)
    blocks[:, CODES:] = step.view(torch.int8).view(-1, BLOCK_BYTES - CODES)


def _values(blocks: Tensor) -> Tensor:
    return blocks[:, :CODES].to(torch.float32).mul_(_steps(blocks)[:, None])


def _steps(blocks: Tensor) -> Tensor:
    return blocks[:, CODES:].contiguous().view(torch.float32).view(-1)


@functools.cache
def _dither() -> Tensor:
    """24 random bits for each code of a block, which each block shifts (exclusive or) by bits of its own."""
    found = []
    for number in range(CODES):
        bits = number + 1
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
            bits = (bits ^ bits >> shift) * factor & 0xFFFFFFFF
        found.append(bits >> 8)
    return torch.tensor(found, dtype=torch.int32)
