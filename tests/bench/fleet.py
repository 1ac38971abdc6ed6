"""Agents without machines: each has a stream of its own to the leader, and one worker of which only the words exist.

    python -m tests.bench.fleet --job-dir DIR --first 0 --count 250

The stream is the product's own (leader_session.py), on a connection of its own; so are what a new leader is told
(standing_words.py), and beats. A worker answers at once what a real one would: its ring is up, or its report. Agents
of one process read what is the same for all once between them: each would have a machine to itself.

Commands are lines on stdin: `go`, `lose WORKER`, `count`. What happened is told in lines of JSON on stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from elastic.agent import leader_session
from elastic.agent.context import AgentContext
from elastic.agent.leader_session import Ended, LeaderSession
from elastic.agent.standing_words import StandingWords
from elastic.config import JobSpec
from elastic.protocol.messages import (
    Announce,
    Doing,
    Generation,
    Kind,
    Laggard,
    Order,
    Progress,
    Publish,
    Quiesce,
    Report,
    RingUp,
    Share,
    WorkerDead,
)
from elastic.records.files import read_job
from elastic.records.journal import Journal, journal_path
from elastic.rendezvous.reach import Reach
from elastic.wire import broadcast, codec, generation_delta
from elastic.wire import elastic_pb2 as pb
from elastic.wire.generation_delta import Delta
from elastic.wire.services import RendezvousStub

STEP_S = 1.0
"""Training of this fleet makes a step so often; words of it go with the beats."""


class Fleet:
    """Of one process. Tells on stdout when the last of its agents has heard of something."""

    def __init__(self, spec: JobSpec, job_dir: Path, numbers: Iterable[int], journal: Journal) -> None:
        self.spec = spec
        self.agents = {(agent := Lodger(self, job_dir, number, journal)).worker: agent for number in numbers}
        self.up, self.down, self.orders, self.words = 0, 0, 0, 0
        self._missing: dict[str, set[str]] = {}

    async def serve(self) -> None:
        tell("ready", cpu_s=time.process_time())
        attending: list[asyncio.Task[None]] = []
        beating = asyncio.create_task(self._beat())
        try:
            async for line in commands():
                match line.split():
                    case ["go"]:
                        attending = [asyncio.create_task(agent.attendance.always()) for agent in self.agents.values()]
                        for task in attending:
                            task.add_done_callback(_ended)
                    case ["lose", worker] if worker in self.agents:
                        tell("lost", worker=worker, at_ns=time.monotonic_ns())
                        self.agents[worker].lose()
                    case ["count"]:
                        tell("counts", up=self.up, down=self.down, orders=self.orders, words=self.words)
        finally:
            for task in (beating, *attending):
                task.cancel()
            await asyncio.gather(beating, *attending, return_exceptions=True)

    def heard(self, what: str, worker: str) -> None:
        """Say so when all living ones have; those that come late are no news."""
        if what not in self._missing:
            self._missing[what] = {name for name, agent in self.agents.items() if agent.alive}
        self._missing[what].discard(worker)
        if not self._missing[what]:
            tell(what, at_ns=time.monotonic_ns())
            del self._missing[what]

    async def _beat(self) -> None:
        """Spread over the time of a beat, as those of separate machines are."""
        agents = list(self.agents.values())
        slices = [agents[part::10] for part in range(10)]
        for turn in range(10**9):
            await asyncio.sleep(self.spec.timing.beat_s / 10)
            for agent in slices[turn % 10]:
                agent.beat()


class Lodger:
    """One agent and its worker."""

    def __init__(self, fleet: Fleet, job_dir: Path, number: int, journal: Journal) -> None:
        self.fleet, self.number = fleet, number
        self.node = f"n{number:05}"
        self.worker = f"{self.node}.0.0"
        self.alive = True
        self.entered = 0
        self._since_s = time.monotonic()
        self._standing = StandingWords()
        self._standing.heard(Announce(self.worker, self.node, 0, 1 + number, "10.0.0.1", 4000, "torch 2.9"))
        self.attendance = LeaderSession(
            AgentContext(fleet.spec, job_dir, self.node, 1, Reach(), journal), self, self._standing
        )

    def lose(self) -> None:
        self.alive = False
        self.attendance.say(WorkerDead(self.worker, "killed by SIGKILL"))

    def beat(self) -> None:
        """A worker's progress is said with each beat_s; what its session would drop again is not even made here."""
        session = self.attendance
        if self.entered and self.alive and (session._beats._count + 1) % session._beats.every == 0:
            self.attendance.say(
                Progress(self.worker, self.entered, self._steps, self._steps, "a shard", doing=Doing.SHARD)
            )
        self.attendance.beat()

    @property
    def _steps(self) -> int:
        return int((time.monotonic() - self._since_s) / STEP_S) if self.entered else 0

    # ----------------------------------------------------------------------------------------- the stream

    def on_leader(self) -> None:
        self.fleet.heard(f"leader {self.attendance.term}", self.worker)

    def on_order(self, to: list[str], order: Order) -> None:
        if self.worker not in to or not self.alive:
            return
        match order:
            case Publish(_, generation):
                self._enter(generation)
                self.fleet.heard(f"generation {generation.number}", self.worker)
            case Quiesce(_, number, up_to):
                self.attendance.say(self._report(number, up_to))
                self.fleet.heard("quiesce", self.worker)

    def _enter(self, generation: Generation) -> None:
        self._standing.published(generation)
        if generation.number <= self.entered or generation.kind is Kind.PLANNED:
            return
        if generation.member(self.worker) is None:
            raise AssertionError(f"{self.worker} lives and is not in generation {generation.number}")
        self.entered = generation.number
        self.attendance.say(RingUp(self.worker, generation.number))

    def _report(self, number: int, up_to: int) -> Report:
        """In the middle of a step: every second one has computed its shard, the others are about to."""
        mine = (self.number, self.number + 1)
        return Report(
            self.worker, number, up_to, self.entered, has_state=True, reduced=0, units=self.fleet.spec.workers,
            roots=(mine,) if self.number % 2 else (), running=None if self.number % 2 else self.number,
        )  # fmt: skip

    def on_orphaned(self, term: int) -> None:
        raise AssertionError("nobody led for orphan_limit_s")

    def on_drain(self, left_s: float, because: str) -> None: ...
    def on_drain_over(self) -> None: ...
    def on_worker_signal(self, worker_id: str, *, kill: bool) -> None: ...
    def on_end(self, ended: Ended) -> None:
        raise AssertionError(f"the job ended: {ended.because}")


