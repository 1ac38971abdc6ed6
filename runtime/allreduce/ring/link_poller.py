"""Which connections of a ring can do something now.

With many members most links are idle: nothing here looks at all of them between two events.
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterable

from runtime.allreduce.ring.frames import PeerLink


class LinkPoller:
    """For one thread at a time; `wake` is for any. `note` has to be called after each use of a link."""

    def __init__(self, links: Iterable[PeerLink]) -> None:
        self.unsent: set[PeerLink] = set()
        """Links that have something to send."""
        self.holding: set[PeerLink] = set()
        """Links that have read what poll does not report."""
        self.ended: set[PeerLink] = set()
        self._links = {link.fileno(): link for link in links}
        self._poller = select.poll()
        self._watched: dict[int, int] = {}
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._wake, select.POLLIN)
        for link in self._links.values():
            self._watch(link, unsent=False)

    def wake(self) -> None:
        """End the `poll` that is under way, or the next one."""
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        os.close(self._wake)

    def poll(self, wait_ms: float) -> list[tuple[PeerLink, int]]:
        """Wait for events: (link, mask of select.POLL...) of each link that has some."""
        found = []
        for fd, event in self._poller.poll(wait_ms):
            if fd == self._wake:
                os.eventfd_read(self._wake)
            else:
                found.append((self._links[fd], event))
        return found

    def note(self, link: PeerLink) -> None:
        """Note what has become of a link that was used."""
        unsent = link.unsent
        for links, belongs in ((self.unsent, unsent), (self.holding, link.holds), (self.ended, link.ended)):
            if belongs:
                links.add(link)
            else:
                links.discard(link)
        self._watch(link, unsent)

    def _watch(self, link: PeerLink, unsent: bool) -> None:
        """Let the poller report what the link can do. It does not know a link that is idle: it would report the hang-up
        of that again and again."""
        fd = link.fileno()
        mask = 0 if link.ended else (0 if link.stalled else select.POLLIN) | (select.POLLOUT if unsent else 0)
        if mask == self._watched.get(fd, 0):
            return
        self._watched[fd] = mask
        if mask:
            self._poller.register(fd, mask)
        else:
            self._poller.unregister(fd)
