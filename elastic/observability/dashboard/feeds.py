"""Polls the sources on threads, and wakes the pages that wait. Used on the event loop only.

A job is polled often while a page shows it, and now and then for a while afterwards.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from elastic.errors import ElasticError
from elastic.observability.dashboard.job_history import JobHistory
from elastic.observability.dashboard.sources import FleetSource, JobSource

STATUS_S = 1.0
"""Seconds between two questions to the leader of a job, while a page shows it."""

UNSEEN_S = 2.0
"""Seconds between two looks, and two questions, while no page does."""

FORGOTTEN_S = 600.0
"""After so long without a page the history of a fleet's job is forgotten; its next page reads it anew."""


class Waiters:
    """Pages that wait for the next change."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        """Set at the next change; a later change has another one."""
        self.pages = 0

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class JobFeed:
    """The feed of one job. boot: another one for each history, so that event numbers of an earlier dashboard are not
    taken for its own. poll_s: seconds between two looks while a page shows the job."""

    def __init__(self, source: JobSource, poll_s: float, *, leader_only: bool) -> None:
        self.source = source
        self.boot = secrets.token_hex(4)
        self.history = JobHistory(leader_only=leader_only)
        self.waiters = Waiters()
        self.state: dict[str, Any] = {}
        """{"status", "summary", "problem"}: what is not told by events. version: of it."""
        self.version = 0
        self._poll_s = poll_s
        self._asked_s = 0.0
        self._busy = asyncio.Lock()

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            began_s = time.monotonic()
            more = await self.poll()
            pause_s = self._poll_s if self.waiters.pages else max(self._poll_s, UNSEEN_S)
            await asyncio.sleep(0.0 if more else max(self._poll_s / 4, pause_s - (time.monotonic() - began_s)))

    async def poll(self, *, ask: bool = False) -> bool:
        """Look once. ask: the leader too, although it was asked just now. Returns whether there was anything new."""
        async with self._busy:
            before = self.history.changes
            more, problem = await asyncio.to_thread(_tried, lambda: self.source.poll(self.history))
            asked_s = time.monotonic() - self._asked_s
            if ask or self.history.changes != before or asked_s >= (STATUS_S if self.waiters.pages else UNSEEN_S):
                self._asked_s = time.monotonic()
                status, unanswered = await asyncio.to_thread(_tried, self.source.status)
                state = {
                    "status": status or self.state.get("status", {}),
                    "summary": self.history.summary(time.time()),
                    "problem": problem or unanswered,
                }
                self.version += state != self.state
                self.state = state
            self.waiters.wake()
            return bool(more)


def _tried(look: Callable[[], Any]) -> tuple[Any, str]:
    """What the look gives, or None and why; it is shown on the page, and tried again at the next look."""
    try:
        return look(), ""
    except Exception as error:
        return None, str(error) if isinstance(error, ElasticError) else f"{type(error).__name__}: {error}"


class FleetFeed:
    """The overview of a fleet, and a feed for each job whose page was opened."""

    def __init__(self, source: FleetSource, poll_s: float) -> None:
        self.source = source
        self.waiters = Waiters()
        self.overview: Mapping[str, Any] = {}
        self.version = 0
        self._poll_s = poll_s
        self._jobs: dict[str, tuple[JobFeed, asyncio.Task[None]]] = {}
        self._shown_s: dict[str, float] = {}

    async def run(self) -> None:
        try:
            while True:
                await self.poll()
                await asyncio.sleep(self._poll_s if self.waiters.pages else 4 * self._poll_s)
        finally:
            tasks = [task for _, task in self._jobs.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def poll(self) -> None:
        overview, problem = await asyncio.to_thread(_tried, self.source.overview)
        found = {**(overview or self.overview), "problem": problem}
        if found != self.overview:
            self.overview = found
            self.version += 1
            self.waiters.wake()
        self._forget(time.monotonic())

    async def job(self, name: str) -> JobFeed:
        """The feed of a job, which begins when its page is opened first. Raises ConfigError if there is no such job."""
        if name not in self._jobs:
            source = await asyncio.to_thread(self.source.job, name)
            feed = JobFeed(source, self._poll_s, leader_only=True)
            await feed.poll()
            if name not in self._jobs:  # else another page has opened it meanwhile
                self._jobs[name] = (feed, asyncio.create_task(feed.run()))
        self._shown_s[name] = time.monotonic()
        return self._jobs[name][0]

    @property
    def jobs(self) -> list[JobFeed]:
        """Those whose pages were opened."""
        return [feed for feed, _ in self._jobs.values()]

    def _forget(self, now_s: float) -> None:
        for name, (feed, task) in list(self._jobs.items()):
            if feed.waiters.pages:
                self._shown_s[name] = now_s
            elif now_s - self._shown_s[name] > FORGOTTEN_S:
                task.cancel()
                del self._jobs[name]
