"""An agent finds the leader of its job among replicas, and hears of the end also when it comes late."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from elastic.agent.context import AgentContext
from elastic.agent.leader_session import Ended, LeaderSession
from elastic.agent.rare_beats import beats_between, patience
from elastic.agent.standing_words import StandingWords
from elastic.config import JobSpec
from elastic.protocol.messages import (
    Failed,
    Generation,
    Kind,
    Member,
    Order,
    Plan,
    Progress,
    Report,
    RingUp,
    Word,
    WorkerDead,
)
from elastic.records.journal import Journal, read
from elastic.rendezvous.leader_stream import leader_options
from elastic.rendezvous.reach import Reach
from elastic.rendezvous.service import SERVER_OPTIONS, JobEntry, RendezvousService
from elastic.wire import elastic_pb2 as pb
from elastic.wire.services import RendezvousStub, add_to_server

PATIENCE_S = 30.0


class Attendant:
    """An agent without workers."""

    def __init__(self) -> None:
        self.ended: list[Ended] = []

    def on_leader(self) -> None: ...
    def on_order(self, to: list[str], order: Order) -> None: ...
    def on_orphaned(self, term: int) -> None: ...
    def on_drain(self, left_s: float, because: str) -> None: ...
    def on_drain_over(self) -> None: ...
    def on_worker_signal(self, worker_id: str, *, kill: bool) -> None: ...

    def on_end(self, ended: Ended) -> None:
        self.ended.append(ended)


async def replica(lead: JobEntry | None) -> tuple[grpc.aio.Server, str]:
    """One that has this job, or none."""
    service = RendezvousService()
    if lead is not None:
        service.leads["job"] = lead
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_to_server("Rendezvous", service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


async def attend(journal: Journal, home: Path, replicas: Sequence[str]) -> list[Ended]:
    attendant = Attendant()
    spec = JobSpec(name="job", command=("train",), workers=1)
    attendance = LeaderSession(
        AgentContext(spec, home, "a", 1, Reach(replicas=tuple(replicas)), journal), attendant, StandingWords()
    )
    await asyncio.wait_for(attendance.always(), PATIENCE_S)
    return attendant.ended


def test_an_agent_that_comes_late_is_told_how_the_job_ended_by_whom_the_others_name(tmp_path: Path) -> None:
    async def story() -> list[Ended]:
        with Journal(tmp_path / "journal.jsonl", "job", "agent-a", "a") as journal:
            knows = JobEntry(journal, ended=pb.End(term=7, exit_code=6, because="drained"))
            last, knowing = await replica(knows)
            named, names = await replica(JobEntry(journal, address=knowing))
            other, without = await replica(None)
            try:
                return await attend(journal, tmp_path, ["127.0.0.1:1", without, names])
            finally:
                for server in (last, named, other):
                    await server.stop(grace=0)

    assert asyncio.run(story()) == [Ended(6, "drained")]
    attending = [line["term"] for line in read(tmp_path / "journal.jsonl") if line["event"] == "attending"]
    assert attending == [7]


def test_files_that_cannot_be_read_at_the_moment_are_read_again(tmp_path: Path) -> None:
    """As on a network file system whose server is away."""
    unreadable = [tmp_path / name for name in ("rendezvous.json", "result.json", "token")]
    for path in unreadable:
        path.mkdir()

    async def said(because: str) -> None:
        journal = tmp_path / "journal.jsonl"
        while not (journal.exists() and any(because in line.get("because", "") for line in read(journal))):
            await asyncio.sleep(0.01)

    async def story() -> list[Ended]:
        with Journal(tmp_path / "journal.jsonl", "job", "agent-a", "a") as journal:
            server, address = await replica(JobEntry(journal, ended=pb.End(term=7, exit_code=6, because="drained")))
            attending = asyncio.create_task(attend(journal, tmp_path, []))
            try:
                await asyncio.wait_for(said("no rendezvous has written its address yet"), PATIENCE_S)
                unreadable[0].rmdir()
                unreadable[0].write_text(json.dumps({"address": address}))
                await asyncio.wait_for(said(str(unreadable[2])), PATIENCE_S)
                unreadable[2].rmdir()
                return await attending
            finally:
                await server.stop(grace=0)

    assert asyncio.run(story()) == [Ended(6, "drained")]


@pytest.mark.parametrize(
    ("workers", "slots", "every"), [(4, 1, 1), (500, 1, 1), (1000, 8, 1), (1000, 1, 4), (5000, 1, 20)]
)
def test_agents_of_a_large_job_beat_less_often_and_are_given_the_time(workers: int, slots: int, every: int) -> None:
    spec = JobSpec(name="job", command=("train",), workers=workers)
    assert beats_between(spec, slots) == every
    assert every * spec.timing.beat_s * 3 <= spec.timing.scaled(workers).suspect_s


@pytest.mark.parametrize(("workers", "connect_s"), [(4, 1), (1000, 2), (5000, 3), (50_000, 3)])
def test_agents_of_a_large_job_give_a_replica_longer_to_accept_and_are_not_expelled_for_it(
    workers: int, connect_s: int
) -> None:
    spec = JobSpec(name="job", command=("train",), workers=workers)
    options = dict(leader_options(patience(beats_between(spec, 1))))
    assert options["grpc.min_reconnect_backoff_ms"] == 1000 * connect_s
    assert connect_s <= spec.timing.scaled(workers).fence_grace_s / 3


class Slow:
    """A leader that wants to hear its agent with every fourth beat, and with each one later."""

    def __init__(self, beat_s: float) -> None:
        self._beat_s = beat_s
        self.heard: asyncio.Queue[str] = asyncio.Queue()
        self.hurry = asyncio.Event()

    async def Attend(self, words: AsyncIterator[pb.AgentWord], context: Any) -> None:
        listening = asyncio.create_task(self._listen(words))
        for beats in (4, 1):
            welcome = pb.Welcome(term=1, beat_ms=round(1000 * beats * self._beat_s))
            await context.write(pb.LeaderOrder(welcome=welcome))
            self.heard.put_nowait(f"told {beats}")
            await self.hurry.wait()
        await listening

    async def _listen(self, words: AsyncIterator[pb.AgentWord]) -> None:
        async for word in words:
            self.heard.put_nowait(str(word.WhichOneof("content")))


async def test_an_agent_speaks_as_often_as_its_leader_says_and_as_it_says_later(tmp_path: Path) -> None:
    spec = JobSpec(name="job", command=("train",), workers=1)
    leader = Slow(spec.timing.beat_s)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_to_server("Rendezvous", leader, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    with Journal(tmp_path / "journal.jsonl", "job", "agent-a", "a") as journal:
        reach = Reach(replicas=(address,))
        here = AgentContext(spec, tmp_path, "a", 1, reach, journal)
        attendance = LeaderSession(here, Attendant(), StandingWords())
        attending = asyncio.create_task(attendance.always())
        async with asyncio.timeout(PATIENCE_S):
            assert {await leader.heard.get(), await leader.heard.get()} == {"hello", "told 4"}
            while attendance.term == 0:  # told, and not heard yet
                await asyncio.sleep(0.01)
            for _ in range(8):
                attendance.beat()
            assert [await leader.heard.get() for _ in range(2)] == ["beat", "beat"]
            leader.hurry.set()
            assert await leader.heard.get() == "told 1"
            beats = 0
            while leader.heard.qsize() < 3:  # from the moment in which it has heard of it, one with each
                attendance.beat()
                beats += 1
                await asyncio.sleep(0.01)
            before = leader.heard.qsize()
            for _ in range(5):
                attendance.beat()
            for _ in range(before + 5):
                assert await leader.heard.get() == "beat"
        attending.cancel()
        await asyncio.gather(attending, return_exceptions=True)
    await server.stop(grace=0)


class Hearing:
    """A leader of many agents, each of which speaks with every fourth beat."""

    def __init__(self, beat_s: float, *, infers: bool) -> None:
        self._welcome = pb.Welcome(term=1, beat_ms=round(4000 * beat_s), infers_rings=infers)
        self.heard: asyncio.Queue[str] = asyncio.Queue()

    async def Attend(self, words: AsyncIterator[pb.AgentWord], context: Any) -> None:
        await context.write(pb.LeaderOrder(welcome=self._welcome))
        async for word in words:
            if word.WhichOneof("content") != "hello":
                self.heard.put_nowait(word.word.WhichOneof("content") or str(word.WhichOneof("content")))


@pytest.mark.parametrize("infers", [True, False])
async def test_an_agent_of_a_large_job_says_at_its_beat_what_can_wait(tmp_path: Path, infers: bool) -> None:
    spec = JobSpec(name="job", command=("train",), workers=1)
    member = Member("a.0.0", "a", "127.0.0.1", 5000, 0)
    leader = Hearing(spec.timing.beat_s, infers=infers)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_to_server("Rendezvous", leader, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    with Journal(tmp_path / "journal.jsonl", "job", "agent-a", "a") as journal:
        standing = StandingWords()
        standing.published(Generation(2, Kind.LOSS, 2, (member,), Plan(op=7), "a loss"))
        reach = Reach(replicas=(address,))
        session = LeaderSession(AgentContext(spec, tmp_path, "a", 1, reach, journal), Attendant(), standing)
        attending = asyncio.create_task(session.always())

        async def heard(*said: Word, beats: int = 0) -> list[str]:
            """What the leader has heard by the end of these words, which a Failed ends."""
            for word in said:
                session.say(word)
            for _ in range(beats):
                session.beat()
            session.say(Failed("b.0.0", 2, "x.py:1", "ValueError"))
            told: list[str] = []
            while "failed" not in told:
                told.append(await leader.heard.get())
            return told[:-1]

        async with asyncio.timeout(PATIENCE_S):
            while session.term == 0:
                await asyncio.sleep(0.01)
            up, before, after = RingUp("a.0.0", 2), Progress("a.0.0", 2, 7), Progress("a.0.0", 2, 8)
            report = Report("a.0.0", 1, 2, 2, has_state=True, reduced=7)
            assert await heard(up, before) == [], "they wait"
            assert await heard(report) == ["report"], "and are not sent before what cannot wait"
            assert await heard(beats=4) == ["progress"], "a ring that was left is not up any more"
            assert await heard(up, before, beats=4) == ["ring_up", "progress"]
            assert await heard(up, after, beats=4) == (["progress"] if infers else ["ring_up", "progress"])
            assert await heard(up, after, WorkerDead("a.0.0", "killed")) == ["ring_up", "progress", "worker_dead"]
        attending.cancel()
        await asyncio.gather(attending, return_exceptions=True)
    await server.stop(grace=0)


def test_nobody_is_turned_away_where_thousands_come_at_once(tmp_path: Path) -> None:
    callers = 2000

    async def story() -> list[str]:
        with Journal(tmp_path / "journal.jsonl", "job", "rendezvous", "a") as journal:
            server, address = await replica(JobEntry(journal, address="elsewhere"))
            try:
                with grpc.insecure_channel(address) as channel:
                    # Nobody looks at them before all have called: this thread is the server's too.
                    stub = RendezvousStub(channel)
                    calls = [stub.Status.future(pb.StatusRequest(job="job")) for _ in range(callers)]
                    return await asyncio.to_thread(lambda: [call.result(PATIENCE_S).leader for call in calls])
            finally:
                await server.stop(grace=0)

    assert asyncio.run(story()) == ["elsewhere"] * callers
