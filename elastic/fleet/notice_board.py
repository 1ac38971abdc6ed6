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
from elastic.preemption.watcher import NoticeWatcher, watch_all
from elastic.records.journal import Journal

LAST_WORD_S = 2.0


class NoticeBoard:
    """The active notices of a node, on the event loop. changed: called when the active notices have changed."""

    def __init__(self, journal: Journal, changed: Callable[[], None]) -> None:
        self._journal = journal
        self._changed = changed
        self._watchers: list[NoticeWatcher] = []
        self._current = object()
        self._standing: dict[str, relay.ActiveNotices] = {}
        self._round = time.monotonic_ns()
        self._told = False

    def watch(self, sources: Iterable[NoticeSource]) -> None:
        """Watch these sources and no others, on threads of their own. Notices of earlier sources end: those that stand
        are heard again."""
        for watcher in self._watchers:
            watcher.close()
        current = self._current = object()

        def heard(source: str, notice: Notice | None) -> None:
            if self._current is current:  # an earlier source may have spoken before it was closed
                self.heard(source, notice)

        for source in list(self._standing):
            self.heard(source, None)
        self._watchers = watch_all(sources, heard, self._troubled, self._journal)

    def heard(self, source: str, notice: Notice | None) -> None:
        """Take the notice of a source; None: the source has no notice any more."""
        self._round = time.monotonic_ns()
        self._told = False
        if notice is None:
            self._standing.pop(source, None)
            self._journal.write("notice_over", source=source)
        else:
            self._standing[source] = relay.standing(notice)
            left_s = notice.seconds_left if notice.leaves else None
            self._journal.write(
                "notice", source=source, kind=str(notice.kind), seconds_left=left_s, because=notice.because
            )
        self._changed()

    def _troubled(self, source: str, because: str) -> None:
        self._journal.write("notices_unreadable", source=source, because=because)

    @property
    def because(self) -> str:
        """Why the node has to go, or ""."""
        return next((one.because for one in self._standing.values() if one.leaves), "")

    def show(self, job_dir: Path) -> None:
        """Show the active notices to the agent of a job. Raises OSError."""
        relay.write(job_dir, self._round, self._standing)

    def look(self, job_dirs: Iterable[Path]) -> None:
        """Tell the providers, once, when the node has to go and no job in these directories has workers here."""
        if not self.because or self._told:
            return
        try:
            self._told = all(relay.has_left(job_dir, self._round) for job_dir in job_dirs)
        except Unanswered as error:
            self._troubled("node", str(error))
            return
        if self._told:
            self._journal.write("node_empty")
            for watcher in self._watchers:
                watcher.left()

    def close(self) -> None:
        """Stop watching. A provider that waits for this node to be empty is told, for at most LAST_WORD_S."""
        for watcher in self._watchers:
            watcher.close()
        for watcher in self._watchers if self._told else ():
            watcher.join(LAST_WORD_S)
