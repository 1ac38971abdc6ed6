"""How a node leaves the job: does to the agent's workers what policy.py decides about notices.

This agent keeps the wish of each worker to drain. It repeats the wish, with the time that is left, to every new leader,
and when a worker announces itself.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator

from elastic.agent.leader_session import LeaderSession
from elastic.agent.workers import WorkerManager
from elastic.preemption import policy
from elastic.preemption.notice import LONGEST_S, Notice, NoticeKind
from elastic.preemption.policy import HeldNotice, Stay, StayPhase
from elastic.preemption.watcher import NoticeWatchers
from elastic.protocol import worker_slot
from elastic.protocol.messages import Drain, DrainOver, DrainWish
from elastic.protocol.worker_slot import Slot
from elastic.records.journal import Journal

OPERATOR = "operator"
"""The source of notices by `elastic drain`."""

SIGTERM = "SIGTERM"
"""The source of notices by that signal."""

LOSS = "loss"
"""The source of the notice of a node that is left because it has lost a worker."""


class NodeDrain:
    """Used on the event loop."""

    def __init__(self, journal: Journal, workers: WorkerManager, leader: LeaderSession) -> None:
        self._journal = journal
        self._workers = workers
        self._leader = leader
        self._stay = Stay()
        self._timer: asyncio.TimerHandle | None = None
        self.notices = NoticeWatchers(journal, lambda source, notice: self._step(policy.Heard(source, notice)))

    def asked(self, left_s: float, because: str, source: str = OPERATOR) -> None:
        """An operator wants this node empty, until `notices.heard(source, None)` takes that back."""
        self.notices.heard(source, Notice(NoticeKind.ASKED, left_s, because))

    def announced(self, worker_id: str) -> None:
        """A worker has announced itself to the leader: repeat its wish to drain, if there is one."""
        if (wish := self._wish_of(worker_id)) is not None:
            self._leader.say(wish)
            self._tell(worker_id)

    def wishes(self) -> Iterator[DrainWish]:
        """The wishes to drain that a new leader has to be told, as of now."""
        for worker_id in self._here():
            if (wish := self._wish_of(worker_id)) is not None:
                yield wish

    @property
    def is_leaving(self) -> bool:
        """Whether this node has to leave, for whatever reason."""
        return self._stay.phase is not StayPhase.STAYING

    @property
    def is_done(self) -> bool:
        """Whether this node has to leave and no worker is on it any more."""
        idle = all(
            slot.phase in (worker_slot.SlotPhase.AWAY, worker_slot.SlotPhase.OVER) for slot in self._workers.slots
        )
        return idle and self.is_leaving

    def look(self) -> None:
        """Note that the node is empty, once for each notice."""
        if self.is_done and not self.notices.told:
            self.notices.left()

    def close(self) -> None:
        """Stop watching, as NoticeWatchers does."""
        if self._timer is not None:
            self._timer.cancel()
        self.notices.close()

    def _tick(self) -> None:
        self._step(policy.StayTick())

    def _step(self, event: policy.Event) -> None:
        before = self._stay
        self._stay, actions = policy.step(self._stay, event, time.monotonic())
        if self._stay.notices != before.notices:
            for worker_id in self._here():
                self._tell(worker_id, before.urgent)
        for action in actions:
            match action:
                case policy.LeaveNode(ends_s, because):
                    self._journal.write(
                        "node_leaves", seconds_left=round(ends_s - time.monotonic(), 3), because=because
                    )
                    self._leave()
                case policy.BreakRing(because):
                    self._journal.write("node_late", because=because)
                    self._end_workers(lambda slot: slot.served and not slot.released)
                case policy.EndWorkers(because):
                    self._journal.write("node_out", because=because)
                    self._end_workers(lambda slot: True)
                case policy.Return(because):
                    self._journal.write("node_stays", because=because)
                    self._return()
                case policy.Advise(because):
                    self._journal.write("advised", because=because)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._stay.deadline_s < math.inf:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, self._stay.deadline_s - time.monotonic()), self._tick)
        self.look()

    def _leave(self) -> None:
        self._workers.for_all_slots(worker_slot.NodeLeaves())
        for wish in self.wishes():
            self._leader.say(wish)

    def _end_workers(self, which: Callable[[Slot], bool]) -> None:
        """End these workers. A member is ended only if others go on: no notice may end the last copy of the state."""
        for slot in list(self._workers.slots):
            is_member = slot.served and not slot.released
            if slot.lives and which(slot) and (self._workers.has_others or not is_member):
                self._workers.supervise_worker(slot.worker_id, worker_slot.KillOrdered())

    def _return(self) -> None:
        for worker_id in self._here():
            self._leader.say(DrainOver(worker_id))
        self._workers.for_all_slots(worker_slot.NodeStays())

    def _tell(self, worker_id: str, before: HeldNotice | None = None) -> None:
        """Tell the worker which notice stands. before: the one that stood, which is over if none stands now."""
        held = self._stay.urgent or before
        if held is not None:
            order = Drain(
                self._leader.term,
                worker_id,
                _left_ms(held),
                held.because,
                signalled=SIGTERM in self._stay.notices,
                kind=held.kind,
                said_by=held.source,
                over=self._stay.urgent is None,
            )
            self._workers.socket.order(worker_id, order)

    def _here(self) -> list[str]:
        return [slot.worker_id for slot in self._workers.slots if slot.lives and slot.joined]

    def _wish_of(self, worker_id: str) -> DrainWish | None:
        held = self._stay.urgent
        if held is None:
            return None
        return DrainWish(worker_id, held.because, _left_ms(held))


def _left_ms(held: HeldNotice) -> int:
    return round(1000 * min(max(0.0, held.ends_s - time.monotonic()), LONGEST_S))
