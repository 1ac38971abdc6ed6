"""The checksum of bytes that are sent between two workers, at the speed of memory.

The bytes are rows of 64-bit words, summed twice, along the columns and along the rows; CRC-32 is taken of these sums,
and of the bytes after the last whole row. Words or pages that change places, or changes that cancel in one direction,
show in the other. kernel.c makes both sums in one walk through memory; if it was not compiled, numpy makes them in two.
Figures: docs/decisions/own-mesh.md. Against forgery there are the token and TLS.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.allreduce.fixed_point.conversion import kernel

ROW_WORDS = 1024
ROW_BYTES = 8 * ROW_WORDS


def checksum(data: memoryview, running: int = 0) -> int:
    """A 32-bit sum of these bytes, and of earlier bytes if their sum is given; it depends on where bytes are divided.

    data: contiguous, of format "B".
    """
    if (count := data.nbytes // ROW_BYTES) == 0:
        return zlib.crc32(data, running)
    if (native := kernel()) is None:
        rows = np.frombuffer(data[: count * ROW_BYTES], dtype="<u8").reshape(count, ROW_WORDS)
        return _of_sums(rows.sum(axis=0), rows.sum(axis=1), data, running)
    columns, sums = _no_sums(count)
    native.sum_words(_address(np.frombuffer(data, np.uint8)), ctypes.c_int64(count), _address(columns), _address(sums))
    return _of_sums(columns, sums, data, running)


@dataclass(frozen=True, slots=True)
class NativeCopies:
    """Bytes that kernel.c copies into a body. Each is an array of int64, shape (pieces,), of at least one piece.
    sources: addresses; what lies there has to outlive this object. at: where in the body, ascending. sizes: bytes."""

    sources: npt.NDArray[np.int64]
    at: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]


def copy_with_checksum(copies: Sequence[NativeCopies], body: memoryview) -> int:
    """Make these copies, of which each begins behind the one before. Returns checksum(body), in the same walk through
    memory. copies: none if kernel() is None."""
    native = kernel()
    if not copies or native is None:
        return checksum(body)
    lists = [(one.sources, one.at, one.sizes) for one in copies]
    pieces = [np.concatenate(found) for found in zip(*lists, strict=True)]
    count = body.nbytes // ROW_BYTES
    columns, sums = _no_sums(count)
    into = _address(np.frombuffer(body, np.uint8)), ctypes.c_int64(count)
    what = [*map(_address, pieces), ctypes.c_int64(len(pieces[0]))]
    native.copy_and_sum(*what, *into, _address(columns), _address(sums))
    return _of_sums(columns, sums, body, 0)


def _no_sums(rows: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Of the columns, and of the rows, for kernel.c to fill."""
    return np.zeros(ROW_WORDS, np.uint64), np.empty(rows, np.uint64)


def _of_sums(columns: npt.NDArray[np.uint64], sums: npt.NDArray[np.uint64], data: memoryview, running: int) -> int:
    if len(sums):
        running = zlib.crc32(sums.data, zlib.crc32(columns.data, running))
    return zlib.crc32(data[len(sums) * ROW_BYTES :], running)


def _address(array: npt.NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
