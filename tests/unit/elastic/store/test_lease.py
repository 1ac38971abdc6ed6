"""A leader that is busy keeps its lease, and one that hangs does not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from elastic.config import JobSpec
from elastic.errors import StoreUnavailable
from elastic.protocol.messages import Generation, Kind, Plan
from elastic.records.journal import Journal
from elastic.rendezvous.job_replica import JobReplica
from elastic.rendezvous.leader import AgentSession, JobOrigin
from elastic.rendezvous.service import RendezvousService
from elastic.store import lease as leases
from elastic.store.base import Lease, Listing
from elastic.store.election import LEASE_S, SAFETY, Candidate, Won
from elastic.store.lease import HUNG, LATE, LeaseKeeper
from tests.memory_store import MemoryStore

PATIENCE_S = 30.0


def until(happened: Callable[[], object]) -> None:
    """Holds up the thread that it is called on."""
    ends_s = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < ends_s
        time.sleep(0.01)


def hold(store: MemoryStore, story: Callable[[LeaseKeeper, Candidate], Awaitable[None]], slow_s: float = 0.0) -> None:
    """slow_s: so long ago, by its own clock, was the lease granted."""

    async def told() -> None:
        candidate = Candidate(store, "job", "here", lambda: time.monotonic() - slow_s)
        won = candidate.stand()
        assert isinstance(won, Won)
        async with asyncio.timeout(PATIENCE_S), LeaseKeeper(candidate, won.term) as held:
            await story(held, candidate)

    asyncio.run(told())


def test_an_event_loop_that_is_busy_for_a_while_keeps_the_lead() -> None:
    class Counting(MemoryStore):
        renewed = 0

        def keep_alive(self, lease: Lease, *, timeout_s: float) -> int:
            self.renewed += 1
            return super().keep_alive(lease, timeout_s=timeout_s)

    store = Counting()

    async def story(held: LeaseKeeper, candidate: Candidate) -> None:
        until(lambda: store.renewed >= 3)
        assert not held.over

    hold(store, story)


def test_an_event_loop_that_hangs_loses_the_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "HUNG_S", 0.2)

    async def story(held: LeaseKeeper, candidate: Candidate) -> None:
        until(lambda: held.over)
        assert held.over == HUNG
        assert await held.end() == HUNG, "also when it turns again"

    hold(MemoryStore(), story)


def test_a_lease_that_the_store_has_ended_is_noticed_before_it_would_be_over() -> None:
    store = MemoryStore()

    async def story(held: LeaseKeeper, candidate: Candidate) -> None:
        store.advance(store.next_expiry_s())
        assert await held.end() == "the lease has expired"

    hold(store, story)


def test_a_lease_that_cannot_be_renewed_is_over_by_the_clock_of_the_replica() -> None:
    class Deaf(MemoryStore):
        def keep_alive(self, *_: object, **__: object) -> int:
            raise StoreUnavailable("no answer")

    async def story(held: LeaseKeeper, candidate: Candidate) -> None:
        assert await held.end() == LATE
        assert time.monotonic() >= candidate.held_until_s

    hold(Deaf(), story, slow_s=SAFETY * LEASE_S - 0.2)


def test_a_leader_that_reads_long_records_keeps_its_lease_meanwhile(tmp_path: Path) -> None:
    """Reading them may take longer than the lease lasts: each answer comes when the lease has been renewed."""

    class Slow(MemoryStore):
        part: JobReplica | None = None

        def between(self, first: str, end: str, *, limit: int, timeout_s: float) -> Listing:
            if self.part is not None:
                candidate = self.part._candidate
                before_s = candidate.held_until_s
                until(lambda: candidate.held_until_s > before_s)
            return super().between(first, end, limit=limit, timeout_s=timeout_s)

    store = Slow()
    first = Candidate(store, "job", "first", time.monotonic)
    assert isinstance(first.stand(), Won)
    first.commit(Generation(1, Kind.FORM, 1, (), Plan(), "here"))
    first.commit(Generation(2, Kind.PLANNED, 1, (), Plan(), "here"))
    first.finish({"exit_code": 0, "because": "done", "digest": ""})
    first.resign()

    async def run() -> dict[str, object]:
        with Journal(tmp_path / "journal.jsonl", "job", "rendezvous", "here") as journal:
            spec = JobSpec(name="job", command=("train",), workers=1)
            store.part = JobReplica(spec, tmp_path, store, "here", RendezvousService(), journal, JobOrigin())
            return await store.part.run()

    assert asyncio.run(run())["because"] == "done"


async def test_a_leader_that_leaves_gives_up_its_lease_before_it_sends_its_agents_away(tmp_path: Path) -> None:
    """It takes long until thousands have left, and nobody leads until then."""
    attending: list[bool] = []
    session: AgentSession | None = None

    class Watched(MemoryStore):
        def revoke(self, lease: Lease, *, timeout_s: float) -> None:
            assert session is not None
            attending.append(not session.ended.is_set())
            super().revoke(lease, timeout_s=timeout_s)

    service = RendezvousService()
    with Journal(tmp_path / "journal.jsonl", "job", "rendezvous", "here") as journal:
        spec = JobSpec(name="job", command=("train",), workers=1)
        replica = JobReplica(spec, tmp_path, Watched(), "here", service, journal, JobOrigin())
        part = asyncio.create_task(replica.run())
        async with asyncio.timeout(PATIENCE_S):
            while (leader := service.leads["job"].leader if service.leads else None) is None:
                await asyncio.sleep(0.01)
            session = leader.attach("a")
            part.cancel()
            await asyncio.gather(part, return_exceptions=True)
    assert attending == [True] and session is not None and session.ended.is_set()
