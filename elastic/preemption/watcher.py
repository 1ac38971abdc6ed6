"""Looks at one source of notices from a thread of its own, so that a slow provider delays nobody but itself."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

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

    def join(self, timeout_s: float) -> None:
        """Wait for the thread of a closed watcher."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._look_on()
        finally:
            self._source.close()

    def _look_on(self) -> None:
        retry_s, said, standing, ends_s = FIRST_RETRY_S, False, None, 0.0
        while not self._closed or self._left:
            try:
                if self._signalled:
                    self._signalled = False
                    self._source.signalled()
                notice = self._source.look()
                if self._left:
                    self._source.left()
                    self._left = False
            except Unanswered as trouble:
                if not said and not self._closed:
                    said = True
                    self._troubled(self._source.name, str(trouble))
                pause_s, retry_s = retry_s, min(2 * retry_s, LONGEST_RETRY_S)
            else:
                retry_s, said, pause_s = FIRST_RETRY_S, False, self._source.pause_s
                now_ends_s = time.monotonic() + notice.seconds_left if notice else 0.0
                if _is_news(standing, notice) or (notice and now_ends_s < ends_s - EARLIER_S):
                    standing, ends_s = notice, now_ends_s
                    if not self._closed:
                        self._heard(self._source.name, notice)
            if self._closed:
                return
            self._wake.wait(pause_s)
            self._wake.clear()


def watch_all(
    sources: Iterable[NoticeSource],
    heard: Callable[[str, Notice | None], None],
    troubled: Callable[[str, str], None],
    journal: Journal,
) -> list[NoticeWatcher]:
    """A watcher for each, whose words, as those of NoticeWatcher, are called on the event loop that runs now; its
    signals are caught there too."""
    loop = asyncio.get_running_loop()

    def from_thread(act: object, *words: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody leaves any more
            loop.call_soon_threadsafe(act, *words)  # type: ignore[arg-type]

    watchers = []
    for source in sources:
        watcher = NoticeWatcher(source, partial(from_thread, heard), partial(from_thread, troubled))
        watchers.append(watcher)
        for number in source.signals:
            loop.add_signal_handler(number, watcher.signalled)
        journal.write("notices_watched", source=source.name)
    return watchers


def _is_news(before: Notice | None, now: Notice | None) -> bool:
    if before is None or now is None:
        return before is not now
    return (before.kind, before.because) != (now.kind, now.because)
