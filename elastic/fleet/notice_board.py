"""The notices of a node, asked for once by its daemon and shown to the agents of all its jobs.

The provider hears that the node is empty when the last of the jobs has left it: to some of them that is the word to
take the machine away at once.
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
    """Used on the event loop. changed: called with each change of what stands."""

    def __init__(self, journal: Journal, changed: Callable[[], None]) -> None:
        self._journal = journal
        self._changed = changed
        self._watchers: list[NoticeWatcher] = []
        self._standing: dict[str, relay.ActiveNotices] = {}
        self._round = time.monotonic_ns()
        self._told = False

    def watch(self, sources: Iterable[NoticeSource]) -> None:
        """Begin to look; asks nobody anything on this thread."""
        self._watchers = watch_all(sources, self.heard, self._troubled, self._journal)

    def heard(self, source: str, notice: Notice | None) -> None:
        """What a source says now; None: nothing any more."""
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
        """Why the node has to go, or nothing."""
        return next((one.because for one in self._standing.values() if one.leaves), "")

    def show(self, job_dir: Path) -> None:
        """To the agent of a job. Raises OSError."""
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
        """Look no more. A provider that waits for this node to be empty is told, for at most LAST_WORD_S."""
        for watcher in self._watchers:
            watcher.close()
        for watcher in self._watchers if self._told else ():
            watcher.join(LAST_WORD_S)
