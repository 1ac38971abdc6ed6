"""A replica's part in one job: it stands for election, and leads while it holds the key.

Every replica listens; the one that holds the election key leads. A leader owns one `membership.Group` and runs

    event = await mailbox.get()                        words of agents, results of commits, ticks
    actions = membership.advance(group, events, now_s)
    for action in actions: perform(action)             tell agents, commit, write the journal, end the job

on one asyncio thread. The store is synchronous and has a thread of its own; its answers come back as events. A leader
relies on its lease by its own clock only, and forgets everything when it steps down: the next leader learns it again
from the store's records and from the announcements of agents.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import cast

from elastic.config import JobSpec
from elastic.errors import StoreError, StoreUnavailable
from elastic.protocol.membership import End
from elastic.protocol.messages import Generation
from elastic.records.files import write_atomically
from elastic.records.journal import Journal
from elastic.rendezvous.leader import JobLeader, JobOrigin, StoreThread
from elastic.rendezvous.service import JobEntry, RendezvousService
from elastic.store.base import Store
from elastic.store.election import Candidate, LeadershipLost, Taken, lease_of
from elastic.store.lease import RETRY_S, LeaseKeeper
from elastic.wire import codec
from elastic.wire import elastic_pb2 as pb

REFUSED_S = 1.0
"""Seconds before a replica stands again after the store has refused it: it may be full, or rights may be missing."""

YOUNG, YOUNG_A_WORKER = 50_000, 100
"""Python looks for garbage after YOUNG new values, and in the leader of a job after YOUNG_A_WORKER for each worker, if
that is more."""

VACANCY_S = 2.0
"""Seconds for which a candidate trusts a silent watch of the election key before it looks again."""


class JobReplica:
    """One replica's part in one job. job_dir: its local directory, for journals and the result. address: the replica's.

    service: gets the job's entry, which stays when the job is over. ended: awaited with the result once that is
    durable, while agents still take leave.
    """

    def __init__(
        self,
        spec: JobSpec,
        job_dir: Path,
        store: Store,
        address: str,
        service: RendezvousService,
        journal: Journal,
        origin: JobOrigin,
        ended: Callable[[dict[str, object]], Awaitable[None]] | None = None,
    ) -> None:
        self._spec = spec
        self._job_dir = job_dir
        self._address = address
        self._journal = journal
        self._origin = origin
        self._ended = ended
        self._candidate = Candidate(store, spec.name, address, time.monotonic, lease_of(spec.workers))
        self._entry = service.leads[spec.name] = JobEntry(journal)
        self._led: JobLeader | None = None
        """The leader that has begun, and from which this replica has not resigned yet."""

    async def run(self) -> dict[str, object]:
        """Take part until the job is over, or until cancelled. Returns the job's result."""
        with contextlib.closing(StoreThread()) as store:
            try:
                return await self._stand_and_lead(store)
            finally:
                await self._resign(store)

    async def _resign(self, store: StoreThread) -> None:
        """Give the key back, so that a successor need not wait for the lease; if the store cannot be told, it has to
        wait. Agents are dismissed only then, because it takes a while until thousands have left."""
        leader, self._led = self._led, None
        with contextlib.suppress(StoreError):
            await store.call(self._candidate.resign)
            if leader is not None:
                held_until_ns = round(self._candidate.held_until_s * 1e9)
                self._journal.write("resigned", term=leader.term, held_until_ns=held_until_ns)
        if leader is not None:
            leader.dismiss()

    def write_address(self) -> None:
        document = {"address": self._address, "pid": os.getpid()}
        write_atomically(self._job_dir / "rendezvous.json", json.dumps(document).encode())

    async def _stand_and_lead(self, store: StoreThread) -> dict[str, object]:
        while True:
            term = await win(self._candidate, store, self._saw, self._journal)
            async with LeaseKeeper(self._candidate, term) as tenure:
                result = await self._hold(tenure, store)
            if result is not None:
                return result
            await self._resign(store)

    async def _hold(self, tenure: LeaseKeeper, store: StoreThread) -> dict[str, object] | None:
        """Lead for one term. None: another replica shall lead."""
        entry, candidate, term = self._entry, self._candidate, tenure.term
        try:
            ended, chain = await self._read(tenure, store)
        except (LeadershipLost, StoreError, codec.WireError) as error:
            self._journal.write("not_leading", term=term, because=str(error))
            await asyncio.sleep(RETRY_S)
            return None
        if ended is not None:
            self._journal.write("job_was_over", term=term)
            self._keep_result(ended, term)  # the leader that stored it may have died before it wrote this
            await self._tell(ended)
            return ended
        settle_down(self._spec.workers)
        leader = JobLeader(self._spec, tenure, self._journal, store, self._origin)
        entry.leader, entry.address = leader, self._address
        self.write_address()
        self._led = leader
        self._journal.write("leading", term=term, highest=chain[-1].number if chain else 0)
        try:
            outcome = await leader.lead(chain)
            if isinstance(outcome, End):
                self._journal.write("job_ended", leader.generation, **asdict(outcome))
                result = leader.result(outcome)
                self._keep_result(result, term)
                await asyncio.gather(self._tell(result), leader.announce_end(outcome))
                return result
        finally:
            entry.leader = None
            entry.address = entry.address if entry.ended else ""
        held_until_ns = round(candidate.held_until_s * 1e9)
        self._journal.write("deposed", term=term, because=outcome, held_until_ns=held_until_ns)
        return None

    async def _read(
        self, tenure: LeaseKeeper, store: StoreThread
    ) -> tuple[dict[str, object] | None, tuple[Generation, ...]]:
        """How the job ended, if it did, and its records. Raises LeadershipLost if the term is over first."""
        candidate = self._candidate
        while True:
            try:
                known = await store.call(lambda: (candidate.result(), candidate.chain()))
            except StoreUnavailable as error:
                if because := tenure.over:
                    raise LeadershipLost(f"{because}: {error}") from error
                await asyncio.sleep(RETRY_S)
                continue
            if because := tenure.over:
                raise LeadershipLost(because)
            return known

    async def _tell(self, result: dict[str, object]) -> None:
        if self._ended is not None:
            await self._ended(result)

    def _saw(self, leader: str) -> None:
        self._entry.address = leader

    def _keep_result(self, result: dict[str, object], term: int) -> None:
        """Write the stored result to the job directory for the operator, and keep it for agents that come late."""
        try:
            write_atomically(self._job_dir / "result.json", json.dumps(result).encode())
        except OSError as error:  # the agents hear the result all the same
            self._journal.write("result_not_written", because=str(error))
        self._entry.result = result
        self._entry.ended = pb.End(
            term=term,
            exit_code=cast(int, result["exit_code"]),
            because=str(result["because"]),
            digest=str(result["digest"]),
        )


