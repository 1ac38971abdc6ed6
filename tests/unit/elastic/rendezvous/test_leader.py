"""What a leader may still do when its lease is over, as far as it knows or not."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from elastic.checkpoints.naming import PERIODIC
from elastic.checkpoints.pointer import Pointer
from elastic.config import JobSpec
from elastic.errors import StoreUnavailable
from elastic.protocol import membership
from elastic.protocol.membership import AgentDown, AgentUp, End
from elastic.protocol.membership.roster import WorkerView
from elastic.protocol.messages import (
    CheckpointComplete,
    Failed,
    Generation,
    Kind,
    Member,
    Order,
    Plan,
    Pointed,
    Progress,
    SlotGivenUp,
    Word,
)
from elastic.records.journal import Journal
from elastic.rendezvous import leader as leader_module
from elastic.rendezvous.leader import JobLeader, JobOrigin, StoreThread
from elastic.rendezvous.service import JobEntry, RendezvousService
from elastic.store.base import Compare, Delete, Item, Lease, Put, TxnResult
from elastic.store.election import LEASE_S, SAFETY, Candidate, Won
from elastic.store.lease import LeaseKeeper
from elastic.wire import codec
from elastic.wire import elastic_pb2 as pb
from tests.memory_store import MemoryStore

SPEC = JobSpec(name="job", command=("train",), workers=1)
HOPELESS = SlotGivenUp("a", 0, "the worker cannot be started", exit_code=2)
"""Ends a job without workers at once."""
MISUSED = Failed("a.0.0", 1, "UsageError train.py:1", "the script misuses the package", exit_code=2)
"""Ends a job in which this worker trains at once."""


class DeafStore(MemoryStore):
    """Does not answer the next few calls, of whichever thread."""

    deaf = 0

    def __init__(self) -> None:
        super().__init__()
        self._counting = threading.Lock()

    def keep_alive(self, lease: Lease, *, timeout_s: float) -> int:
        self._hear()
        return super().keep_alive(lease, timeout_s=timeout_s)

    def txn(
        self, compares: Sequence[Compare], puts: Sequence[Put], deletes: Sequence[Delete] = (), *, timeout_s: float
    ) -> TxnResult:
        self._hear()
        return super().txn(compares, puts, deletes, timeout_s=timeout_s)

    def get(self, key: str, *, timeout_s: float) -> Item | None:
        if "/checkpoints/" in key:
            self._hear()
        return super().get(key, timeout_s=timeout_s)

    def _hear(self) -> None:
        with self._counting:
            if self.deaf:
                self.deaf -= 1
                raise StoreUnavailable("no answer", ambiguous=True)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "journal.jsonl", "job", "rendezvous", "here") as journal:
        yield journal


def lead_to_the_end(
    store: DeafStore, journal: Journal, *, usurped: bool = False, deaf: int = 0, slow_s: float = 0.0
) -> tuple[End | str, list[str]]:
    """A leader that is told that the job cannot go on. Returns how it ended, and what its agent was told.

    slow_s: so long ago, by its own clock, was its lease granted.
    """
    first = Candidate(store, "job", "first", lambda: time.monotonic() - slow_s)
    won = first.stand()
    assert isinstance(won, Won)
    if usurped:
        store.advance(store.next_expiry_s())
        assert isinstance(Candidate(store, "job", "second", time.monotonic).stand(), Won)
    store.deaf = deaf

    async def lead() -> tuple[End | str, list[str]]:
        thread = StoreThread()
        async with LeaseKeeper(first, won.term) as tenure:
            leader = JobLeader(SPEC, tenure, journal, thread)
            session = leader.attach("a")
            await leader.post(HOPELESS)
            outcome = await leader.lead(())
        thread.close()
        told = [session.outbox.get_nowait().WhichOneof("content") for _ in range(session.outbox.qsize())]
        return outcome, [str(content) for content in told]

    return asyncio.run(lead())


def test_the_end_of_a_job_is_durable_before_it_is_told(journal: Journal) -> None:
    store = DeafStore()
    outcome, _ = lead_to_the_end(store, journal)
    assert isinstance(outcome, End) and outcome.exit_code == 2
    item = store.get("/elastic/job/result", timeout_s=1.0)
    assert item is not None and json.loads(item.value)["exit_code"] == 2


def test_a_leader_that_was_replaced_without_noticing_ends_nothing(journal: Journal) -> None:
    store = DeafStore()
    outcome, told = lead_to_the_end(store, journal, usurped=True)
    assert isinstance(outcome, str)
    assert store.get("/elastic/job/result", timeout_s=1.0) is None
    assert told == ["welcome"]


def test_a_store_that_does_not_answer_is_asked_again_before_the_job_ends(journal: Journal) -> None:
    store = DeafStore()
    outcome, _ = lead_to_the_end(store, journal, deaf=3)
    assert isinstance(outcome, End) and store.deaf == 0


def test_a_leader_whose_lease_ran_out_meanwhile_ends_nothing(journal: Journal) -> None:
    store = DeafStore()
    outcome, told = lead_to_the_end(store, journal, deaf=10**6, slow_s=SAFETY * LEASE_S - 0.2)
    assert isinstance(outcome, str) and told == ["welcome"]


async def test_progress_of_a_large_job_waits_for_more_of_it_and_any_other_word_is_read_at_once(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader_module, "LOOK_S", 1000.0)  # as if there were millions of workers
    candidate = Candidate(MemoryStore(), "job", "first", time.monotonic)
    won = candidate.stand()
    assert isinstance(won, Won)
    said, other = Progress("a.0.0", 1, 1), AgentDown("b")

    async def next_words(leader: JobLeader) -> list[membership.Event]:
        while (events := await leader._next()) == [membership.GroupTick()]:
            pass
        return events

    thread = StoreThread()
    async with LeaseKeeper(candidate, won.term) as tenure, asyncio.timeout(30):
        leader = JobLeader(SPEC, tenure, journal, thread)
        leader.group.workers["a.0.0"] = WorkerView(Member("a.0.0", "a", "10.0.0.1", 4000, 0), 0, 1, "torch 2")
        await leader.post(said)
        hearing = asyncio.create_task(next_words(leader))
        await asyncio.sleep(0.05)
        assert not hearing.done()
        await leader.post(other)
        events = await hearing
    thread.close()
    assert events == [said, other]


async def test_a_failure_within_deposes_though_the_mailbox_is_full(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit that nobody hears the end of would hold up every later one."""
    monkeypatch.setattr(leader_module, "MAILBOX_LIMIT", 1)
    candidate = Candidate(MemoryStore(), "job", "first", time.monotonic)
    won = candidate.stand()
    assert isinstance(won, Won)

    async def fail() -> None:
        raise ValueError("nobody expects it")

    thread = StoreThread()
    async with LeaseKeeper(candidate, won.term) as tenure, asyncio.timeout(30):
        leader = JobLeader(SPEC, tenure, journal, thread)
        await leader.post(AgentDown("b"))
        leader._start(fail())
        await asyncio.wait(list(leader._tasks))
        outcome = await leader.lead(())
    thread.close()
    assert outcome == "ValueError: nobody expects it"


