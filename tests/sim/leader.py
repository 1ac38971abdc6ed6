"""The leader's shell: one mailbox, one owner of the group, and commits that may time out."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from elastic import membership
from elastic.membership import Commit, CommitRefused, Committed, Elected, End, Event, Note, State, Tell, Tick
from elastic.messages import Generation, Kind
from elastic.publishing import Publisher

if TYPE_CHECKING:
    from tests.sim.agent import Stream
    from tests.sim.world import World


class Leader:
    """A process that was elected once. It may be paused for so long that another one leads when it wakes."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.term = world.records.elect()
        self.group = membership.new(world.spec, seed="simulated")
        self.alive = True
        self.paused = False
        self.streams: dict[str, Stream] = {}
        self.publisher = Publisher()
        self._mailbox: deque[Event] = deque()
        self._asleep: list[Callable[[], None]] = []
        self._next_tick_s = math.inf
        self.publisher.remember(world.records.chain())
        self.post(Elected(self.term, world.records.chain()))

    @property
    def leads(self) -> bool:
        return self.alive and self.term == self.world.records.term

    def post(self, event: Event) -> None:
        if not self.alive:
            return
        self._mailbox.append(event)
        self.world.clock.after(self.world.clock.between(0, 0.0005), self._turn)

    def crash(self) -> None:
        self.alive = False
        self.world.hook("leader_crash")
        if self.group.state is State.QUIESCING:
            self.world.reach("leader lost in QUIESCING")
        for stream in list(self.streams.values()):
            stream.cut("the leader is gone")

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        for act in self._asleep:
            self.world.clock.after(0, act)
        self._asleep = []

    def _turn(self) -> None:
        if not self.alive or not self._mailbox:
            return
        if self.paused:
            self._asleep.append(self._turn)
            return
        self._apply(self._mailbox.popleft())

    def _apply(self, event: Event) -> None:
        before = self.group
        self.group, actions = membership.step(self.group, event, self.world.clock.now_s)
        if actions:
            self.world.say(f"leader {self.term}", f"{event}")
        if before.state is not self.group.state:
            self.world.reach(f"{before.state} -> {self.group.state}")
            self.world.hook(f"leader_{self.group.state}")
        if any(isinstance(action, End) for action in actions) and not self.leads:
            self.resign()
            return
        if isinstance(event, CommitRefused):
            self.resign()
            return
        for action in actions:
            match action:
                case Commit(record):
                    self.world.hook("leader_commit")
                    self._try_commit(record)
                case Tell(to, order):
                    for agent, stream in list(self.streams.items()):
                        workers = tuple(w for w in to if self.world.workers[w].agent.node == agent)
                        if workers:
                            stream.tell(workers, order)
                case Note(name, fields):
                    self.world.say(f"leader {self.term}", f"  note {name} {fields}")
                    if name in ("straggler", "demoted"):
                        self.world.reach(f"a worker was {'demoted' if name == 'demoted' else 'named a straggler'}")
                case End():
                    self.world.end(action)
        self._set_timer()

    def resign(self) -> None:
        self.world.reach("a leader resigned")
        self.world.say(f"leader {self.term}", "resigns")
        self.alive = False
        for stream in list(self.streams.values()):
            stream.cut("the leader resigned")

    def _set_timer(self) -> None:
        deadline_s = self.group.deadline_s
        if deadline_s < self._next_tick_s:
            self._next_tick_s = deadline_s
            wait_s = max(0.0, deadline_s - self.world.clock.now_s) + 0.001
            self.world.clock.after(wait_s, lambda: self._tick(deadline_s))

    def _tick(self, deadline_s: float) -> None:
        if deadline_s != self._next_tick_s or not self.alive:
            return
        if self.paused:
            self._asleep.append(lambda: self._tick(deadline_s))
            return
        self._next_tick_s = math.inf
        self._apply(Tick())
        self.world.ticked(self.group)

    # ----------------------------------------------------------------------------------------- the store

    def _try_commit(self, record: Generation) -> None:
        """The request is under way also if this process dies now."""
        clock = self.world.clock
        if self.paused:
            self._asleep.append(lambda: self._try_commit(record))
        elif clock.chance(self.world.store_trouble):
            self.world.reach("a commit timed out")
            if clock.chance(0.6):
                clock.after(clock.between(0.001, 1.5), lambda: self._write(record))
            clock.after(1.0, lambda: self._read(record))
        else:
            clock.after(clock.between(0.0005, 0.005), lambda: self._request(record))

    def _request(self, record: Generation) -> None:
        self._write(record)
        self.world.clock.after(self.world.clock.between(0.0005, 0.005), lambda: self._read(record))

    def _write(self, record: Generation) -> None:
        if self.world.records.commit(self.term, record):
            self.world.committed(record)

    def _read(self, record: Generation) -> None:
        if not self.alive:
            return
        if self.paused:
            self._asleep.append(lambda: self._read(record))
            return
        records = self.world.records
        if records.all.get(record.number) == record:
            if record.kind is Kind.LOSS:
                self.world.hook("leader_committed_loss")
            self.post(Committed(record.number))
        elif self.leads and records.top < record.number:
            self._try_commit(record)
        else:
            self.post(CommitRefused(record.number, "another leader wrote"))
