"""The processes of an agent's workers: started, watched and signalled.

This module decides nothing: worker_slot.py says when a worker starts and what follows its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from elastic.agent.process import worker_process
from elastic.agent.process.launcher import Launcher, Start
from elastic.agent.process.memory_kills import SOON_S, MemoryKills
from elastic.agent.process.worker_process import WorkerProcess
from elastic.agent.worker import death_watch, stack_dump
from elastic.agent.worker.death_watch import DeathWatch
from elastic.protocol.failure_detector import Facts
from elastic.protocol.worker_slot import describe
from elastic.records.journal import Journal

STACKS_S = 1.0
"""Seconds for a worker to write its stacks. Milliseconds are usual."""


class ProcessEvents(Protocol):
    """The owner of the workers, called on the event loop. number: a slot."""

    def on_started(self, number: int, worker_id: str, pid: int) -> None: ...
    def on_not_started(self, number: int, because: str) -> None: ...
    def on_line(self, worker_id: str, line: bytes) -> None: ...
    def on_dying(self, worker_id: str, status: int, starved: str) -> None:
        """The worker's main thread has ended; its process will soon. status: as of worker_process.ending_status.
        starved: as in worker_slot.Exited."""

    def on_exit(
        self, number: int, worker_id: str, status: int, last_words: Callable[[], str], starved: str
    ) -> None: ...


class WorkerProcesses:
    """Used on the event loop, by the main thread."""

    def __init__(self, starter: Launcher, logs: Path, journal: Journal, events: ProcessEvents) -> None:
        self._starter = starter
        self._logs = logs
        self._journal = journal
        self._events = events
        self._numbers: dict[str, int] = {}
        self._processes: dict[str, WorkerProcess] = {}
        self._lifelines: dict[str, DeathWatch] = {}
        self._announced: dict[str, int] = {}
        self._ended_by_us: set[str] = set()
        """Workers to which this agent has sent SIGKILL while they lived."""
        self._dead: set[str] = set()
        """Workers whose end has begun."""
        self._starved: dict[str, str] = {}
        """What had no memory left for a worker whose end has begun, or "": the kernel counts before it kills."""
        self._memory = MemoryKills()
        self._look: asyncio.TimerHandle | None = None
        self._exits = asyncio.Event()

    def __contains__(self, worker_id: str) -> bool:
        """Whether the worker's process has not ended."""
        return worker_id in self._processes

    def start(self, number: int, worker_id: str, settings: Mapping[str, str], *, restarted: bool) -> None:
        """Start a worker. settings: its environment variables."""
        if self._look is None:
            self._look_at_memory()
        line = DeathWatch()

        def started(worker: WorkerProcess, cold: str) -> None:
            self._employ(number, worker_id, worker, line)
            self._journal.write(
                "worker_started",
                worker_id=worker_id,
                pid=worker.pid,
                restarted=restarted,
                start="cold" if cold else "forked",
                because=cold,
            )
            self._events.on_started(number, worker_id, worker.pid)

        def failed(because: str) -> None:
            line.close()
            self._events.on_not_started(number, because)

        self._starter.start(
            Start(
                settings={**settings, death_watch.DEATH_WATCH_VARIABLE: line.path},
                log=self._log(worker_id),
                on_line=lambda text: self._events.on_line(worker_id, text),
                on_exit=lambda status: self._exited(number, worker_id, status),
                started=started,
                failed=failed,
            )
        )

    def announced(self, worker_id: str, pid: int) -> None:
        """The worker has announced itself, so by now it holds its lifeline, if it ever does."""
        self._announced[worker_id] = pid
        loop = asyncio.get_running_loop()

        def on_death() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nothing is left to do
                loop.call_soon_threadsafe(self._dying, worker_id)

        self._lifelines[worker_id].watch(on_death)

    def signal(self, worker_id: str, number: signal.Signals) -> None:
        if worker_id in self._processes:
            if number == signal.SIGKILL and worker_id not in self._dead:
                self._ended_by_us.add(worker_id)
            self._processes[worker_id].signal(number)

    def kill_all(self) -> None:
        for worker_id in self._processes:
            self.signal(worker_id, signal.SIGKILL)

    def facts(self, worker_id: str) -> Facts | None:
        """The worker's facts from the kernel; None if its process is gone."""
        return worker_process.facts(self._announced.get(worker_id, 0))

    def show_stacks(self, worker_id: str, then: Callable[[], None] = lambda: None) -> None:
        """Have a worker that is given up write the stacks of its threads to its log, also if C code holds the
        interpreter. then: called STACKS_S later, or at once if the worker cannot."""
        if worker_id in self._processes and stack_dump.ask(self._processes[worker_id].pid):
            self._journal.write("stacks_asked", worker_id=worker_id)
            asyncio.get_running_loop().call_later(STACKS_S, then)
        else:
            then()

    async def end(self) -> None:
        """Start no worker any more, and wait for the end of all workers."""
        self._starter.close()
        if self._look is not None:
            self._look.cancel()
        self.kill_all()
        while self._processes:
            self._exits.clear()
            await self._exits.wait()

    def _look_at_memory(self) -> None:
        """Read the kernel's counters every SOON_S seconds: a count of long ago must not explain a kill of now."""
        self._memory.note()
        self._look = asyncio.get_running_loop().call_later(SOON_S, self._look_at_memory)

    def _log(self, worker_id: str) -> Path:
        return self._logs / f"{worker_id}.log"

    def _employ(self, number: int, worker_id: str, worker: WorkerProcess, line: DeathWatch) -> None:
        self._numbers[worker_id] = number
        self._lifelines[worker_id] = line
        self._processes[worker_id] = worker

    def _dying(self, worker_id: str) -> None:
        """Report a dying worker before its pidfd is ready; later the worker is reaped and replaced."""
        if (worker := self._processes.get(worker_id)) is not None:
            status = worker_process.ending_status(worker.pid)
            starved = self._starved_by(worker_id, status)
            self._dead.add(worker_id)
            because = describe(status)
            self._journal.write("worker_dying", worker_id=worker_id, pid=worker.pid, because=because)
            self._events.on_dying(worker_id, status, starved)

    def _exited(self, number: int, worker_id: str, status: int) -> None:
        worker = self._processes.pop(worker_id)
        self._lifelines.pop(worker_id).close()
        del self._numbers[worker_id]
        pid, because = self._announced.pop(worker_id, worker.pid), describe(status)
        if want := self._starved_by(worker_id, status):
            # With --restart it was a script: what that had is not known here.
            peak = {} if self._starter.restarts else {"peak_bytes": worker.peak_bytes}
            self._journal.write("worker_out_of_memory", worker_id=worker_id, pid=pid, because=want, **peak)
        self._ended_by_us.discard(worker_id)
        self._dead.discard(worker_id)
        self._starved.pop(worker_id, None)
        self._journal.write("worker_exited", worker_id=worker_id, pid=pid, because=because)
        self._exits.set()
        self._events.on_exit(number, worker_id, status, worker.last_words, want)

    def _starved_by(self, worker_id: str, status: int) -> str:
        if status != -signal.SIGKILL or worker_id in self._ended_by_us:
            return ""
        if not self._starved.get(worker_id):
            self._starved[worker_id] = self._memory.take()
        return self._starved[worker_id]