def _order(message: pb.LeaderOrder) -> Order | None:
    return codec.order_from_bytes(message.addressed.order) if message.HasField("addressed") else None


def lead_until_pointed(
    store: DeafStore, journal: Journal, *, resumed: str = "", known: str = "", deaf: int = 0, words: Sequence[Word] = ()
) -> list[str]:
    """A leader over the member a.0.0, up to its answers to these words. Returns what its agent was told of pointers,
    and then what `elastic status` shows. known: to the store."""
    candidate = Candidate(store, "job", "first", time.monotonic)
    won = candidate.stand()
    assert isinstance(won, Won)
    record = Generation(1, Kind.FORM, 1, (Member("a.0.0", "a", "host", 1, 0),), Plan(), "here")
    candidate.chain()
    candidate.commit(record)
    if known:
        candidate.point(PERIODIC, Pointer(known, "a.0.0", 1))
    store.deaf = deaf

    async def lead() -> list[str]:
        thread = StoreThread()
        told = []
        async with LeaseKeeper(candidate, won.term) as tenure, asyncio.timeout(30):
            leader = JobLeader(SPEC, tenure, journal, thread, JobOrigin(resumed))
            session = leader.attach("a")
            leading = asyncio.create_task(leader.lead((record,)))
            while (resumed or known) and not leader.group.checkpoint:
                await asyncio.sleep(0.01)  # a thread answers, and tells nobody
            for word in words:
                await leader.post(word)
                while not isinstance(pointed := _order(await session.outbox.get()), Pointed):
                    continue
                told.append(f"{pointed.series} {pointed.entry} {pointed.holds}")
            await leader.post(MISUSED)
            await leading
        thread.close()
        return [*told, leader.group.checkpoint]

    return asyncio.run(lead())


