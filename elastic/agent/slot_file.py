"""Which incarnations the slots of a node have had, kept in the job directory.

A worker id is never given twice, also not by an agent that replaces a killed one: it goes on counting from this file,
and makes sure that what the killed one had started is gone before it says so.
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
from pathlib import Path

from elastic.agent.process import worker_process
from elastic.errors import ConfigError
from elastic.records.files import write_atomically

DEATH_S = 5.0
"""A process that was sent SIGKILL is gone after this long, unless the kernel holds it."""


FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class SlotFile:
    """incarnations: slot -> the newest one that was started."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file is damaged."""
        self._path = path
        self._unwritten = False
        self.refused: OSError | None = None
        """Why it cannot be written at present, if that is more than a full disk, which is said anyway."""
        self._slots: dict[int, tuple[int, int, int]] = {}
        try:
            document = json.loads(path.read_bytes())
            self._slots = {
                int(slot): (int(row["incarnation"]), int(row["pid"]), int(row["started"]))
                for slot, row in document.items()
            }
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} is damaged ({error}); move the job directory aside") from error

    @property
    def incarnations(self) -> dict[int, int]:
        return {slot: incarnation for slot, (incarnation, _, _) in self._slots.items()}

    def spawned(self, slot: int, incarnation: int, pid: int) -> None:
        """A worker runs now."""
        self._slots[slot] = (incarnation, pid, worker_process.started(pid) or 0)
        self._unwritten = True
        self.settle()

    def settle(self) -> None:
        """Write what is not written yet. No disk may keep a worker from being replaced: called again."""
        if not self._unwritten:
            return
        rows = {
            str(number): {"incarnation": row[0], "pid": row[1], "started": row[2]}
            for number, row in sorted(self._slots.items())
        }
        try:
            write_atomically(self._path, json.dumps(rows).encode())
        except OSError as error:
            self.refused = error if error.errno not in FULL else None
            return
        self._unwritten, self.refused = False, None

    def end_leftovers(self) -> None:
        """Kill whatever an earlier agent of this node started and the kernel has not yet ended.

        Raises ConfigError if a process cannot be ended.
        """
        for _, pid, since in self._slots.values():
            if since and worker_process.started(pid) == since:
                _kill(pid, since)


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
