"""Floats to integers and back: each block of elements has an exponent k, and x becomes round(x * 2**k), half to even.

On a CPU kernel.c does it in one walk through memory, if a compiler was there when the project was installed; on a GPU
gpu_kernel.py does, if Triton is there. Else torch does it, with the same bits. A scale is a power of two, so a product
has no rounding of its own.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import warnings
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

NOTHING = -32768
"""The exponent of a block of zeros; torch.maximum prefers any other one."""
NONFINITE = 32767
"""The exponent of a block with an infinity or a NaN."""
SOURCE = Path(__file__).with_name("kernel.c")

_ROWS = 64
"""Blocks that torch converts at once on a CPU, so that they stay in the processor's cache."""
_BITS = {torch.float32: (torch.int32, 23, 127), torch.float64: (torch.int64, 52, 1023)}
"""Dtype -> (integers of its size, bits of its mantissa, bias of its exponent)."""


def library() -> Path:
    """Where the compiled kernel.c lies; the name has a digest of the source, so no other version is used."""
    return SOURCE.with_name(f"kernel-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]}.so")


def encode(values: Tensor, exponents: Tensor, block: int, out: Tensor) -> Tensor:
    """Fill out with the integers of values. Returns the top of each block: the least e with abs(x) < 2**e for all its
    elements, at least -126 (float64: -1022), or NOTHING, or NONFINITE.

    values: float32 or float64, shape (n,), contiguous. exponents: int16, shape (ceil(n / block),); 2**k must be a
    normal number of out's range: float32 for int32, else float64. out: int32 or int64, shape (n,). The integers of a
    block mean nothing if its top plus k is above 30 (int64: 61), or if it is NONFINITE. The result is int16.
    """
    raw, mantissa, bias = _BITS[values.dtype]
    scale = _power(exponents, torch.float32 if out.dtype is torch.int32 else torch.float64)
    bits = torch.empty(len(exponents), dtype=raw, device=values.device)
    if (on_gpu := _gpu_kernel(values, block)) is not None:
        on_gpu.encode(values, scale, block, out, bits)
    elif (native := native_for(values)) is not None:
        call = getattr(native, f"encode_{_name(values)}_{_name(out)}")
        call(address(values), *_sizes(values, block), address(scale), address(out), address(bits))
    else:
        for rows, x, into in _rows(block, values, out):
            bits[rows] = x.abs().amax(1).view(raw)
            into.copy_(x.to(scale.dtype).mul(scale[rows, None]).round_())
    tops = (bits >> mantissa) - (bias - 1)
    tops[bits == 0] = NOTHING
    tops[tops == bias + 2] = NONFINITE
    return tops.to(torch.int16)


def decode(total: Tensor, exponents: Tensor, block: int, out: Tensor) -> None:
    """Fill out with total * 2**-k, rounded to float64 and then to out's dtype. Shapes and dtypes: as for encode."""
    scale = _power(-exponents, torch.float64)
    if (on_gpu := _gpu_kernel(total, block)) is not None:
        on_gpu.decode(total, scale, block, out)
    elif (native := native_for(total)) is not None:
        call = getattr(native, f"decode_{_name(total)}_{_name(out)}")
        call(address(total), *_sizes(total, block), address(scale), address(out))
    else:
        for rows, x, into in _rows(block, total, out):
            into.copy_(x.to(torch.float64).mul_(scale[rows, None]))


def _power(exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """2**k, made of its bits: torch.ldexp computes a power, which need not be exact."""
    raw, mantissa, bias = _BITS[dtype]
    return ((exponents.to(raw) + bias) << mantissa).view(dtype)


def _rows(block: int, values: Tensor, out: Tensor) -> list[tuple[slice, Tensor, Tensor]]:
    """(blocks, values of these blocks, their places in out), each in rows of a block; the last block may be short."""
    full = len(values) // block
    step = _ROWS if values.device.type == "cpu" else max(full, 1)
    found = []
    for lo in range(0, full, step):
        hi = min(lo + step, full)
        part = slice(lo * block, hi * block)
        found.append((slice(lo, hi), values[part].view(-1, block), out[part].view(-1, block)))
    if full * block < len(values):
        found.append((slice(full, full + 1), values[full * block :].view(1, -1), out[full * block :].view(1, -1)))
    return found


@functools.cache
def kernel() -> ctypes.CDLL | None:
    """The compiled kernel.c; None: torch does its work."""
    path = library()
    return ctypes.CDLL(str(path)) if path.exists() else None


def native_for(values: Tensor) -> ctypes.CDLL | None:
    """The compiled kernel.c, if it can read these values."""
    return kernel() if values.device.type == "cpu" else None


def _gpu_kernel(values: Tensor, block: int) -> ModuleType | None:
    """gpu_kernel.py, if it can convert these values."""
    if not values.is_cuda or not len(values):
        return None
    found = _triton(values.device)
    return found if found is not None and found.fits(block) else None


@functools.cache
def _triton(device: torch.device) -> ModuleType | None:
    """gpu_kernel.py; None: torch does its work, several times slower, because Triton or its compiler is missing."""
    try:
        from runtime.allreduce.fixed_point import gpu_kernel

        one = torch.ones(1, device=device)
        gpu_kernel.encode(one, one, 1, one.to(torch.int32), one.view(torch.int32))
    except ImportError:
        return None
    except Exception as error:  # what Triton raises when it finds no C compiler, or no library, is of many types
        warnings.warn(f"Triton compiles nothing here, so torch converts gradients, more slowly: {error}", stacklevel=2)
        return None
    return gpu_kernel


def address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _sizes(values: Tensor, block: int) -> tuple[ctypes.c_int64, ctypes.c_int64]:
    return ctypes.c_int64(len(values)), ctypes.c_int64(block)


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