def settle_down(workers: int = 0) -> None:
    """Make garbage collection rare, in a process that may lead; called again by the leader of a job of so many workers.

    With thousands of agents, Python's default frequency would take half of the time. A loss in a large job makes some
    50 values for each worker, most of which take the place of older ones; a collection in the middle of it would look
    at all of them, and find nothing.
    """
    gc.set_threshold(max(YOUNG, YOUNG_A_WORKER * workers, gc.get_threshold()[0]), 20, 50)


async def win(candidate: Candidate, store: StoreThread, saw: Callable[[str], None], journal: Journal) -> int:
    """Stand for election whenever the key may be free, until this candidate has it. Returns the term.

    saw: called with the address of the leader that has the key meanwhile.
    """
    while True:
        try:
            outcome = await store.call(candidate.stand)
            if not isinstance(outcome, Taken):
                return outcome.term
            saw(outcome.leader)
            await _vacancy(candidate, store, outcome.revision)
        except StoreUnavailable:
            await asyncio.sleep(RETRY_S)
        except StoreError as error:
            journal.write("not_elected", because=str(error))
            await asyncio.sleep(REFUSED_S)


async def _vacancy(candidate: Candidate, store: StoreThread, revision: int) -> None:
    """Wait until something happened to the election key, or the watch was silent for VACANCY_S."""
    loop = asyncio.get_running_loop()
    happened = asyncio.Event()
    watch = await store.call(candidate.watch_leader, revision, lambda event: loop.call_soon_threadsafe(happened.set))
    try:
        async with asyncio.timeout(VACANCY_S):  # wait_for may lose a cancel that comes with the event
            await happened.wait()
    except TimeoutError:
        pass
    finally:
        watch.cancel()