class Counting:
    """In place of the protocol's stub: counts what goes through a stream, in messages and bytes."""

    fleet: Fleet | None = None

    def __init__(self, channel: Any) -> None:
        self._stub = REAL_STUB(channel)

    def Attend(self) -> Any:
        return _CountedCall(self._stub.Attend())


class _CountedCall:
    def __init__(self, call: Any) -> None:
        self._call = call

    async def write(self, word: pb.AgentWord) -> None:
        fleet = Counting.fleet
        assert fleet is not None
        fleet.words += 1
        fleet.up += word.ByteSize()
        await self._call.write(word)

    async def __aiter__(self) -> Any:
        fleet = Counting.fleet
        assert fleet is not None
        async for order in self._call:
            fleet.orders += 1
            fleet.down += order.ByteSize()
            yield order

    def cancel(self) -> None:
        self._call.cancel()


REAL_STUB: Any = RendezvousStub


def read_once() -> None:
    """What is the same for all agents of this process is read for one of them."""
    codec.order_from_bytes = lru_cache(64)(codec.order_from_bytes)
    codec.unpacked = lru_cache(8)(codec.unpacked)
    broadcast.read_delta = lru_cache(8)(broadcast.read_delta)
    plain = generation_delta.applied
    made: dict[tuple[str, str], Generation] = {}

    def applied(
        base: Generation, delta: Delta, shares: Iterable[Share] = (), laggards: Iterable[Laggard] = ()
    ) -> Generation:
        key = (base.digest(), delta.digest)
        if key not in made:
            made.clear()
            made[key] = plain(base, delta)
            made[key].digest(), made[key].ids, made[key].member("")  # as kept for all
        whole = made[key]
        mine = replace(whole, plan=replace(whole.plan, shares=tuple(shares), laggards=tuple(laggards)))
        vars(mine).update({name: value for name, value in vars(whole).items() if name not in vars(mine)})
        return mine

    generation_delta.applied = applied


def _ended(attending: asyncio.Task[None]) -> None:
    """None of them ends while the job goes on."""
    if not attending.cancelled():
        tell("failed", because=repr(attending.exception()))


async def commands() -> Any:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield line.decode()


def tell(event: str, **fields: object) -> None:
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


async def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.fleet", description=__doc__.partition("\n")[0])
    parser.add_argument("--job-dir", type=Path, required=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    options = parser.parse_args()
    gc.disable()  # what collecting garbage of thousands costs would fall upon each of them
    read_once()
    vars(leader_session)["RendezvousStub"] = Counting
    spec, who = read_job(options.job_dir), f"agents-{options.first}"
    with Journal(journal_path(options.job_dir, who), spec.name, who, "bench") as journal:
        numbers = range(options.first, options.first + options.count)
        Counting.fleet = Fleet(spec, options.job_dir, numbers, journal)
        with contextlib.suppress(asyncio.CancelledError):
            await Counting.fleet.serve()
    os._exit(0)  # thousands of channels take long to close, and nothing is left to say


if __name__ == "__main__":
    asyncio.run(main())
