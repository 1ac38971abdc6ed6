"""Looks at each source of notices from a thread of its own, so that a slow provider delays nobody but itself."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from elastic.preemption.notice import Notice
from elastic.preemption.provider import NoticeSource, Unanswered
from elastic.records.journal import Journal

FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 10.0
"""A service that is back may give a notice of 30 s, which must not be slept through."""
EARLIER_S = 1.0
"""An end that comes nearer by less is not news."""


class NoticeWatcher:
    """Until `close`. The thread is a daemon: a question that hangs does not hold up the end of the process.

    heard: called with the source's name and its notice, or None when it is taken back, once for each change.
    troubled: called with the source's name and a sentence when it stops answering; again only after it has answered.
    Both are called on the watcher's thread. While a source does not answer, its last notice stands.
    """

    def __init__(
        self, source: NoticeSource, heard: Callable[[str, Notice | None], None], troubled: Callable[[str, str], None]
    ) -> None:
        self._source = source
        self._heard = heard
        self._troubled = troubled
        self._wake = threading.Event()
        self._closed = False
        self._signalled = False
        self._left = False
        self._thread = threading.Thread(target=self._run, name=f"notices {source.name}", daemon=True)
        self._thread.start()

    def signalled(self) -> None:
        """One of the source's signals came. Any thread."""
        self._signalled = True
        self._wake.set()

    def left(self) -> None:
        """No worker is on this node any more. Any thread."""
        self._left = True
        self._wake.set()

    def close(self) -> None:
        """Say nothing any more; what `left` asked for is still done. Does not wait for a question under way."""
        self._closed = True
        self._wake.set()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the thread of a closed watcher. None: as long as the source's last word may take."""
        self._thread.join(self._source.last_word_s if timeout_s is None else timeout_s)

    def _run(self) -> None:
        try:
            self._look_on()
        finally:
            self._source.close()

    def _look_on(self) -> None:
        retry_s, said, standing, ends_s, number = FIRST_RETRY_S, False, None, 0.0, 0
        while not self._closed or self._left:
            # A look may take seconds, and this process may be about to end. After a failure the source is looked at.
            hurried = self._left and not self._signalled and not said
            try:
                if self._signalled:
                    self._signalled = False
                    self._source.signalled()
                notice = standing if hurried else self._source.look()
                if self._left:
                    self._source.left()
                    self._left = False
            except Exception as trouble:  # also of an answer for which the source was not written: it is asked again
                if not said and (self._left or not self._closed):
                    said = True
                    known = isinstance(trouble, Unanswered)
                    because = str(trouble) if known else f"{type(trouble).__name__}: {trouble}"
                    self._troubled(self._source.name, because)
                pause_s, retry_s = retry_s, min(2 * retry_s, LONGEST_RETRY_S)
            else:
                retry_s, said, pause_s = FIRST_RETRY_S, False, self._source.pause_s
                now_ends_s = time.monotonic() + notice.seconds_left if notice else 0.0
                again = now_ends_s < ends_s - EARLIER_S or self._source.round != number
                if _is_news(standing, notice) or (notice and again):
                    standing, ends_s, number = notice, now_ends_s, self._source.round
                    if not self._closed:
                        self._heard(self._source.name, notice)
            if self._closed:
                return
            self._wake.wait(pause_s)
            self._wake.clear()


class NoticeWatchers:
    """All watchers of a node, used on the event loop. heard: called there with a source and its notice, or None when it
    is taken back, once for each change."""

    def __init__(self, journal: Journal, heard: Callable[[str, Notice | None], None]) -> None:
        self._journal = journal
        self._heard = heard
        self._watchers: list[NoticeWatcher] = []
        self._current = object()
        self.told = False
        """Whether the providers have been told that no worker is on this node any more, since the newest notice."""

    def watch(self, sources: Iterable[NoticeSource]) -> None:
        """Watch these sources and no others. No source is asked on this thread; their signals are caught here."""
        for watcher in self._watchers:
            watcher.close()
        loop, current = asyncio.get_running_loop(), object()
        self._watchers, self._current = [], current

        def on_loop(act: Callable[[str, Any], None], source: str, said: object) -> None:
            if self._current is current:  # an earlier source may have spoken before it was closed
                act(source, said)

        def from_thread(act: Callable[[str, Any], None], source: str, said: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody leaves any more
                loop.call_soon_threadsafe(on_loop, act, source, said)

        for source in sources:
            watcher = NoticeWatcher(source, partial(from_thread, self.heard), partial(from_thread, self.troubled))
            self._watchers.append(watcher)
            for number in source.signals:
                loop.add_signal_handler(number, watcher.signalled)
            self._journal.write("notices_watched", source=source.name)

    def heard(self, source: str, notice: Notice | None) -> None:
        """Take the present notice of a source; None: it has none any more."""
        if notice is None:
            self._journal.write("notice_over", source=source)
        else:
            self.told = False
            left_s = notice.seconds_left if notice.leaves else None
            self._journal.write(
                "notice", source=source, kind=str(notice.kind), seconds_left=left_s, because=notice.because
            )
        self._heard(source, notice)

    def troubled(self, source: str, because: str) -> None:
        self._journal.write("notices_unreadable", source=source, because=because)

    def left(self) -> None:
        """No worker is on this node any more: tell the providers."""
        self.told = True
        self._journal.write("node_empty")
        for watcher in self._watchers:
            watcher.left()

    def close(self) -> None:
        """Stop watching. A provider that waits for this node to be empty is told, for at most its last_word_s."""
        for watcher in self._watchers:
            watcher.close()
        for watcher in self._watchers if self.told else ():
            watcher.join()


def _is_news(before: Notice | None, now: Notice | None) -> bool:
    if before is None or now is None:
        return before is not now
    return (before.kind, before.because) != (now.kind, now.because)
