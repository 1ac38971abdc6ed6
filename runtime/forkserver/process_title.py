"""What a process list shows of a forked worker."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path


def show(command: Sequence[str]) -> None:
    """Let /proc/self/cmdline be this command, or as much of it as there is room for: what was there is overwritten."""
    stat = Path("/proc/self/stat").read_text()
    # Fields are counted as in proc(5), from the end of the name, which may itself hold spaces.
    start, end = (int(field) for field in stat.rpartition(")")[2].split()[45:47])
    room = end - start
    if room <= 0:
        return  # the kernel keeps it to itself
    text = b"".join(word.encode(errors="surrogateescape") + b"\0" for word in command)[: room - 1]
    ctypes.memmove(start, text.ljust(room, b"\0"), room)
