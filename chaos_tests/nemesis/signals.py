"""How each fault is done to processes and files of this machine, and how it ends. Each looks whether it took hold."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from chaos_tests.support import processes
from elastic.agent.process.worker_process import facts
from elastic.errors import ElasticError
from elastic.process import children

End: TypeAlias = Callable[[], None]
"""May raise scene.NotNow; then it is tried again."""

SEEN_S = 5.0
"""A process that was sent SIGSTOP or SIGKILL stands still or is gone after this long."""
PROCESS_STATE_POLL_S = 0.002
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


def send_to_living(pids: Iterable[int], *numbers: signal.Signals) -> None:
    """Each of the signals to all of those that have not just ended."""
    for number in numbers:
        for pid in pids:
            with contextlib.suppress(Impossible):
                send([pid], number)


def freeze(pids: Iterable[int]) -> End:
    """SIGSTOP, seen in /proc. Raises Impossible if one of them does not stand still."""
    pids = tuple(pids)
    send(pids, signal.SIGSTOP)
    return thaw_later(pids)


def thaw_later(pids: Iterable[int]) -> End:
    """For processes that have been sent SIGSTOP. Raises Impossible if one of them does not stand still."""
    pids = tuple(pids)

    def thaw() -> None:
        send_to_living(pids, signal.SIGCONT)  # one may have been killed meanwhile

    try:
        _await(lambda: all(_stands_still(pid) for pid in pids), f"processes {pids} do not stop")
    except Impossible:
        thaw()
        raise
    return thaw


def kill(pid: int) -> None:
    """SIGKILL, and wait until it is gone. Raises Impossible if it is not."""
    send([pid], signal.SIGKILL)
    if processes.await_exits([pid], SEEN_S):
        raise Impossible(f"process {pid} does not end")


def hog(count: int) -> End:
    """So many processes that never sleep; they die with this one. Raises Impossible if they get no processor."""
    with contextlib.ExitStack() as stack:
        hogs = [stack.enter_context(_helper(["-c", "while True: pass"])) for _ in range(count)]
        because = f"{count} busy processes got no processor in {SEEN_S:.0f} s"
        _await(lambda: all(_has_computed(process.pid) for process in hogs), because)

    def stop() -> None:
        for process in hogs:
            process.kill()
            process.wait()

    return stop


SLOWED = """
import os, signal, sys, time
pid = int(sys.argv[1])
while True:
    os.kill(pid, signal.SIGSTOP); time.sleep(0.08); os.kill(pid, signal.SIGCONT); time.sleep(0.02)
"""


def slow(pids: Sequence[int]) -> End:
    """Stop one process for 80 of each 100 ms. Raises Impossible if it does not stop."""
    (pid,) = pids
    with _helper(["-c", SLOWED, str(pid)]) as helper:
        because = f"process {pid} does not stop"
        _await(lambda: state(pid) in ("T", "t") or helper.poll() is not None, because)
        if helper.poll() is not None:
            raise Impossible(because)

    def stop() -> None:
        helper.kill()
        helper.wait()
        with contextlib.suppress(Impossible):  # it may have ended
            send([pid], signal.SIGCONT)

    return stop


@contextlib.contextmanager
def _helper(words: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process that dies with this one; ended at once if what is within the context raises."""
    command = children.dying_with_this(sys.executable, "-S", *words)
    helper = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield helper
    except BaseException:
        helper.kill()
        helper.wait()
        raise


def fill(directory: Path) -> End:
    """Write until no byte is left in its file system. Raises Impossible if that is larger than SMALL_DISK_BYTES."""
    free = shutil.disk_usage(directory).free
    if free > SMALL_DISK_BYTES:
        raise Impossible(
            f"{directory} has {free >> 20} MiB free; put --job-dir on a file system of at most "
            f"{SMALL_DISK_BYTES >> 20} MiB (mount -t tmpfs -o size=64m none DIR)"
        )
    path = directory / "chaos.fill"
    try:
        with path.open("wb", buffering=0) as file:
            for block in (1 << 20, 4096, 1):
                _write_until_full(file, block)
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise Impossible(f"cannot fill {directory}: {error}") from error
        raise
    return lambda: path.unlink(missing_ok=True)


def _write_until_full(file: io.FileIO, block: int) -> None:
    try:
        while True:
            file.write(b"\0" * block)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


def _await(reached: Callable[[], bool], otherwise: str) -> None:
    """Raises Impossible with that sentence if it does not come within SEEN_S."""
    until_s = time.monotonic() + SEEN_S
    while not reached():
        if time.monotonic() > until_s:
            raise Impossible(otherwise)
        time.sleep(PROCESS_STATE_POLL_S)  # the kernel tells nobody but the parent


def state(pid: int) -> str:
    """As in /proc/<pid>/stat: R, S, D, T, Z; "" if there is no such process."""
    seen = facts(pid)
    return seen.state if seen else ""


def _stands_still(pid: int) -> bool:
    """Each thread of it. Those on another processor run on for a moment after the signal was sent."""
    states = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            states.append(stat.read_text(errors="replace").rpartition(")")[2].split()[0])
    return bool(states) and all(state in ("T", "t") for state in states)


def _has_computed(pid: int) -> bool:
    seen = facts(pid)
    return seen is not None and seen.cpu_ticks > 0
