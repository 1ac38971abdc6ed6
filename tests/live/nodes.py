"""What of an agent starts workers, without the rest of an agent."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from elastic.agent.process import worker_process
from elastic.agent.process.launcher import Launcher, Start
from elastic.agent.process.worker_process import WorkerProcess
from elastic.config import JobSpec
from elastic.records.journal import Journal, read

PATIENCE_S = 100.0


class Worker:
    """One that was started: how, its lines, and how it ended."""

    def __init__(self, starter: Launcher, log: Path, **settings: str) -> None:
        loop = asyncio.get_running_loop()
        self.log = log
        self.cold = ""
        self.lines: list[bytes] = []
        self.process: asyncio.Future[WorkerProcess] = loop.create_future()
        self.spoke = asyncio.Event()
        self.status: asyncio.Future[int] = loop.create_future()
        starter.start(
            Start(
                settings=settings,
                log=log,
                on_line=self.on_line,
                on_exit=self.status.set_result,
                started=self.started,
                failed=lambda because: self.process.set_exception(AssertionError(because)),
            )
        )

    def on_line(self, line: bytes) -> None:
        self.lines.append(line)
        self.spoke.set()

    def started(self, worker: WorkerProcess, cold: str) -> None:
        self.cold = cold
        self.process.set_result(worker)


class Node:
    """What of an agent starts workers, with a journal. Everything runs on the loop of the fixture."""

    def __init__(self, home: Path, command: tuple[str, ...], fork: bool = True, ranks: int = 0) -> None:
        self.home = home
        self.journal_path = home / "journal.jsonl"
        self.spec = JobSpec(name="job", command=command, workers=2, fork=fork, ranks=ranks)
        self.journal = Journal(self.journal_path, "job", "agent-a", "a")
        self.starter = Launcher(self.spec, home, "a", self.journal)
        self.started = 0

    def start(self, **settings: str) -> Worker:
        self.started += 1
        return Worker(self.starter, self.home / f"{self.started}.log", **settings)

    async def ended(self, **settings: str) -> Worker:
        worker = self.start(**settings)
        await asyncio.wait_for(asyncio.shield(worker.process), PATIENCE_S)
        await asyncio.wait_for(worker.status, PATIENCE_S)
        return worker

    def events(self, event: str) -> list[dict[str, Any]]:
        lines = read(self.journal_path) if self.journal_path.exists() else []
        return [line for line in lines if line["event"] == event]

    async def await_nurseries(self, count: int) -> int:
        """The pid of the newest, once so many have been ready."""
        async with asyncio.timeout(PATIENCE_S):
            while len(ready := self.events("fork_server_ready")) < count:
                await asyncio.sleep(0.01)
        return int(ready[-1]["pid"])

    async def close(self) -> None:
        self.starter.close()
        async with asyncio.timeout(PATIENCE_S):
            while any(_lives(line["pid"]) for line in self.events("fork_server_ready")):
                await asyncio.sleep(0.01)
        self.journal.close()


def _lives(pid: int) -> bool:
    return (seen := worker_process.facts(pid)) is not None and seen.state != "Z"
