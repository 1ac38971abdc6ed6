"""The command that a process list shows for a forked worker."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path


def show(command: Sequence[str]) -> None:
    """Overwrite /proc/self/cmdline with this command, or with as much of it as the old text has space for."""
    stat = Path("/proc/self/stat").read_text(errors="replace")
    # Fields as in proc(5), counted from the end of the name, which may itself have spaces.
    start, end = (int(field) for field in stat.rpartition(")")[2].split()[45:47])
    room = end - start
    if room <= 0:
        return  # the kernel does not show the addresses
    text = b"".join(word.encode(errors="surrogateescape") + b"\0" for word in command)[: room - 1]
    ctypes.memmove(start, text.ljust(room, b"\0"), room)
