"""The preemption notices of a node: its daemon asks for them once, and shows them to the agents of all its jobs.

The provider hears that the node is empty when the last job has left it: some providers then take the machine away at
once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from elastic.preemption import relay
from elastic.preemption.notice import Notice
from elastic.preemption.provider import NoticeSource, Unanswered
from elastic.preemption.watcher import NoticeWatchers
from elastic.records.journal import Journal


class NoticeBoard:
    """The active notices of a node, on the event loop. changed: called when the active notices have changed."""

    def __init__(self, journal: Journal, changed: Callable[[], None]) -> None:
        self._changed = changed
        self.notices = NoticeWatchers(journal, self._heard)
        self._standing: dict[str, relay.ActiveNotices] = {}
        self._round = time.monotonic_ns()

    def watch(self, sources: Iterable[NoticeSource]) -> None:
        """Watch these sources and no others, on threads of their own. Notices of earlier sources end: those that stand
        are heard again."""
        for source in list(self._standing):
            self.notices.heard(source, None)
        self.notices.watch(sources)

    def _heard(self, source: str, notice: Notice | None) -> None:
        self._round = time.monotonic_ns()
        self.notices.told = False
        if notice is None:
            self._standing.pop(source, None)
        else:
            self._standing[source] = relay.standing(source, notice)
        self._changed()

    @property
    def because(self) -> str:
        """Why the node has to go, or ""."""
        return next((one.because for one in self._standing.values() if one.leaves), "")

    def show(self, job_dir: Path) -> None:
        """Show the active notices to the agent of a job. Raises OSError."""
        relay.write(job_dir, self._round, self._standing)

    def look(self, job_dirs: Iterable[Path]) -> None:
        """Tell the providers, once, when the node has to go and no job in these directories has workers here."""
        if not self.because or self.notices.told:
            return
        try:
            if all(relay.has_left(job_dir, self._round) for job_dir in job_dirs):
                self.notices.left()
        except Unanswered as error:
            self.notices.troubled("node", str(error))
