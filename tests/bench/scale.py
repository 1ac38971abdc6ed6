"""Measures what a leader costs by the size of its job: a fleet of agents without machines, and a leader in earnest.

    python -m tests.bench.scale [--sizes 100,1000,5000] [--machine 1000,10000,100000] [--write]

etcd, the replicas of the rendezvous (`python -m elastic.rendezvous`) and the agents' streams are the product's, on
loopback; workers are words only (tests/bench/fleet.py). Per size:

    form      from the start of all agents until the last has been told of the first generation
    loss      one worker is killed: from its agent's word until the last survivor has been told to leave the ring
    shrink    from the same word until the last survivor has been told of the generation without it
    resign    SIGTERM to the leading replica: until another one leads, and until it knows all agents again
    idle      the leader's use of a processor while all train and beat
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic import codec
from elastic.config import JobSpec
from elastic.election import LEASE_S
from elastic.embedded import EmbeddedEtcd
from tests.bench import report
from tests.bench.curves import Curve, drawing
from tests.bench.machine import Drill, Part
from tests.bench.report import Row

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "performance.md"
PLOT = ROOT / "docs" / "images" / "scale.svg"
MARKERS = ("<!-- scale:begin -->", "<!-- scale:end -->")
PATIENCE_S = 240.0
SETTLE_S = 3.0
IDLE_S = 5.0
SIZES = (100, 300, 1000, 2500, 5000)
MACHINE_SIZES = (1000, 10_000, 100_000)
PROCESSES = 2
"""In which the agents are; the machine has to have time for the leader too."""

LOSSES = 3


@dataclass(slots=True)
class Figures:
    """Of one size; of several losses the median."""

    agents: int
    form_s: float = 0.0
    loss_ms: float = 0.0
    shrink_ms: float = 0.0
    etcd_writes: int = 0
    form_down: float = 0.0
    form_orders: float = 0.0
    loss_down: float = 0.0
    loss_up: float = 0.0
    loss_orders: float = 0.0
    loss_words: float = 0.0
    resign_ms: float = 0.0
    adopt_s: float = 0.0
    resign_down: float = 0.0
    form_cpu_s: float = 0.0
    loss_cpu_ms: float = 0.0
    idle_percent: float = 0.0
    memory_mb: float = 0.0


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

    def command(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())

    async def hear(self, event: str) -> dict[str, Any]:
        """The next one of that name; those before it are dropped."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for number, told in enumerate(self.told):
                    if told["event"] == event:
                        del self.told[: number + 1]
                        return told
                self.news.clear()
                if self.process.returncode is not None:
                    raise AssertionError(f"the agents ended with {self.process.returncode}")
                await self.news.wait()


