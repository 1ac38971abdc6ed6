"""The newest incarnation of each slot of a node, kept in the job directory.

A worker id is never given twice, also not by the agent that follows a killed one: that agent counts on from this file
and the logs, and ends the workers of the killed agent before it says that they are gone.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
from collections.abc import Iterator
from pathlib import Path

from elastic.agent.process import worker_process
from elastic.errors import ConfigError
from elastic.protocol.messages import WorkerDead
from elastic.records.files import write_atomically

DEATH_S = 5.0
"""Seconds after which a process that was sent SIGKILL is gone, unless the kernel holds it."""


DEAD_OF_A_SLOT = 64
"""A new agent says that so many of the newest workers of each slot are gone. Older workers are in no generation any
more."""

FILE = ".slots.json"
"""The end of the file's name; the node's name stands before it."""


class SlotFile:
    """The file, and the newest incarnation that was started in each slot."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file is damaged."""
        self._path = path
        self._unwritten = False
        self.refused: OSError | None = None
        """Why the file cannot be written at present."""
        self._slots: dict[int, tuple[int, int, int]] = {}
        try:
            document = json.loads(path.read_bytes())
            self._slots = {
                int(slot): (int(row["incarnation"]), int(row["pid"]), int(row["started"]))
                for slot, row in document.items()
            }
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} is damaged ({error}); move the job directory aside") from error
        for slot, incarnation in _logged(path):
            if incarnation > self._slots.get(slot, (-1,))[0]:
                self._slots[slot] = (incarnation, 0, 0)

    @property
    def incarnations(self) -> dict[int, int]:
        return {slot: incarnation for slot, (incarnation, _, _) in self._slots.items()}

    def deaths(self, node: str, snapshot: str) -> Iterator[WorkerDead]:
        """What an agent that begins says of the workers of earlier agents, the newest one of each slot last. snapshot:
        the newest one in this machine's memory, or ""."""
        for age in reversed(range(DEAD_OF_A_SLOT)):
            for slot, newest in self.incarnations.items():
                if age <= newest:
                    yield WorkerDead(f"{node}.{slot}.{newest - age}", "its agent ended", snapshot)

    def spawned(self, slot: int, incarnation: int, pid: int) -> None:
        """Note that a worker has been started."""
        self._slots[slot] = (incarnation, pid, worker_process.started(pid) or 0)
        self._unwritten = True
        self.settle()

    def settle(self) -> None:
        """Write what is not written yet. A failure is tried again later: no disk may delay the start of a worker."""
        if not self._unwritten:
            return
        rows = {
            str(number): {"incarnation": row[0], "pid": row[1], "started": row[2]}
            for number, row in sorted(self._slots.items())
        }
        try:
            write_atomically(self._path, json.dumps(rows).encode())
        except OSError as error:
            self.refused = error
            return
        self._unwritten, self.refused = False, None

    def end_leftovers(self) -> None:
        """Kill the workers of an earlier agent of this node that the kernel has not ended yet.

        Raises ConfigError if a process cannot be ended.
        """
        for _, pid, since in self._slots.values():
            if since and worker_process.started(pid) == since:
                _kill(pid, since)


def _logged(path: Path) -> Iterator[tuple[int, int]]:
    """Slot and incarnation of each worker of the node that has a log: a full disk takes an empty log."""
    node = re.escape(path.name.removesuffix(FILE))
    for log in (path.parent / "logs").glob("*.log"):
        if worker := re.fullmatch(rf"{node}\.(\d+)\.(\d+)\.log", log.name):
            yield int(worker[1]), int(worker[2])


def _kill(pid: int, since: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if worker_process.started(pid) != since:
            return
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        if not select.select([descriptor], [], [], DEATH_S)[0]:
            raise ConfigError(f"process {pid} of an earlier agent does not end; look what holds it (state D?)")
    finally:
        os.close(descriptor)
