"""The processes of the script that a worker has in a round: one, or with --ranks as many as its places."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.frontends.restart.script_failure import Failure
from runtime.frontends.restart.script_host import ScriptExit, ScriptHost, ScriptHosts
from runtime.frontends.restart.script_watch import ScriptWatch


@dataclass(frozen=True, slots=True)
class ScriptEnded:
    """How a process of the script has ended. status: None: not to be known. failure: None: with status 0. stopped:
    whether a signal had stopped it, so that it was ended."""

    pid: int
    status: int | None
    failure: Failure | None
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class _Script:
    pid: int
    host: ScriptHost
    watch: ScriptWatch
    error_file: Path


class Scripts:
    """Used by the worker's main thread, `wake` by any. All calls but `wake` raise HostLost."""

    def __init__(self, hosts: ScriptHosts, stopped_s: float) -> None:
        """stopped_s: as of ScriptWatch."""
        self._hosts = hosts
        self._stopped_s = stopped_s
        self._running: list[_Script] = []
        self._generation = 0
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    @property
    def running(self) -> list[int]:
        """The pids of those that run."""
        return [script.pid for script in self._running]

    def memory(self) -> int:
        """Bytes of memory that one of them has alone, at most; 0: none runs."""
        return max((_own_memory(script.pid) for script in self._running), default=0)

    @property
    def idle_s(self) -> float:
        """Seconds for which none of them has used a processor; 0.0 if none runs."""
        return min((script.watch.idle_s for script in self._running), default=0.0)

    def start(self, generation: int, settings: Sequence[Mapping[str, str]]) -> list[int]:
        """Start the script of a round once for each of these environments, and return the pids. Raises OSError if the
        machine has no process for one of them; those before it run."""
        self._generation = generation
        for host, each in zip(self._hosts.first(len(settings)), settings, strict=True):
            error_file = Path(each["TORCHELASTIC_ERROR_FILE"])
            error_file.parent.mkdir(exist_ok=True)
            error_file.unlink(missing_ok=True)
            pid = host.start(dict(each))
            watch = ScriptWatch(pid, self._stopped_s, time.monotonic())
            self._running.append(_Script(pid, host, watch, error_file))
        return self.running

    def wake(self) -> None:
        """End the `wait` that is under way, or the next one."""
        os.eventfd_write(self._wake, 1)

    def wait(self, within_s: float) -> list[ScriptEnded]:
        """Those that end within that time. It returns early when one ends, or when `wake` is called."""
        waiting: list[Any] = [self._wake, *(script.host for script in self._running)]
        readable, _, _ = select.select(waiting, [], [], within_s)
        if self._wake in readable:
            os.eventfd_read(self._wake)
        found, now_s = [], time.monotonic()
        for script in tuple(self._running):
            if script.host in readable:
                ended = script.host.ended()
                found.append(ScriptEnded(script.pid, ended.status, self._failure_of(ended, script.error_file)))
            elif script.watch.look(now_s):
                script.host.stop(0.0)
                killed = Failure(-signal.SIGKILL, time.time())
                found.append(ScriptEnded(script.pid, script.host.stopped(), killed, stopped=True))
            else:
                continue
            self._running.remove(script)
        return found

    def stop(self, grace_s: float) -> list[ScriptEnded]:
        """End all. Each gets SIGTERM, and SIGKILL if it has not ended grace_s later. A handler of a signal may call it,
        and then ends this process, while the main thread is in it."""
        for script in self._running:
            script.host.stop(grace_s)
        ended = [ScriptEnded(script.pid, script.host.stopped(), None) for script in self._running]
        self._running = []
        return ended

    def _failure_of(self, ended: ScriptExit, error_file: Path) -> Failure | None:
        if ended.expired:  # by a signal that it may have caught, to exit with any status
            said = f"the timer of {ended.expired} expired (torch.distributed.elastic.timer)"
            # Elsewhere the same place twice proves a mistake of the script; a collective may hang twice for another
            # reason each time, so the place has the round.
            return Failure(ended.status or 1, ended.at_s, f"{ended.expired} in round {self._generation}", said)
        return Failure.read(ended.status, ended.at_s, error_file) if ended.status else None


def _own_memory(pid: int, proc: Path = Path("/proc")) -> int:
    """Bytes that it has written and shares with no other process; 0: the process has just ended, or the kernel does not
    tell."""
    try:
        lines = (proc / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_Dirty:"))


def too_much(ranks: int, each: int, available: int) -> str:
    """Why the memory that is available is hardly enough for so many processes of the script, in words; "": it is, or it
    is not known how much each needs. All in bytes."""
    if ranks * each <= available:
        return ""
    return (
        f"{ranks} processes of the script with about {each / 1e6:.0f} MB each are to run here, and "
        f"{available / 1e6:.0f} MB are left"
    )
