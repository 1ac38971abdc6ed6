"""A job of so many agents on this machine: its directory, its replicas, the processes that its agents are in."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic.config import JobSpec, Timing
from elastic.rendezvous.operator_client import fetch_status
from elastic.store.embedded import EmbeddedEtcd
from elastic.wire import codec

ROOT = Path(__file__).resolve().parents[2]
PROCESSES = 2
"""In which the agents are; the machine has to have time for the leader too."""

JOIN_S = 600.0
"""Longer than any of it: a job that begins without some of its agents is not what is measured."""

POLL_S = 0.02
STATUS_S = 30.0
TOLD = 6
"""Of the last events so many are told, where something did not happen."""


class Stuck(Exception):
    """What was to happen did not, and why that may be."""


@dataclass(slots=True)
class Agents:
    """A process of them, and what it has told so far."""

    process: asyncio.subprocess.Process
    workers: list[str]
    told: list[dict[str, Any]] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def listen(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            self.told.append(json.loads(line))
            self.news.set()
        await self.process.wait()
        self.news.set()

    def command(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())

    async def hear(self, event: str) -> dict[str, Any]:
        """The next one of that name; those before it are dropped. Raises Stuck if it cannot come any more."""
        while True:
            for number, told in enumerate(self.told):
                if told["event"] == "failed":
                    raise Stuck(f"an agent failed: {told['because']}")
                if told["event"] == event:
                    del self.told[: number + 1]
                    return told
            self.news.clear()
            if self.process.returncode is not None:
                raise Stuck(f"a process of agents ended with {self.process.returncode}")
            await self.news.wait()


class Journals:
    """What the replicas have written so far; each line is read once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[Path, int] = {}
        self.lines: list[dict[str, Any]] = []

    def look(self) -> None:
        for path in sorted(self._directory.glob("rendezvous-*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            self.lines += map(json.loads, whole.splitlines())

    def of(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] == event]

    def last(self) -> str:
        """In a few words."""
        told = [line for line in self.lines if line["event"] not in ("announced", "published")][-TOLD:]
        return "; ".join(f"{line['event']} {line.get('because', '')}"[:120].strip() for line in told) or "nothing"


class Stage:
    """Waits for ever; whoever uses it bounds that."""

    def __init__(self, directory: Path, etcd: EmbeddedEtcd, size: int) -> None:
        timing = Timing(join_window_s=JOIN_S)
        self.spec = JobSpec(name=f"scale-{size}", command=("train",), workers=size, min_workers=1, timing=timing)
        self.dir = directory
        (directory / "job.json").write_bytes(codec.to_json(self.spec))
        self.journals = Journals(directory / "journal")
        self._etcd = etcd
        self.replicas: list[subprocess.Popen[bytes]] = []
        self.agents: list[Agents] = []
        self._listening: list[asyncio.Task[None]] = []

    def replica(self) -> subprocess.Popen[bytes]:
        where = ("--etcd", self._etcd.endpoint, "--job-dir", str(self.dir))
        command = [*_BOUND, "elastic.rendezvous", *where]
        process = subprocess.Popen(command, cwd=ROOT, process_group=0)  # Ctrl-C is for us to handle
        self.replicas.append(process)
        return process

    async def populate(self) -> None:
        each = -(-self.spec.workers // PROCESSES)
        for first in range(0, self.spec.workers, each):
            count = min(each, self.spec.workers - first)
            which = ("--job-dir", str(self.dir), "--first", str(first), "--count", str(count))
            process = await asyncio.create_subprocess_exec(
                *(*_BOUND, "tests.bench.fleet", *which),
                cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0,
            )  # fmt: skip
            agents = Agents(process, [f"n{number:05}.0.0" for number in range(first, first + count)])
            self.agents.append(agents)
            self._listening.append(asyncio.create_task(agents.listen()))
        await self.all_hear("ready")

    async def all_hear(self, event: str) -> int:
        """When the last of all agents had, in ns."""
        told = await asyncio.gather(*(agents.hear(event) for agents in self.agents))
        return int(max(one.get("at_ns", 0) for one in told))

    async def counts(self) -> dict[str, int]:
        """Messages and bytes of all agents since they began."""
        for agents in self.agents:
            agents.command("count")
        told = [await agents.hear("counts") for agents in self.agents]
        return {name: sum(one[name] for one in told) for name in ("up", "down", "orders", "words")}

    async def all_known(self) -> bool:
        """Whether the present leader has heard of every member itself."""
        address = json.loads((self.dir / "rendezvous.json").read_bytes())["address"]
        told: Any = await asyncio.to_thread(fetch_status, address, STATUS_S)
        return all(member["pid"] for member in told["members"])

    async def event(self, name: str, number: int = 0) -> dict[str, Any]:
        """The number-th of that name in the replicas' journals, once it is there."""
        while True:
            self.journals.look()
            if len(found := self.journals.of(name)) > number:
                return found[number]
            for process in self.replicas:
                if process.poll() not in (None, 0, 128 + signal.SIGTERM):
                    raise Stuck(f"a replica ended with {process.returncode}")
            await asyncio.sleep(POLL_S)

    def story(self) -> str:
        """What the replicas did last."""
        self.journals.look()
        return f"the replicas' journals end with: {self.journals.last()}"

    async def close(self) -> None:
        for process in self.replicas:
            process.kill()
            process.wait()
        for agents in self.agents:
            if agents.process.returncode is None:
                agents.process.kill()
            await agents.process.wait()
        for task in self._listening:
            task.cancel()
        await asyncio.gather(*self._listening, return_exceptions=True)


_BOUND = ("setpriv", "--pdeathsig", "KILL", "--", sys.executable, "-m")


@asynccontextmanager
async def stage(etcd: EmbeddedEtcd, size: int) -> AsyncIterator[Stage]:
    with tempfile.TemporaryDirectory(prefix="elastic-scale-") as directory:
        one = Stage(Path(directory), etcd, size)
        try:
            yield one
        finally:
            await one.close()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
