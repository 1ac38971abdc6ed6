"""Which processes of a job in rounds outlive their script: looked up while it runs, and again when it has ended."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from chaos_tests.support import processes
from elastic.agent.process.worker_process import started
from elastic.records.journal import Journal

LOOK_S = 1.0
OUTLIVES_S = 5.0
"""After a script has ended, or its worker, until nothing of it may be there any more."""


class ScriptAudit:
    """`look` is called often by one thread, with the new lines of the job's journals."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._scripts: dict[int, str] = {}
        """Pid of a script that runs -> its worker."""
        self._below: dict[int, dict[int, int]] = {}
        """Pid of a script -> pid of it and of all that it has started -> when each began."""
        self._over: list[tuple[float, str, dict[int, int]]] = []
        """(when, worker, processes) of scripts that have ended."""
        self._looked_s = 0.0

    def look(self, lines: Iterable[dict[str, Any]]) -> None:
        for line in lines:
            worker = line["worker_id"]
            match line["event"]:
                case "script_started":
                    self._scripts[line["script"]] = worker
                    self._see(line["script"])
                case "script_ended" if line["script"] in self._scripts:
                    self._end(line["script"])
                case "worker_exited":
                    for script in [pid for pid, owner in self._scripts.items() if owner == worker]:
                        self._end(script)
        if time.monotonic() - self._looked_s >= LOOK_S:
            self._looked_s = time.monotonic()
            for script in self._scripts:
                self._see(script)
        while self._over and time.monotonic() - self._over[0][0] >= OUTLIVES_S:
            _, worker, known = self._over.pop(0)
            for pid, began in known.items():
                if started(pid) == began:
                    said = processes.command_line(pid)
                    self._journal.write("script_outlived", worker_id=worker, script=pid, because=said)

    def _end(self, script: int) -> None:
        self._over.append((time.monotonic(), self._scripts.pop(script), self._below.pop(script, {})))

    def _see(self, script: int) -> None:
        for pid in (script, *processes.descendants(script)):
            if (began := started(pid)) is not None:
                self._below.setdefault(script, {})[pid] = began
