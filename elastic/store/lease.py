"""A term that a replica holds: a thread of its own renews the lease, whatever else the replica does.

A leader may be busy for longer than its lease lasts: it reads records when it begins, and writes new ones. With
thousands of agents one turn of its event loop may take as long. A busy leader is not dead, so the thread renews the
lease. If the event loop stands still for HUNG_S, the thread gives the term up, and another replica leads.

The Candidate says until when the leader may rely on its lease, by this process's own clock, counted from before the
renewal was sent. The leader reads this time before each order and each write, and steps down in time if no renewal
succeeds.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

from elastic.errors import StoreError, StoreUnavailable
from elastic.store.election import Candidate, LeadershipLost

RETRY_S = 0.1
"""Pause between two tries of the store; each try waits for the store itself."""

HUNG_S = 10.0
"""An event loop that has not turned for so long leads nobody. Forming a generation of thousands takes seconds of it."""

SIGN_S = 0.5
"""How often the loop shows that it turns."""

LATE = "the lease could not be renewed in time"
HUNG = "the event loop of this replica has stood still"


class LeaseKeeper:
    """Keeps the lease of a candidate that has won. Entered and left on the event loop; the candidate may be used by one
    other thread meanwhile, but resigns, and stands again, only afterwards."""

    def __init__(self, candidate: Candidate, term: int) -> None:
        self.candidate = candidate
        self.term = term
        self._because = ""
        self._turned_s = time.monotonic()
        self._left = threading.Event()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    async def __aenter__(self) -> LeaseKeeper:
        self._loop = asyncio.get_running_loop()
        self._turning = asyncio.create_task(self._turn())
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._left.set()
        self._turning.cancel()
        await asyncio.to_thread(self._thread.join)

    @property
    def over(self) -> str:
        """Why this replica must not lead any more, or empty."""
        return self._because or (LATE if time.monotonic() >= self.candidate.held_until_s else "")

    async def end(self) -> str:
        """Wait until it is over. Returns why."""
        while not (because := self.over):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.candidate.held_until_s - time.monotonic()):
                    await self._ended.wait()
        return because

    async def _turn(self) -> None:
        while True:
            self._turned_s = time.monotonic()
            await asyncio.sleep(SIGN_S)

    def _renew(self) -> None:
        """On the thread, until this is left or the term is over."""
        pause_s = 0.0
        while not self._left.wait(pause_s):
            if time.monotonic() >= self._turned_s + HUNG_S:
                return self._give_up(HUNG)
            try:
                held_until_s = self.candidate.renew()
            except StoreUnavailable:
                pause_s = RETRY_S
            except (LeadershipLost, StoreError) as error:
                return self._give_up(str(error))
            else:
                pause_s = max(RETRY_S, (held_until_s - time.monotonic()) / 3)

    def _give_up(self, because: str) -> None:
        self._because = because
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nobody is left to be told
            self._loop.call_soon_threadsafe(self._ended.set)
