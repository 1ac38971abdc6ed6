"""The checksum of bytes that are sent between two workers, at the speed of memory.

The bytes are rows of 64-bit words, summed twice, along the columns and along the rows; CRC-32 is taken of these sums,
and of the bytes after the last whole row. Words or pages that change places, or changes that cancel in one direction,
show in the other. Figures: docs/decisions/own-mesh.md. Against forgery there are the token and TLS.
"""

from __future__ import annotations

import zlib

import numpy as np

ROW_WORDS = 1024
ROW_BYTES = 8 * ROW_WORDS


def checksum(data: memoryview, running: int = 0) -> int:
    """A 32-bit sum of these bytes, and of earlier bytes if their sum is given; it depends on where bytes are divided.

    data: contiguous, of format "B".
    """
    whole = data.nbytes - data.nbytes % ROW_BYTES
    if whole:
        rows = np.frombuffer(data[:whole], dtype="<u8").reshape(-1, ROW_WORDS)
        running = zlib.crc32(rows.sum(axis=0), running)
        running = zlib.crc32(rows.sum(axis=1), running)
    return zlib.crc32(data[whole:], running)
