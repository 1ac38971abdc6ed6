"""Admission of agents to the jobs of a fleet: the fleet must have placed the job on the agent's node (documents.py).

The documents that this replica has read may be a moment old. So it admits by them, and reads again before it refuses: a
daemon hears of a new place from the fleet's leader sooner than other replicas hear of it from the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from elastic.fleet import documents
from elastic.fleet.documents import FleetJob, FleetState
from elastic.rendezvous.service import NotKnown

REREAD_S = 5.0
"""Most seconds that an agent waits for the documents to be read again, before it is told to try again."""

PAUSE_S = 0.1
"""Seconds from the first agent that would be refused to the reading that serves all of them."""


class Admission:
    """Admits or refuses agents, on the event loop. refused(because, job, node, peer): called for each refusal. reread:
    asks for a reading of the documents, which then calls `reads` and `read`."""

    def __init__(self, refused: Callable[[str, str, str, str], None], reread: Callable[[], None]) -> None:
        self._refused = refused
        self._reread = reread
        self._due: asyncio.TimerHandle | None = None
        self._left_out: Collection[str] = ()
        self._jobs: dict[str, FleetJob] = {}
        """As they were read last; a job stays so while it cannot be read."""
        self._wanted: set[asyncio.Future[None]] = set()
        self._reading: set[asyncio.Future[None]] = set()

    def reads(self) -> None:
        """A reading of the documents begins."""
        self._reading |= self._wanted
        self._wanted = set()

    def read(self, state: FleetState) -> None:
        """The reading has found these documents. A reading that fails does not come here: another one follows."""
        self._left_out = state.left_out.keys()
        kept = {name: job for name, job in self._jobs.items() if name in self._left_out}
        self._jobs = kept | {job.name: job for job in state.jobs}
        reading, self._reading = self._reading, set()
        for one in reading:
            if not one.done():
                one.set_result(None)

    def stands(self, job: str, node: str, token: str) -> bool:
        """Whether the agent that was admitted with this token may stay, by the documents read last."""
        return not self._objection(job, node, token)

    async def objection(self, job: str, node: str, token: str, peer: str) -> str:
        """Why this agent may not attend, or "". Raises NotKnown while the store does not answer."""
        if not self._objection(job, node, token):
            return ""
        loop = asyncio.get_running_loop()
        reading = loop.create_future()
        self._wanted.add(reading)
        if self._due is None:
            self._due = loop.call_later(PAUSE_S, self._ask)
        try:
            async with asyncio.timeout(REREAD_S):
                await reading
        except TimeoutError:
            raise NotKnown("whether the fleet has placed this job there cannot be read now; try again") from None
        finally:
            self._wanted.discard(reading)
            self._reading.discard(reading)
        if because := self._objection(job, node, token):
            if job in self._left_out:
                raise NotKnown("a document of this job cannot be read now; try again")
            self._refused(because, job, node, peer)
        return because

    def _ask(self) -> None:
        self._due = None
        self._reread()

    def _objection(self, job: str, node: str, token: str) -> str:
        return documents.objection(self._jobs.get(job), node, token)
