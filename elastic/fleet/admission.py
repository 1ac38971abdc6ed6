"""At the door of each job of a fleet: an agent attends if the fleet has placed the job on its node (documents.py).

What this replica has read of the documents may be a moment old. So it admits by what it has read, and reads once more
before it refuses: a daemon hears of a new place from the fleet's leader sooner than other replicas from the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from elastic.fleet import documents
from elastic.fleet.documents import FleetState
from elastic.rendezvous.service import NotKnown

REREAD_S = 5.0
"""How long a reading may take, before it is said that nobody can tell now."""

PAUSE_S = 0.1
"""Between two readings for those who would be refused, however many they are."""


class Admission:
    """On the event loop. refused(because, job, node, peer): told who was turned away. reread: has the documents read
    again; `reads` and `read` are told then."""

    def __init__(self, refused: Callable[[str, str, str, str], None], reread: Callable[[], None]) -> None:
        self._refused = refused
        self._reread = reread
        self._due: asyncio.TimerHandle | None = None
        self._book = FleetState()
        self._wanted: set[asyncio.Future[None]] = set()
        self._reading: set[asyncio.Future[None]] = set()

    def reads(self) -> None:
        """A reading begins."""
        self._reading |= self._wanted
        self._wanted = set()

    def read(self, book: FleetState) -> None:
        """It has come to this. One that fails is followed by another one."""
        self._book = book
        reading, self._reading = self._reading, set()
        for one in reading:
            if not one.done():
                one.set_result(None)

    def stands(self, job: str, node: str, token: str) -> bool:
        """Whether who was admitted so may stay, as far as is known."""
        return not self._objection(job, node, token)

    async def objection(self, job: str, node: str, token: str, peer: str) -> str:
        """Why this agent may not attend, or nothing. Raises NotKnown while the store does not answer."""
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
            self._refused(because, job, node, peer)
        return because

    def _ask(self) -> None:
        self._due = None
        self._reread()

    def _objection(self, job: str, node: str, token: str) -> str:
        return documents.objection(self._book.job(job), node, token)
