"""What a leader may still do when its lease is over, as far as it knows or not."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from elastic.config import JobSpec
from elastic.election import LEASE_S, SAFETY, Candidate, Won
from elastic.errors import StoreUnavailable
from elastic.journal import Journal
from elastic.membership import End
from elastic.messages import SlotGivenUp
from elastic.reign import Deposed, Reign, StoreThread
from elastic.store import Compare, Lease, MemoryStore, Put, TxnResult

SPEC = JobSpec(name="job", command=("train",), workers=1)
HOPELESS = SlotGivenUp("a", 0, "the worker cannot be started", exit_code=2)
"""Ends the job at once."""


class DeafStore(MemoryStore):
    """Does not answer the next few calls."""

    deaf = 0

    def keep_alive(self, lease: Lease, *, timeout_s: float) -> int:
        self._hear()
        return super().keep_alive(lease, timeout_s=timeout_s)

    def txn(
        self, compares: Sequence[Compare], puts: Sequence[Put], deletes: Sequence[str] = (), *, timeout_s: float
    ) -> TxnResult:
        self._hear()
        return super().txn(compares, puts, deletes, timeout_s=timeout_s)

    def _hear(self) -> None:
        if self.deaf:
            self.deaf -= 1
            raise StoreUnavailable("no answer", ambiguous=True)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "journal.jsonl", "job", "rendezvous", "here") as journal:
        yield journal


def lead_to_the_end(
    store: DeafStore, journal: Journal, *, usurped: bool = False, deaf: int = 0, slow_s: float = 0.0
) -> tuple[End | Deposed, list[str]]:
    """A reign that is told that the job cannot go on. Returns how it ended, and what its agent was told.

    slow_s: so long ago, by its own clock, was its lease granted.
    """
    first = Candidate(store, "job", "first", lambda: time.monotonic() - slow_s)
    won = first.stand()
    assert isinstance(won, Won)
    if usurped:
        store.advance(store.next_expiry_s())
        assert isinstance(Candidate(store, "job", "second", time.monotonic).stand(), Won)
    store.deaf = deaf

    async def lead() -> tuple[End | Deposed, list[str]]:
        thread = StoreThread()
        reign = Reign(SPEC, first, won.term, journal, thread)
        session = reign.attach("a")
        await reign.post(HOPELESS)
        outcome = await reign.lead(())
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
    assert isinstance(outcome, Deposed)
    assert store.get("/elastic/job/result", timeout_s=1.0) is None
    assert told == ["welcome"]


def test_a_store_that_does_not_answer_is_asked_again_before_the_job_ends(journal: Journal) -> None:
    store = DeafStore()
    outcome, _ = lead_to_the_end(store, journal, deaf=3)
    assert isinstance(outcome, End) and store.deaf == 0


def test_a_leader_whose_lease_ran_out_meanwhile_ends_nothing(journal: Journal) -> None:
    store = DeafStore()
    outcome, told = lead_to_the_end(store, journal, deaf=10**6, slow_s=SAFETY * LEASE_S - 0.2)
    assert isinstance(outcome, Deposed) and told == ["welcome"]