class Stage:
    """A job of so many agents: its directory, its replicas, its agents."""

    def __init__(self, directory: Path, etcd: EmbeddedEtcd, size: int) -> None:
        self.spec = JobSpec(name=f"scale-{size}", command=("train",), workers=size, min_workers=1)
        self.dir = directory
        (directory / "job.json").write_bytes(codec.job_to_json(self.spec))
        self._etcd = etcd
        self.replicas: list[subprocess.Popen[bytes]] = []
        self.agents: list[Agents] = []
        self._listening: list[asyncio.Task[None]] = []

    def replica(self) -> subprocess.Popen[bytes]:
        where = ("--etcd", self._etcd.endpoint, "--job-dir", str(self.dir))
        command = [sys.executable, "-m", "elastic.rendezvous", *where]
        process = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", "--", *command], cwd=ROOT)
        self.replicas.append(process)
        return process

    async def populate(self) -> None:
        each = -(-self.spec.workers // PROCESSES)
        for first in range(0, self.spec.workers, each):
            count = min(each, self.spec.workers - first)
            which = ("--job-dir", str(self.dir), "--first", str(first), "--count", str(count))
            process = await asyncio.create_subprocess_exec(
                *("setpriv", "--pdeathsig", "KILL", "--", sys.executable, "-m", "tests.bench.fleet", *which),
                cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
            agents = Agents(process, [f"n{number:05}.0.0" for number in range(first, first + count)])
            self.agents.append(agents)
            self._listening.append(asyncio.create_task(agents.listen()))
        await self.all_hear("ready")

    async def all_hear(self, event: str) -> int:
        """When the last of all agents had, in ns."""
        told = [await agents.hear(event) for agents in self.agents]
        return int(max(one.get("at_ns", 0) for one in told))

    async def counts(self) -> dict[str, int]:
        """Messages and bytes of all agents since they began."""
        for agents in self.agents:
            agents.command("count")
        told = [await agents.hear("counts") for agents in self.agents]
        return {name: sum(one[name] for one in told) for name in ("up", "down", "orders", "words")}

    def events(self, name: str) -> list[dict[str, Any]]:
        """Of the replicas' journals."""
        paths = sorted((self.dir / "journal").glob("rendezvous-*.jsonl"))
        lines = [line for path in paths for line in path.read_text().splitlines() if f'"{name}"' in line]
        return [line for line in map(json.loads, lines) if line["event"] == name]

    async def event(self, name: str, number: int, **fields: object) -> dict[str, Any]:
        """The number-th of that name with these fields, once it is there."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                found = [one for one in self.events(name) if fields.items() <= one.items()]
                if len(found) > number:
                    return found[number]
                await asyncio.sleep(0.02)

    async def close(self) -> None:
        for task in self._listening:
            task.cancel()
        for agents in self.agents:
            agents.process.kill()
            await agents.process.wait()
        for process in self.replicas:
            process.kill()
            process.wait()


@asynccontextmanager
async def stage(etcd: EmbeddedEtcd, size: int) -> AsyncIterator[Stage]:
    with tempfile.TemporaryDirectory(prefix="elastic-scale-") as directory:
        one = Stage(Path(directory), etcd, size)
        try:
            yield one
        finally:
            await one.close()


async def measure(etcd: EmbeddedEtcd, size: int) -> Figures:
    figures = Figures(size)
    async with stage(etcd, size) as job:
        leader = job.replica()
        await job.event("leading", 0)
        await job.populate()
        await _form(job, leader.pid, figures)
        await asyncio.sleep(SETTLE_S)
        await _lose(job, leader.pid, etcd, figures)
        used_s = cpu_s(leader.pid)
        await asyncio.sleep(IDLE_S)
        figures.idle_percent = 100 * (cpu_s(leader.pid) - used_s) / IDLE_S
        figures.memory_mb = peak_mb(leader.pid)
        await _resign(job, leader, figures)
    return figures


async def _form(job: Stage, leader: int, figures: Figures) -> None:
    used_s, began_ns = cpu_s(leader), time.monotonic_ns()
    for agents in job.agents:
        agents.command("go")
    figures.form_s = (await job.all_hear("generation 1") - began_ns) / 1e9
    await job.event("running", 0)
    figures.form_cpu_s = cpu_s(leader) - used_s
    counts = await job.counts()
    figures.form_down, figures.form_orders = counts["down"] / figures.agents, counts["orders"] / figures.agents


async def _lose(job: Stage, leader: int, etcd: EmbeddedEtcd, figures: Figures) -> None:
    told: list[dict[str, float]] = []
    for number in range(LOSSES):
        worker = job.agents[number % len(job.agents)].workers[7 + 11 * number]
        before, used_s, writes = await job.counts(), cpu_s(leader), revision(etcd)
        job.agents[number % len(job.agents)].command(f"lose {worker}")
        lost_ns = (await job.agents[number % len(job.agents)].hear("lost"))["at_ns"]
        quiesced_ns = await job.all_hear("quiesce")
        shrunk_ns = await job.all_hear(f"generation {number + 2}")
        await job.event("running", number + 1)
        after = await job.counts()
        told.append(
            {
                "loss_ms": (quiesced_ns - lost_ns) / 1e6,
                "shrink_ms": (shrunk_ns - lost_ns) / 1e6,
                "loss_cpu_ms": 1000 * (cpu_s(leader) - used_s),
                "etcd_writes": revision(etcd) - writes,
                "loss_down": (after["down"] - before["down"]) / figures.agents,
                "loss_orders": (after["orders"] - before["orders"]) / figures.agents,
                "loss_up": (after["up"] - before["up"]) / figures.agents,
                "loss_words": (after["words"] - before["words"]) / figures.agents,
            }
        )
        await asyncio.sleep(1.0)
    for name in told[0]:
        setattr(figures, name, sorted(one[name] for one in told)[len(told) // 2])
    figures.etcd_writes = int(max(one["etcd_writes"] for one in told))


async def _resign(job: Stage, leader: subprocess.Popen[bytes], figures: Figures) -> None:
    job.replica()
    await job.event("listening", 1)
    await asyncio.sleep(1.0)
    before, terms = await job.counts(), len(job.events("leading"))
    began_ns = time.monotonic_ns()
    leader.send_signal(signal.SIGTERM)
    led = await job.event("leading", terms)
    figures.resign_ms = (led["t_mono_ns"] - began_ns) / 1e6
    # All that live are told of the generation in which they are, and only after that anything else.
    adopted_ns = await job.all_hear(f"generation {LOSSES + 1}")
    figures.adopt_s = (adopted_ns - began_ns) / 1e9
    figures.resign_down = ((await job.counts())["down"] - before["down"]) / figures.agents


def revision(etcd: EmbeddedEtcd) -> int:
    """Of the whole store: it grows by one with every transaction that writes."""
    with etcd.connect() as store:
        return store.prefix("/elastic/none/", timeout_s=10.0).revision


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.scale", description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="agents, with commas (default %(default)s)")
    parser.add_argument(
        "--machine",
        default=",".join(map(str, MACHINE_SIZES)),
        help="members of the machine alone (default %(default)s)",
    )
    parser.add_argument("--write", action="store_true", help="put table and plot into docs/")
    options = parser.parse_args()
    sizes, members = ([int(size) for size in text.split(",") if size] for text in (options.sizes, options.machine))
    if options.write:
        report.around_section(PAGE, MARKERS)  # that it can be written is known before the minutes of measuring
    alone: dict[int, Sequence[Part]] = {}
    for size in members:
        alone[size] = Drill(size).run()
        print(f"machine of {size}: " + ", ".join(f"{p.name} {p.per_s:.0f}/s" for p in alone[size]), flush=True)
    found: list[Figures] = []
    with EmbeddedEtcd() as etcd:
        for size in sizes:
            found.append(asyncio.run(measure(etcd, size)))
            print(found[-1], flush=True)
    rows = table(found, alone)
    print(report.table(rows))
    if options.write:
        command = f"python -m tests.bench.scale --sizes {options.sizes} --machine {options.machine} --write"
        notes = [NOTE]
        report.write_section(PAGE, report.section(command, report.machine(), rows, notes), MARKERS)
        PLOT.write_text(plot(found) + "\n", encoding="utf-8")
    chosen = min(found, key=lambda one: abs(one.agents - 1000))
    print(
        f"scale: agents={chosen.agents} form_s={chosen.form_s:.2f} loss_ms={chosen.loss_ms:.0f} "
        f"etcd_writes={chosen.etcd_writes}"
    )
    return 1 if report.missed(rows) else 0


NOTE = "Leader, etcd and all agents share the machine's cores; on machines of their own only the leader's part remains."


def table(found: Sequence[Figures], alone: dict[int, Sequence[Part]]) -> list[Row]:
    """A row per figure of each size, with the targets of 1000 and 5000 agents."""
    rows = []
    for one in found:
        at = f"{one.agents} agents"
        rows += [
            Row(f"{at}: formed", f"{one.form_s:.2f} s", target=_form_target(one)),
            Row(f"{at}: a loss announced to all", f"{one.loss_ms:.0f} ms", target=_loss_target(one)),
            Row(f"{at}: the generation without it known to all", f"{one.shrink_ms:.0f} ms"),
            Row(
                f"{at}: etcd writes a generation",
                f"{one.etcd_writes}",
                target=report.target(one.etcd_writes <= 3, "<= 3"),
            ),
            Row(f"{at}: bytes to an agent to form", f"{one.form_down:.0f}", f"{one.form_orders:.1f} messages"),
            Row(f"{at}: bytes to an agent for a loss", f"{one.loss_down:.0f}", f"{one.loss_orders:.1f} messages"),
            Row(f"{at}: bytes from an agent for a loss", f"{one.loss_up:.0f}", f"{one.loss_words:.1f} messages"),
            Row(f"{at}: leader resigned, next one leads", f"{one.resign_ms:.0f} ms", target=_resign_target(one)),
            Row(f"{at}: and has told all agents", f"{one.adopt_s:.2f} s", f"{one.resign_down:.0f} bytes an agent"),
            Row(f"{at}: leader's CPU time to form, for a loss", f"{one.form_cpu_s:.2f} s, {one.loss_cpu_ms:.0f} ms"),
            Row(f"{at}: leader while all train", f"{one.idle_percent:.0f} % of a core", f"{one.memory_mb:.0f} MiB"),
        ]
    if len(found) > 1:
        least, most = (pick(one.loss_down for one in found) for pick in (min, max))
        even = report.target(most <= 1.2 * least, "independent of size")
        rows.append(Row("bytes to an agent for a loss, least and most", f"{least:.0f}, {most:.0f}", target=even))
    for members, parts in alone.items():
        decisions, seconds = sum(part.decisions for part in parts), sum(part.seconds for part in parts)
        slowest = min((part for part in parts if part.decisions > 1), key=lambda part: part.per_s)
        spread = f"slowest: {slowest.name}, {slowest.per_s:.0f}/s"
        rows.append(Row(f"the machine alone, {members} members", f"{decisions / seconds:.0f} decisions/s", spread))
    return rows


def plot(found: Sequence[Figures]) -> str:
    """Of sizes in ascending order."""

    def curve(name: str, cost: Callable[[Figures], float]) -> Curve:
        return Curve(name, [(one.agents, cost(one)) for one in found if cost(one) > 0])

    times = [
        curve("formed", lambda one: 1000 * one.form_s),
        curve("loss announced", lambda one: one.loss_ms),
        curve("loss, new generation", lambda one: one.shrink_ms),
        curve("leader's CPU, loss", lambda one: one.loss_cpu_ms),
    ]
    sent = [
        curve("to form, to an agent", lambda one: one.form_down),
        curve("loss, to an agent", lambda one: one.loss_down),
        curve("loss, from an agent", lambda one: one.loss_up),
        curve("next leader, to an agent", lambda one: one.resign_down),
    ]
    return drawing([("milliseconds", times), ("bytes", sent)], "cost against the number of agents")


def _form_target(one: Figures) -> str:
    if one.agents == 5000:
        return report.target(one.form_s + one.shrink_ms / 1000 < 10.0, "with a loss < 10 s")
    return report.target(one.form_s < 2.0, "< 2 s") if one.agents == 1000 else ""


def _loss_target(one: Figures) -> str:
    return report.target(one.loss_ms < 500.0, "< 500 ms") if one.agents == 1000 else ""


def _resign_target(one: Figures) -> str:
    return report.target(one.resign_ms < 1000 * LEASE_S, f"before a lease of {LEASE_S:g} s is over")


if __name__ == "__main__":
    sys.exit(main())
