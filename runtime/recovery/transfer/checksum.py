"""The checksum of bytes that are sent between two workers, at the speed of memory.

The bytes are rows of 64-bit words, summed twice, along the columns and along the rows; CRC-32 is taken of these sums,
and of the bytes after the last whole row. Words or pages that change places, or changes that cancel in one direction,
show in the other. kernel.c makes both sums in one walk through memory; if it was not compiled, numpy makes them in two.
Figures: docs/decisions/own-mesh.md. Against forgery there are the token and TLS.
"""

from __future__ import annotations

import ctypes
import zlib
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from runtime.allreduce.fixed_point.conversion import kernel

Numbers: TypeAlias = npt.NDArray[np.int64]
"""Shape (pieces,)."""
ROW_WORDS = 1024
ROW_BYTES = 8 * ROW_WORDS


def checksum(data: memoryview, running: int = 0) -> int:
    """A 32-bit sum of these bytes, and of earlier bytes if their sum is given; it depends on where bytes are divided.

    data: contiguous, of format "B".
    """
    if (count := data.nbytes // ROW_BYTES) == 0:
        return zlib.crc32(data, running)
    if kernel() is not None:
        return FilledBody(data).checksum(running)
    rows = np.frombuffer(data[: count * ROW_BYTES], dtype="<u8").reshape(count, ROW_WORDS)
    return _of_sums(rows.sum(axis=0), rows.sum(axis=1), data, running)


class FilledBody:
    """A body of bytes that kernel.c fills from its beginning on, and whose checksum it makes in the same walk through
    memory. Only if kernel() is there."""

    def __init__(self, body: memoryview) -> None:
        """body: of one byte at least. What `copy` does not fill is there already."""
        native = kernel()
        assert native is not None, "kernel.c was compiled"
        native.copy_and_sum.restype = ctypes.c_int64
        self._native, self._body = native, body
        self._rows = body.nbytes // ROW_BYTES
        self._summed = 0
        """How many rows are in the sums."""
        self._columns, self._sums = np.zeros(ROW_WORDS, np.uint64), np.empty(self._rows, np.uint64)
        self._address = np.frombuffer(body, np.uint8).ctypes.data

    def copy(self, sources: Numbers, at: Numbers, sizes: Numbers) -> None:
        """Copy pieces of memory, each behind those before. sources: addresses, which are valid until this returns. A
        byte there that changes meanwhile makes the checksum wrong. at: where in the body. sizes: bytes."""
        self._summed = self._native.copy_and_sum(
            *map(_address, (sources, at, sizes)),
            ctypes.c_int64(len(sources)),
            ctypes.c_void_p(self._address),
            ctypes.c_int64(self._summed),
            *map(_address, (self._columns, self._sums)),
        )

    def checksum(self, running: int = 0) -> int:
        """checksum(body, running), behind the last copy."""
        rest = self._rows - self._summed
        where = ctypes.c_void_p(self._address + self._summed * ROW_BYTES), ctypes.c_int64(rest)
        self._native.sum_words(*where, *map(_address, (self._columns, self._sums[self._summed :])))
        self._summed = self._rows
        return _of_sums(self._columns, self._sums, self._body, running)


def _of_sums(columns: npt.NDArray[np.uint64], sums: npt.NDArray[np.uint64], data: memoryview, running: int) -> int:
    if len(sums):
        running = zlib.crc32(sums.data, zlib.crc32(columns.data, running))
    return zlib.crc32(data[len(sums) * ROW_BYTES :], running)


def _address(array: npt.NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
