"""The sum that guards bytes on their way between two workers, at the speed of memory.

The bytes are taken as rows of 64-bit words, and summed twice, along the columns and along the rows; CRC-32 is taken of
those few sums, and of what is left behind the last whole row. Words or pages that changed places, or changes that make
up for each other in one direction, show in the other. Figures: docs/decisions/own-mesh.md. Against a forger the
connection's token and TLS stand, not a checksum.
"""

from __future__ import annotations

import zlib

import numpy as np

ROW_WORDS = 1024
ROW_BYTES = 8 * ROW_WORDS


def checksum(data: memoryview, running: int = 0) -> int:
    """32 bits of these bytes, and of all before them if that sum is given; it depends on where the bytes are divided.

    data: contiguous, of format "B".
    """
    whole = data.nbytes - data.nbytes % ROW_BYTES
    if whole:
        rows = np.frombuffer(data[:whole], dtype="<u8").reshape(-1, ROW_WORDS)
        running = zlib.crc32(rows.sum(axis=0), running)
        running = zlib.crc32(rows.sum(axis=1), running)
    return zlib.crc32(data[whole:], running)