OLD, NEW = "step-000000000100.0.g9-0123abcd", "step-000000000104.0.g1-4567cdef"


def test_a_store_that_knows_no_checkpoint_learns_of_the_one_that_the_run_goes_on_from(journal: Journal) -> None:
    assert lead_until_pointed(DeafStore(), journal, resumed=OLD) == [OLD]
    assert lead_until_pointed(DeafStore(), journal, resumed="") == [""]


def test_a_store_that_does_not_answer_is_asked_again_for_the_newest_checkpoint(journal: Journal) -> None:
    assert lead_until_pointed(DeafStore(), journal, known=OLD, deaf=3) == [OLD]


def test_whoever_completes_a_newer_checkpoint_is_told_that_the_pointer_is_there(journal: Journal) -> None:
    words = [CheckpointComplete("a.0.0", "_periodic", entry) for entry in (NEW, OLD.replace("g9", "g0"))]
    told = lead_until_pointed(DeafStore(), journal, resumed=OLD, words=words)
    assert told == [f"_periodic {NEW} True", "_periodic step-000000000100.0.g0-0123abcd False", NEW]


async def test_an_agent_that_has_had_more_than_the_store_holds_ends_the_job_with_what_to_do(journal: Journal) -> None:
    """The store was restored from a backup: nobody can decide anything after what is lost."""
    members = (Member("a.0.0", "a", "127.0.0.1", 1, 0),)
    record = Generation(4, Kind.FORM, 4, members, Plan(), "1 of 1 workers are here")
    candidate = Candidate(MemoryStore(), "job", "first", time.monotonic)
    won = candidate.stand()
    assert isinstance(won, Won)
    thread = StoreThread()
    async with LeaseKeeper(candidate, won.term) as tenure, asyncio.timeout(30):
        leader = JobLeader(SPEC, tenure, journal, thread)
        leading = asyncio.create_task(leader.lead((record,)))
        await asyncio.sleep(0)
        assert leader.is_older("a", {3: "any", 4: record.digest()}) == ""
        assert "generation 5, and the newest in etcd is 4" in leader.is_older("a", {4: record.digest(), 5: "x"})
        assert "another generation 4, and the newest in etcd is 4" in leader.is_older("a", {4: "of another history"})
        leading.cancel()
        await asyncio.gather(leading, return_exceptions=True)
    thread.close()


@pytest.mark.parametrize("in_order", [False, True], ids=["closed", "goodbye"])
def test_a_stream_of_which_grpc_tells_the_end_twice_is_over(journal: Journal, *, in_order: bool) -> None:
    """It ends the words, and then it cancels the call, which may just be ending because of the words. Whether there was
    a goodbye is what the group is told."""
    candidate = Candidate(MemoryStore(), "job", "first", time.monotonic)
    won = candidate.stand()
    assert isinstance(won, Won)
    service = RendezvousService()

    async def words() -> AsyncIterator[pb.AgentWord]:
        yield pb.AgentWord(hello=pb.AgentHello(job="job", node="a", slots=1))
        if in_order:
            yield pb.AgentWord(goodbye=pb.Goodbye())

    async def attend() -> tuple[list[str], list[membership.Event]]:
        async def write(order: pb.LeaderOrder) -> None:
            if order.WhichOneof("content") == "welcome":
                leader._agents["a"].post(pb.LeaderOrder(beat=pb.Beat()))
                return
            try:
                await asyncio.Event().wait()
            finally:  # nobody speaks any more: the call is ending
                call.cancel()
                await asyncio.sleep(0)

        thread = StoreThread()
        async with LeaseKeeper(candidate, won.term) as tenure:
            leader = JobLeader(SPEC, tenure, journal, thread)
            service.leads["job"] = JobEntry(journal, leader)
            call = asyncio.create_task(service.Attend(words(), SimpleNamespace(write=write)))
            with pytest.raises(asyncio.CancelledError):
                await call
            told = [await asyncio.wait_for(leader._mailbox.get(), 30) for _ in range(2)]
            return leader.nodes, told

    nodes, told = asyncio.run(attend())
    assert (nodes, told) == ([], [AgentUp("a", 1), AgentDown("a", ended=not in_order)])
