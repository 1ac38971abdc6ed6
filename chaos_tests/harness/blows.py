"""How each fault is done to processes and files of this machine, and how it ends. Each looks whether it took hold."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeAlias

from elastic.errors import ElasticError
from elastic.process import facts

End: TypeAlias = Callable[[], None]

SEEN_S = 5.0
"""A process that was sent SIGSTOP or SIGKILL stands still or is gone after this long."""
LOOK_S = 0.002
SMALL_DISK_BYTES = 256 << 20
"""A larger file system is not filled: it is somebody's machine."""


class Impossible(ElasticError):
    """The fault cannot be done here, or not now; the message says why. Nothing was done."""


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """To all of them at one instant. Raises Impossible, with nothing sent, if one is gone."""
    with contextlib.ExitStack() as stack:
        descriptors = []
        for pid in pids:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                raise Impossible(f"process {pid} has just ended") from None
            stack.callback(os.close, descriptor)
            descriptors.append(descriptor)
        for descriptor in descriptors:
            with contextlib.suppress(ProcessLookupError):  # it was there a moment ago, and is a zombie now
                signal.pidfd_send_signal(descriptor, number)


def freeze(pids: Iterable[int]) -> End:
    """SIGSTOP, seen in /proc. Raises Impossible if one of them does not stand still."""
    pids = tuple(pids)
    send(pids, signal.SIGSTOP)

    def thaw() -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, Impossible):  # it may have been killed meanwhile
                send([pid], signal.SIGCONT)

    until_s = time.monotonic() + SEEN_S
    while not all(state(pid) in ("T", "t") for pid in pids):
        if time.monotonic() > until_s:
            thaw()
            raise Impossible(f"processes {pids} do not stop")
        time.sleep(LOOK_S)  # the kernel tells nobody but the parent
    return thaw


def kill(pid: int) -> None:
    """SIGKILL, and wait until it is gone. Raises Impossible if it is not."""
    descriptor = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        if not select.select([descriptor], [], [], SEEN_S)[0]:
            raise Impossible(f"process {pid} does not end")
    finally:
        os.close(descriptor)


def hog(count: int) -> End:
    """So many processes that never sleep; they die with this one. Raises Impossible if they get no processor."""
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        raise Impossible("setpriv not found: install util-linux")
    command = [setpriv, "--pdeathsig", "KILL", sys.executable, "-S", "-c", "while True: pass"]
    hogs = [subprocess.Popen(command, stdin=subprocess.DEVNULL) for _ in range(count)]

    def stop() -> None:
        for process in hogs:
            process.kill()
            process.wait()

    until_s = time.monotonic() + SEEN_S
    while not all(_has_computed(process.pid) for process in hogs):
        if time.monotonic() > until_s:
            stop()
            raise Impossible(f"{count} busy processes got no processor in {SEEN_S:.0f} s")
        time.sleep(LOOK_S)  # the kernel tells nobody
    return stop


def fill(directory: Path) -> End:
    """Write until no byte is left in its file system. Raises Impossible if that is larger than SMALL_DISK_BYTES."""
    free = shutil.disk_usage(directory).free
    if free > SMALL_DISK_BYTES:
        raise Impossible(
            f"{directory} has {free >> 20} MiB free; put --job-dir on a file system of at most "
            f"{SMALL_DISK_BYTES >> 20} MiB (mount -t tmpfs -o size=64m none DIR)"
        )
    path = directory / "chaos.fill"
    with path.open("wb", buffering=0) as file:
        for block in (1 << 20, 4096, 1):
            try:
                while True:
                    file.write(b"\0" * block)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    path.unlink()
                    raise Impossible(f"cannot fill {directory}: {error}") from error
    return lambda: path.unlink(missing_ok=True)


def state(pid: int) -> str:
    """As in /proc/<pid>/stat: R, S, D, T, Z; "" if there is no such process."""
    seen = facts(pid)
    return seen.state if seen else ""


def _has_computed(pid: int) -> bool:
    seen = facts(pid)
    return seen is not None and seen.cpu_ticks > 0
