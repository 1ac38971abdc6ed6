"""Measures what a leader costs by the size of its job: a fleet of agents without machines, and a leader in earnest.

    python -m tests.bench.scale [--sizes 100,1000,5000] [--machine 1000,10000,100000] [--write]

etcd, the replicas of the rendezvous (`python -m elastic.rendezvous`) and the agents' streams are the product's, on
loopback; workers are words only (tests/bench/fleet.py). Per size:

    form      from the start of all agents until the last has been told of the first generation
    loss      one worker is killed: from its agent's word until the last survivor has been told to leave the ring
    shrink    from the same word until the last survivor has been told of the generation without it
    resign    SIGTERM to the leading replica: until another one leads, and until it has heard of all members
    idle      the leader's use of a processor while all train and beat

A size that gets stuck is given up after a time, and its figures up to there are kept: exit code 1, as for each target
that is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic.rendezvous.job_replica import settle_down
from elastic.security.channels import limits
from elastic.store.embedded import EmbeddedEtcd
from tests.bench import costs, report
from tests.bench.machine import Drill, Part
from tests.bench.stage import Stage, Stuck, cpu_s, peak_mb, stage

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "performance.md"
IMAGES = ROOT / "docs" / "images"
MARKERS = ("<!-- scale:begin -->", "<!-- scale:end -->")
RUN_S = 440.0
"""For all sizes; what has not begun by then is left out. `make bench-scale` ends within 8 minutes."""

LEAST_S, AGENTS_A_SECOND = 60.0, 50.0
"""How long one size may take: so long, and a second more for so many agents."""

SETTLE_S = 3.0
IDLE_S = 5.0
KNOWN_POLL_S = 0.25
"""Between two questions to a new leader whom it knows; each takes it some 10 ms."""

SIZES = (100, 300, 1000, 2500, 5000)
MACHINE_SIZES = (1000, 3000, 10_000, 30_000, 100_000)
LOSSES = 3


@dataclass(slots=True)
class Figures:
    """Of one size; of several losses the median. NaN: not measured. failed: why not."""

    agents: int
    form_s: float = math.nan
    loss_ms: float = math.nan
    shrink_ms: float = math.nan
    etcd_writes: float = math.nan
    form_down: float = math.nan
    form_orders: float = math.nan
    loss_down: float = math.nan
    loss_up: float = math.nan
    loss_orders: float = math.nan
    loss_words: float = math.nan
    resign_ms: float = math.nan
    adopt_s: float = math.nan
    adopt_cpu_s: float = math.nan
    resign_down: float = math.nan
    form_cpu_s: float = math.nan
    loss_cpu_ms: float = math.nan
    idle_percent: float = math.nan
    memory_mb: float = math.nan
    failed: str = ""


async def measure(etcd: EmbeddedEtcd, size: int, within_s: float = math.inf) -> Figures:
    """within_s: no longer than that, and no longer than such a size may take."""
    figures = Figures(size)
    parts: Sequence[tuple[str, Callable[[Stage, EmbeddedEtcd, Figures], Awaitable[str]]]] = (
        *(("start", _start), ("form", _form), ("lose", _lose), ("idle", _idle), ("resign", _resign)),
    )
    limit_s = min(LEAST_S + size / AGENTS_A_SECOND, within_s)
    async with stage(etcd, size) as job:
        doing = ""
        try:
            async with asyncio.timeout(limit_s):
                for doing, part in parts:
                    began_s = time.monotonic()
                    told = await part(job, etcd, figures)
                    print(f"{size} agents: {doing}: {told} ({time.monotonic() - began_s:.0f} s)", flush=True)
        except TimeoutError:
            figures.failed = f"{doing}: {limit_s:.0f} s were not enough; {job.story()}"
        except Stuck as error:
            figures.failed = f"{doing}: {error}; {job.story()}"
    if figures.failed:
        print(f"{size} agents: STUCK at {figures.failed}", flush=True)
    return figures


async def _start(job: Stage, etcd: EmbeddedEtcd, figures: Figures) -> str:
    """Nobody attends yet: the leader's join window begins when it leads, so it leads last."""
    await job.populate()
    job.replica()
    await job.event("leading")
    return "all are there"


async def _form(job: Stage, etcd: EmbeddedEtcd, figures: Figures) -> str:
    leader = job.replicas[0].pid
    used_s, began_ns = cpu_s(leader), time.monotonic_ns()
    for agents in job.agents:
        agents.command("go")
    figures.form_s = (await job.all_hear("generation 1") - began_ns) / 1e9
    await job.event("running")
    figures.form_cpu_s = cpu_s(leader) - used_s
    counts = await job.counts()
    figures.form_down, figures.form_orders = counts["down"] / figures.agents, counts["orders"] / figures.agents
    await asyncio.sleep(SETTLE_S)
    return f"{figures.form_s:.2f} s"


