"""Finding and ending every process that descends from a command, also one in a session of its own.

A mark in the environment is inherited by whatever a command starts, and stays readable in /proc for as long as the
process lives. So nobody else's processes are ever touched.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from elastic.process import children
from runtime.worker.activity import below

MARK = "CHAOS_RUN"
"""Environment variable whose value tells one run from all others."""


def new_mark() -> str:
    return secrets.token_hex(8)


def living(mark: str) -> set[int]:
    """Pids of all processes with this mark. Zombies are not among them: they hold nothing any more."""
    entry = f"{MARK}={mark}".encode()
    found = set()
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit() or int(directory.name) == os.getpid():
            continue
        try:
            environment = (directory / "environ").read_bytes()
        except OSError:  # it ended meanwhile, or belongs to another user
            continue
        if entry in environment.split(b"\0"):
            found.add(int(directory.name))
    return found


def command_line(pid: int) -> str:
    """For people; also of a process that has just ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()
    except OSError:
        return "it has just ended"


def services(mark: str) -> dict[str, int]:
    """Pids of the processes that serve a job of this mark, by module; "etcd" is the store's."""
    found = {}
    for pid in living(mark):
        words = command_line(pid).split()
        if "-m" in words:
            found[words[words.index("-m") + 1]] = pid
        elif "--name=embedded" in words:
            found["etcd"] = pid
    return {name: pid for name, pid in found.items() if name.startswith("elastic.") or name == "etcd"}


def await_exits(pids: Iterable[int], within_s: float) -> set[int]:
    """Wait until these processes are gone; returns those that are not."""
    deadline_s = time.monotonic() + within_s
    left = set()
    for pid in pids:
        try:
            watch = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            ready, _, _ = select.select([watch], [], [], max(0.0, deadline_s - time.monotonic()))
        finally:
            os.close(watch)
        if not ready:
            left.add(pid)
    return left


class Command:
    """A command under a mark, its output in a file. A context manager that leaves no process behind.

    If the process that started it is killed itself, the kernel sends the command a SIGTERM (setpriv --pdeathsig). Made
    by the main thread, because that signal comes when the thread which started the command ends.
    """

    def __init__(
        self,
        command: Sequence[str],
        output: Path,
        *,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.mark = new_mark()
        self.output_path = output
        self._file: IO[bytes] = output.open("wb")
        self.process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "TERM", "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {}), MARK: self.mark},
            cwd=cwd,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def stop(self, within_s: float = 20.0) -> set[int]:
        """SIGTERM, and SIGKILL for what is left by then. Returns the pids that had to be killed."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            children.wait_or_kill(self.process, within_s)
        left = await_exits(living(self.mark), within_s=2.0)
        for pid in left:
            kill_if_there(pid)
        await_exits(left, within_s=10.0)
        self._file.close()
        return left

    @property
    def output(self) -> str:
        return self.output_path.read_text(errors="replace")


def exit_on_signals() -> None:
    """Let SIGTERM, and SIGHUP of a terminal that is closed, end this process like an error, so that every `with` block
    cleans up. Under nohup SIGHUP stays ignored. Main thread only."""
    for one in (signal.SIGTERM, signal.SIGHUP):
        if one is signal.SIGTERM or signal.getsignal(one) is not signal.SIG_IGN:
            signal.signal(one, lambda number, frame: sys.exit(128 + number))


def descendants(pid: int) -> list[int]:
    """The pids of all processes that a process has started, and those have, parents first; none if it has ended."""
    return list(below(pid))[1:]


def kill_if_there(pid: int) -> None:
    """SIGKILL, unless it has just ended by itself."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
