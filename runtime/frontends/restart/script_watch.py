"""What /proc says about a running script: whether a signal has stopped it, and for how long nothing of it has used a
processor."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from elastic.agent.worker import stack_dump
from runtime.worker.activity import below, cpu_s, stat_of

LOOKS = 3
"""A script is stopped if it is at so many looks in a row, and has used no processor between them. A tracer, such as
gdb, is something else: it stops a process with another state (t), and py-spy does so many times a second."""

WINDOW_S = 5.0
"""Seconds over which the use of processors is measured."""

NOISE = 0.01
"""A script and what it has started stand still if they use less than this share of one processor. One that hung in a
collective of gloo, with two DataLoader workers, was seen to use 0.003."""

PAUSE_S = 5.0
"""Seconds between two looks after which nothing is concluded from the earlier one: this process may have stood still
too."""

STACKS_S = 1.0
"""Seconds for a script to write its stacks. Milliseconds are usual."""


class ScriptWatch:
    """Used by one thread, which calls `look` several times a second."""

    def __init__(
        self,
        pid: int,
        stopped_s: float,
        now_s: float,
        facts: Callable[[int], tuple[str, int] | None] | None = None,
        used_s: Callable[[int], float] = cpu_s,
    ) -> None:
        """stopped_s: seconds from the first to the last look at a stopped script. now_s: as of `look`. facts: state
        letter of a process and its clock ticks so far, None if it is gone. used_s: processor time of a process and of
        all below it."""
        self._pid = pid
        self._least_s = stopped_s
        self._facts = facts or _facts
        self._used_s = used_s
        self._looked_s = self._busy_s = self._window_s = now_s
        self._used = used_s(pid)
        self._ticks = -1
        self._stopped: list[float] = []
        """When it was seen stopped, at the last looks."""

    def look(self, now_s: float) -> bool:
        """Whether the script is stopped by a signal."""
        paused = now_s - self._looked_s >= PAUSE_S
        self._looked_s = now_s
        if paused or now_s - self._window_s >= WINDOW_S:
            used, least = self._used_s(self._pid), NOISE * (now_s - self._window_s)
            if paused or abs(used - self._used) >= least:  # less than before: a child of it is gone
                self._busy_s = now_s
            self._window_s, self._used = now_s, used
        if (found := self._facts(self._pid)) is None:
            return False
        state, ticks = found
        if paused or state != "T" or ticks != self._ticks:
            self._stopped = []
        if state == "T":
            self._stopped.append(now_s)
        self._ticks = ticks
        return len(self._stopped) >= LOOKS and now_s - self._stopped[0] >= self._least_s

    @property
    def idle_s(self) -> float:
        """Seconds, at the last look, for which neither the script nor a process below it has used a processor."""
        return self._looked_s - self._busy_s


def where(pid: int) -> list[str]:
    """Lines on the threads of a process and of all below it: name, state, and the kernel function that each waits in.
    Has the process write its stacks to its stderr, too, if it can."""
    if stack_dump.ask(pid):
        time.sleep(STACKS_S)
    return [line for process in below(pid) for line in _threads(process)]


def _threads(pid: int) -> Iterator[str]:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        threads = sorted(map(int, os.listdir(f"/proc/{pid}/task")))
    except OSError:  # the process has ended
        return
    yield f"process {pid}: {command:.100}"
    for thread in threads:
        try:
            text = Path(f"/proc/{pid}/task/{thread}/stat").read_text(errors="replace")
            waits_in = Path(f"/proc/{pid}/task/{thread}/wchan").read_text()
        except OSError:
            continue
        name, state = text[text.index("(") + 1 : text.rindex(")")], text.rpartition(")")[2].split()[0]
        yield f"  thread {thread} {name}: state {state}" + (f", in {waits_in}" if waits_in not in ("", "0") else "")


def _facts(pid: int) -> tuple[str, int] | None:
    fields = stat_of(pid)
    return (fields[0], int(fields[11]) + int(fields[12])) if fields else None