async def _lose(job: Stage, etcd: EmbeddedEtcd, figures: Figures) -> str:
    leader = job.replicas[0].pid
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
    figures.etcd_writes = max(one["etcd_writes"] for one in told)
    return f"announced after {figures.loss_ms:.0f} ms, the next generation after {figures.shrink_ms:.0f} ms"


async def _idle(job: Stage, etcd: EmbeddedEtcd, figures: Figures) -> str:
    leader = job.replicas[0].pid
    used_s = cpu_s(leader)
    await asyncio.sleep(IDLE_S)
    figures.idle_percent = 100 * (cpu_s(leader) - used_s) / IDLE_S
    figures.memory_mb = peak_mb(leader)
    return f"{figures.idle_percent:.0f} % of a core"


async def _resign(job: Stage, etcd: EmbeddedEtcd, figures: Figures) -> str:
    job.replica()
    await job.event("listening", 1)
    await asyncio.sleep(1.0)
    before, terms = await job.counts(), len(job.journals.of("leading"))
    used_s = cpu_s(job.replicas[1].pid)
    began_ns = time.monotonic_ns()
    job.replicas[0].send_signal(signal.SIGTERM)
    led = await job.event("leading", terms)
    figures.resign_ms = (led["t_mono_ns"] - began_ns) / 1e6
    await job.all_hear(f"leader {led['term']}")
    while not await job.all_known():  # a leader knows the pid of a member once it has heard of it
        await asyncio.sleep(KNOWN_POLL_S)
    figures.adopt_s = (time.monotonic_ns() - began_ns) / 1e9
    figures.adopt_cpu_s = cpu_s(job.replicas[1].pid) - used_s
    figures.resign_down = ((await job.counts())["down"] - before["down"]) / figures.agents
    return f"another one leads after {figures.resign_ms:.0f} ms, and has heard of all after {figures.adopt_s:.1f} s"


def revision(etcd: EmbeddedEtcd) -> int:
    """Of the whole store: it grows by one with every transaction that writes."""
    with etcd.connect() as store:
        return store.prefix("/elastic/none/", timeout_s=10.0).revision


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.scale", description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="agents, with commas (default %(default)s)")
    parser.add_argument(
        "--machine",
        default=",".join(map(str, MACHINE_SIZES)),
        help="members of the machine alone (default %(default)s)",
    )
    parser.add_argument("--write", action="store_true", help="put table and plots into docs/")
    options = parser.parse_args()
    sizes, members = ([int(size) for size in text.split(",") if size] for text in (options.sizes, options.machine))
    if options.write:
        report.around_section(PAGE, MARKERS)  # that it can be written is known before the minutes of measuring
    limits()  # a connection is two files on one machine
    ends_s = time.monotonic() + RUN_S
    found: list[Figures] = []
    alone: dict[int, Sequence[Part]] = {}
    try:
        with EmbeddedEtcd() as etcd:
            for size in sizes:
                found.append(asyncio.run(measure(etcd, size, ends_s - time.monotonic())))
        settle_down()
        for size in members:
            alone[size] = Drill(size).run()
            print(f"machine of {size}: {costs.told(alone[size])}", flush=True)
    except KeyboardInterrupt:
        print("bench-scale: interrupted; nothing is written", file=sys.stderr)
        return 128 + signal.SIGINT
    rows = costs.table(found, alone)
    print(report.table(rows))
    if options.write:
        command = f"python -m tests.bench.scale --sizes {options.sizes} --machine {options.machine} --write"
        report.write_section(PAGE, report.section(command, report.machine(), rows, [NOTE]), MARKERS)
        (IMAGES / "scale.svg").write_text(costs.plot(found) + "\n", encoding="utf-8")
        (IMAGES / "machine.svg").write_text(costs.plot_machine(alone) + "\n", encoding="utf-8")
    for row in (missed := report.missed(rows)):
        print(f"missed: {row.what}: {row.figure}; {row.target}")
    if found:
        chosen = min(found, key=lambda one: abs(one.agents - 1000))
        print(
            f"scale: agents={chosen.agents} form_s={chosen.form_s:.2f} loss_ms={chosen.loss_ms:.0f} "
            f"etcd_writes={chosen.etcd_writes:.0f}"
        )
    return 1 if missed else 0


NOTE = "Leader, etcd and all agents share the machine's cores. On separate machines only the leader's part remains."


if __name__ == "__main__":
    sys.exit(main())
