"""Places in a script where a test can slow it down, hold it, or see that it got there.

A gate is a file in the directory LIVE_GATES that the test makes and removes; without the directory nothing happens. It
holds the workers whose names it contains, or, empty, all who come to it: of those one may wait for another instead.
"""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

_DIRECTORY = os.environ.get("LIVE_GATES")
_ME = os.environ.get("ELASTIC_WORKER_ID", "alone")


def hold(name: str) -> None:
    """Wait here while the gate `name` is shut; leaves `name.<worker_id>` behind, so that the test sees who waits."""
    if _DIRECTORY is None:
        return
    gate = Path(_DIRECTORY) / name
    try:
        names = gate.read_text().split()
    except FileNotFoundError:
        return
    if names and _ME not in names:
        return
    gate.with_name(f"{name}.{_ME}").touch()
    while gate.exists():
        time.sleep(0.005)


def seize(name: str) -> None:
    """As `hold` for a worker that the gate names, but for ever and with the interpreter: no other thread of it runs."""
    if _DIRECTORY is None or not shut(name) or _ME not in (Path(_DIRECTORY) / name).read_text().split():
        return
    Path(_DIRECTORY, f"{name}.{_ME}").touch()
    mutex, c = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
    for _ in "ab":
        c.pthread_mutex_lock(mutex)  # a signal interrupts a sleep, but not this


def slow(name: str, seconds: float) -> None:
    """Take so many seconds longer, but no longer than the gate is shut."""
    until_s = time.monotonic() + seconds
    while shut(name) and time.monotonic() < until_s:
        time.sleep(0.005)


def pace() -> None:
    """Take as many seconds as the file `pace.<worker_id>` says, or, without it, the file `pace`."""
    if _DIRECTORY is None:
        return
    for name in (f"pace.{_ME}", "pace"):
        try:
            text = (Path(_DIRECTORY) / name).read_text()
        except FileNotFoundError:
            continue
        time.sleep(float(text or 0))
        return


def shut(name: str) -> bool:
    """Whether the gate is shut just now; does not wait."""
    return _DIRECTORY is not None and (Path(_DIRECTORY) / name).exists()
