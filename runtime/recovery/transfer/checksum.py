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
    rows = _rows(data)
    if (native := kernel()) is None:
        return _of_sums(rows.sum(axis=0), rows.sum(axis=1), data, running)
    columns, sums = _no_sums(rows)
    native.sum_words(*_place(rows), *_addresses(columns, sums))
    return _of_sums(columns, sums, data, running)


@dataclass(frozen=True, slots=True)
class NativeCopies:
    """Bytes that kernel.c copies into a body. Each is an array of int64, shape (pieces,). sources: addresses. at: where
    in the body, ascending. sizes: bytes. Whoever makes it sees to it that the sources live on."""

    sources: npt.NDArray[np.int64]
    at: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]


def copy_with_checksum(copies: Sequence[NativeCopies], body: memoryview) -> int:
    """Make these copies, of which each begins behind the one before. Returns checksum(body), in the same walk through
    memory. copies: none if kernel() is None."""
    native = kernel()
    if not copies or native is None:
        return checksum(body)
    pieces = [
        np.concatenate(found) for found in zip(*((one.sources, one.at, one.sizes) for one in copies), strict=True)
    ]
    rows = _rows(body)
    columns, sums = _no_sums(rows)
    count = ctypes.c_int64(len(pieces[0]))
    native.copy_and_sum(*_addresses(*pieces), count, *_place(rows), *_addresses(columns, sums))
    return _of_sums(columns, sums, body, 0)


def _rows(data: memoryview) -> npt.NDArray[np.uint64]:
    whole = data.nbytes - data.nbytes % ROW_BYTES
    return np.frombuffer(data[:whole], dtype="<u8").reshape(-1, ROW_WORDS)


def _no_sums(rows: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Of the columns, and of the rows, for kernel.c to fill."""
    return np.zeros(ROW_WORDS, np.uint64), np.empty(len(rows), np.uint64)


def _of_sums(columns: npt.NDArray[np.uint64], sums: npt.NDArray[np.uint64], data: memoryview, running: int) -> int:
    if len(sums):
        running = zlib.crc32(sums.data, zlib.crc32(columns.data, running))
    return zlib.crc32(data[len(sums) * ROW_BYTES :], running)


def _place(rows: npt.NDArray[np.uint64]) -> tuple[ctypes.c_void_p, ctypes.c_int64]:
    return ctypes.c_void_p(rows.ctypes.data), ctypes.c_int64(len(rows))


def _addresses(*arrays: npt.NDArray[Any]) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(one.ctypes.data) for one in arrays]
