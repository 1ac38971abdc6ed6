"""Hooks about the world: it has another size, or this worker's node has to go."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from elastic.agent.worker.node_notice import REPEATED_S, NodeNotice
from runtime.session import Session

ResizeHook = Callable[[int, int, str], None]
DrainHook = Callable[[float, str], None]

LAST_CHECKPOINT_S = 20.0
LAST_CHECKPOINT_AT = 0.4
"""A node that still trains this many seconds before its end (LAST_CHECKPOINT_S), or after this part of a short time,
has no successor. It then wishes for one more checkpoint, early enough to be written before the job's last call."""


PARTING_S = 5.0
"""Seconds for which all workers delay the end until their state is on its way to the storage; if a notice says when the
machine goes, they delay it at least until so many seconds before that."""


class WorldHooks:
    """Used by the user's thread only."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._world = 0
        self._told: NodeNotice | None = None
        self._paused_in = 0
        self._wished_for: NodeNotice | None = None
        self._wishes_at_s = math.inf
        self._parting_since_s = math.inf
        self._saved = False
        self._handed_out_s = math.inf
        """When the last step began."""
        self.has_left = False
        """Whether this worker was about to leave as planned; it may be taken back even then, if all others die."""
        self.resize_hooks: list[ResizeHook] = []
        self.drain_hooks: list[DrainHook] = []

    def before_step(self) -> None:
        """Call the hooks of what has changed since the last step; all members are between two steps."""
        before, self._world = self._world, 0 if self._session.script.at.behind else self._session.world_size
        if before and self._world not in (0, before):
            for hook in self.resize_hooks:
                hook(before, self._world, self._session.because)
        self.tell_drain()

    def tell_drain(self) -> None:
        """Call the on_drain hooks, once for each notice."""
        going = self._session.going
        if going is None or _is_same(going, self._told):
            return
        self._told = going
        for hook in self.drain_hooks:
            hook(max(0.0, going.until_s - time.monotonic()), going.because)

    def take_pause(self) -> bool:
        """Whether the job now begins to wait below quorum; true once for each such generation.

        The reduction of the step that waits cannot carry a wish, but all members know of the wait at the same boundary.
        """
        before, self._paused_in = self._paused_in, self._session.generation if self._session.pauses else 0
        return self._paused_in not in (0, before)

    def may_part(self, taken: bool) -> bool:
        """Whether all may stop for good after the step that begins. taken: its state is on its way to the storage.

        They may also stop in two other cases: an earlier state was taken for this end, or there is no time for two more
        steps. Steps are assumed to take as long as the last one.
        """
        now_s = time.monotonic()
        step_s, self._handed_out_s = now_s - self._handed_out_s, now_s
        if not self._session.parting:
            self._parting_since_s, self._saved = math.inf, taken
        else:
            self._parting_since_s = min(self._parting_since_s, now_s)
            self._saved = self._saved or taken
        ends_s = min(self._parting_since_s, now_s) + PARTING_S
        if (going := self._session.going) is not None:
            ends_s = max(ends_s, going.until_s - PARTING_S)
        return self._saved or now_s + 2 * step_s > ends_s

    def take_wish(self) -> bool:
        """Whether to take a checkpoint soon: true once when a notice comes, and once more shortly before its end."""
        going, now_s = self._session.going, time.monotonic()
        if going is None:
            return False
        if not _is_same(going, self._wished_for):
            left_s = going.until_s - now_s
            self._wished_for = going
            self._wishes_at_s = now_s + max(left_s - LAST_CHECKPOINT_S, LAST_CHECKPOINT_AT * left_s)
            return True
        wants = now_s >= self._wishes_at_s
        if wants:
            self._wishes_at_s = math.inf
        return wants


def _is_same(one: NodeNotice, other: NodeNotice | None) -> bool:
    """Whether the same notice was heard again. One whose end has come is repeated with 0 seconds left."""
    if other is None or one.because != other.because:
        return False
    return abs(one.until_s - other.until_s) <= REPEATED_S or max(one.until_s, other.until_s) <= time.monotonic()
