"""Whether this machine's memory has room for snapshots."""

from __future__ import annotations

import os

COPIES = 2
"""What lies in memory while one is written: it, and the one before."""

STAGED = 1
"""What all workers of a machine together copy aside first."""

PART = 0.5
"""How much of what is left snapshots may take: the script's own processes need memory, and some of them /dev/shm."""


def shortage(state_bytes: int, free_bytes: int, available_bytes: int) -> str:
    """Why a state of this size gets no snapshots, as a sentence; "" if there is room.

    free_bytes: of the file system in memory; available_bytes: of the memory that processes can get without swapping.
    """
    copies, all_bytes = COPIES * state_bytes, (COPIES + STAGED) * state_bytes
    if copies > PART * free_bytes:
        return (
            f"{COPIES} copies of a state of {_megabytes(state_bytes)} would take more than half of the "
            f"{_megabytes(free_bytes)} that are left in /dev/shm (a container is given more by docker run --shm-size)"
        )
    if all_bytes > PART * available_bytes:
        return (
            f"{COPIES + STAGED} copies of a state of {_megabytes(state_bytes)} would take more than half of the "
            f"{_megabytes(available_bytes)} of memory that are left on this machine"
        )
    return ""


def free_bytes(path: str) -> int:
    """Of the file system of that directory. Raises OSError."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB"
