"""The leader's shell: one mailbox, one owner of the group, a lease, and commits that may time out."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from elastic.checkpoints.pointer import Pointer
from elastic.protocol import membership
from elastic.protocol.failure_detector import AgentMonitor
from elastic.protocol.membership import (
    AgentDown,
    AgentUp,
    Commit,
    CommitRefused,
    Committed,
    Elected,
    End,
    Event,
    GroupTick,
    Note,
    Point,
    PointerAt,
    Resized,
    Stopped,
    Tell,
)
from elastic.protocol.membership.partitions import end, silence
from elastic.protocol.messages import Generation, Kind, Order, Pointed
from elastic.protocol.worker_id import node_of
from elastic.wire.broadcast import Publisher
from tests.membership_step import step

if TYPE_CHECKING:
    from tests.sim.agent import Stream
    from tests.sim.world import World

LEASE_S = 3.0
RETRY_S = 0.1
EVENTS_AT_ONCE = 256
"""As of elastic/rendezvous/leader.py."""


class Leader:
    """A process that was elected once. It may be paused, or cut off from the store, for so long that another one leads
    when it wakes."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.term = world.records.elect()
        self.host = f"leader {self.term}"
        self.clock = world.new_timepiece()
        self.group = membership.Group(world.spec, seed="simulated", revives=world.scene.revives)
        self.alive = True
        self.paused = False
        self.cut_off = False
        """From the store."""
        self.streams: dict[str, Stream] = {}
        self._named_s: dict[str, float] = {}
        """Node -> when its silence was noticed last."""
        self._monitor = AgentMonitor(world.spec.timing, 1, self.clock.now_s)
        self._mailbox: deque[Event] = deque()
        self._asleep: list[Callable[[], None]] = []
        self._next_tick_s = math.inf
        self.publisher = Publisher()
        self.publisher.remember(world.records.chain())
        self.post(Elected(self.term, world.records.chain()))
        self._look_around()
        self._watch()

    @property
    def leads(self) -> bool:
        return self.alive and self.term == self.world.records.term

    @property
    def has_store(self) -> bool:
        return not (self.cut_off or self.world.store_away)

    def post(self, event: Event) -> None:
        if not self.alive:
            return
        self._mailbox.append(event)
        self.world.clock.after(self.world.clock.between(0, 0.0005), self._turn)

    def crash(self) -> None:
        self.world.lost_leader(self.group)
        self._leave("the leader is gone")
        self.world.hook("leader_crash")

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        waiting, self._asleep = self._asleep, []
        for act in waiting:
            self.world.clock.after(0, act)

    def resign(self) -> None:
        if self.alive:
            self.world.reach("a leader resigned")
            self.world.say(self.host, "resigns")
            self._leave("the leader resigned")

    def _leave(self, because: str) -> None:
        self.alive = False
        for stream in list(self.streams.values()):
            stream.cut(because)

    def _do(self, act: Callable[[], None]) -> None:
        """Now, or when this process is thawed; not at all if it is dead."""
        if self.paused:
            self._asleep.append(lambda: self._do(act))
        elif self.alive:
            act()

    def stop(self, *, at_once: bool) -> None:
        """Somebody asks for the end of the job."""
        self.post(Stopped("asked to stop", at_once))

    def resize(self) -> None:
        """The documents of the fleet say how large the job is to be."""
        if self.alive and self.world.size and self.world.size != self.group.size:
            self.post(Resized(self.world.size))

    def _look_around(self) -> None:
        """What a new leader reads, besides the records."""
        after, between = self.world.clock.after, self.world.clock.between
        after(between(0.001, 0.02), lambda: self._do(self._find_pointer))
        after(between(0.001, 1.0), lambda: self._do(self.resize))

    # -------------------------------------------------------------------------------------------- agents

    def attach(self, stream: Stream) -> None:
        node = stream.agent.node
        self.streams[node] = stream
        self._monitor.watch(node, self.clock.now_s)

    def detach(self, stream: Stream) -> None:
        node = stream.agent.node
        if self.streams.get(node) is stream:
            del self.streams[node]
            self._monitor.forget(node)
            self.post(AgentDown(node, ended=True))

    def hear(self, stream: Stream, event: Event) -> None:
        """Of a stream that was replaced nothing is heard any more."""
        if self.streams.get(stream.agent.node) is stream:
            self._monitor.beat(stream.agent.node, self.clock.now_s)
            self.post(event)

    def beat(self, stream: Stream) -> None:
        if self.streams.get(stream.agent.node) is stream and not self.paused:
            self._monitor.beat(stream.agent.node, self.clock.now_s)

    def _watch(self) -> None:
        if not self.alive or self.world.over:
            return
        self._do(self._judge)
        self.world.clock.after(self.world.spec.timing.beat_s, self._watch)

    def _judge(self) -> None:
        silent, back = self._monitor.look(self.clock.now_s)
        for node in silent:
            self.world.reach("an agent was silent on a stream that was up")
            self._named_s[node] = self.clock.now_s
            self.post(AgentDown(node, self._monitor.silence_s))
        for node in back:
            self.post(AgentUp(node))

    # -------------------------------------------------------------------------------------------- group

    def _turn(self) -> None:
        """What has come together is taken together."""
        if not self.alive or not self._mailbox:
            return
        if self.paused:
            self._asleep.append(self._turn)
            return
        events = [self._mailbox.popleft() for _ in range(min(len(self._mailbox), self.world.scene.batch))]
        self._apply(events)

    def _apply(self, events: list[Event]) -> None:
        before = self.group.state
        if len(events) > 1:
            actions = membership.advance(self.group, events, self.clock.now_s)
            self.world.reach("several events were taken together")
            self.world.events += len(events)
        else:
            seen = self.group.workers
            self.group, actions = step(self.group, events[0], self.clock.now_s)
            self.world.stepped("membership", before, events[0], self.group.state)
            for worker in seen.keys() & self.group.workers.keys():
                if (was := seen[worker].stage) is not (now := self.group.workers[worker].stage):
                    self.world.changes.add(("worker", str(was), type(events[0]).__name__, str(now)))
        self.world.judge.grouped(self.group)
        if actions and self.world.is_told:
            self.world.say(self.host, f"{events}")
        if before is not self.group.state:
            self.world.hook(f"leader_{self.group.state}")
            self.world.paths.told(self.group)
        end = next((action for action in actions if isinstance(action, End)), None)
        if (end and not self.leads) or any(isinstance(event, CommitRefused) for event in events):
            self.resign()
            return
        for action in actions:
            match action:
                case Commit(record):
                    self.world.hook("leader_commit")
                    self._try_commit(record)
                case Point(series, pointer):
                    self.world.clock.after(self._store_s(), self._pointing(series, pointer))
                case Tell(to, order):
                    self._tell(to, order)
                case Note(name, fields):
                    if self.world.is_told:
                        self.world.say(self.host, f"  note {name} {fields}")
                    self.world.noted(name)
                    self._given_up(name, fields)
                case End():
                    self._finish(action)
        self._set_timer()

    def _tell(self, to: tuple[str, ...], order: Order) -> None:
        by_node: dict[str, list[str]] = {}
        for worker in to:
            by_node.setdefault(node_of(worker), []).append(worker)
        for node, workers in by_node.items():
            if node in self.streams:
                self.streams[node].tell(tuple(workers), order)

    def _given_up(self, event: str, fields: Mapping[str, object]) -> None:
        """Was it before its silence counted by itself?"""
        if event != "member_lost":
            return
        node = node_of(str(fields["worker_id"]))
        if fields["because"] == end(node):
            self.world.reach("a node was given up because its kernel had closed everything")
        if fields["because"] == silence(node):
            since_s = self._named_s.get(node, -math.inf)
            if self.clock.now_s < since_s + self.world.spec.timing.suspect_s:
                self.world.reach("a silent node was given up because the others waited for it")

    def _finish(self, end: End) -> None:
        """The end is a transaction too: whoever has lost the lead decides nothing."""
        if not self.leads:
            self.resign()
        elif not self.has_store:
            self.world.clock.after(RETRY_S, lambda: self._do(lambda: self._finish(end)))
        else:
            self.world.end(end)

    def _set_timer(self) -> None:
        deadline_s = membership.deadline_s(self.group)
        if deadline_s < self._next_tick_s:
            self._next_tick_s = deadline_s
            wait_s = self.clock.until(deadline_s) + 0.001
            self.world.clock.after(wait_s, lambda: self._tick(deadline_s))

    def _tick(self, deadline_s: float) -> None:
        if deadline_s != self._next_tick_s or not self.alive or self.world.over:
            return
        if self.paused:
            self._asleep.append(lambda: self._tick(deadline_s))
            return
        self._next_tick_s = math.inf
        self._apply([GroupTick()])
        json.dumps(membership.status(self.group))
        self.world.ticked(self.group, self.clock.now_s)

    # ----------------------------------------------------------------------------------------- the store

    def store_is_gone(self) -> None:
        """It cannot renew its lease; when that is over, by its own clock, it leads no more."""
        self.world.clock.after(LEASE_S, lambda: self._do(lambda: None if self.has_store else self.resign()))

    def _store_s(self) -> float:
        return self.world.clock.between(0.0005, 0.005)

    def _find_pointer(self) -> None:
        """Tried until the store answers."""
        if not self.has_store:
            self.world.clock.after(RETRY_S, lambda: self._do(self._find_pointer))
        elif (pointer := self.world.records.pointer) is not None:
            self.post(PointerAt(pointer.entry))

    def _pointing(self, series: str, pointer: Pointer) -> Callable[[], None]:
        return lambda: self._do(lambda: self._point(series, pointer))

    def _point(self, series: str, pointer: Pointer) -> None:
        """Tried once: the next checkpoint moves it all the same."""
        if not self.has_store or (now := self.world.records.point(self.term, pointer)) is None:
            return
        self.post(PointerAt(now.entry))
        holds = now == pointer
        self._tell((pointer.holder,), Pointed(self.term, pointer.holder, series, pointer.entry, holds))

    def _try_commit(self, record: Generation) -> None:
        """The request is under way also if this process dies now."""
        clock = self.world.clock
        if not self.alive:
            return
        if self.paused:
            self._asleep.append(lambda: self._try_commit(record))
        elif not self.has_store:
            self.world.reach("a commit waited for the store")
            clock.after(RETRY_S, lambda: self._try_commit(record))
        elif clock.chance(self.world.store_trouble):
            self.world.reach("a commit timed out")
            if clock.chance(0.6):
                clock.after(clock.between(0.001, 1.5), lambda: self._write(record))
            clock.after(1.0, lambda: self._read(record))
        else:
            clock.after(self._store_s(), lambda: self._request(record))

    def _request(self, record: Generation) -> None:
        self._write(record)
        self.world.clock.after(self._store_s(), lambda: self._read(record))

    def _write(self, record: Generation) -> None:
        if not self.world.store_away and self.world.records.commit(self.term, record):
            self.world.committed(record)

    def _read(self, record: Generation) -> None:
        if not self.alive:
            return
        if self.paused:
            self._asleep.append(lambda: self._read(record))
            return
        records = self.world.records
        if not self.has_store:
            self.world.clock.after(RETRY_S, lambda: self._read(record))
        elif records.all.get(record.number) == record:
            if record.kind is Kind.LOSS:
                self.world.hook("leader_committed_loss")
            self.post(Committed(record.number))
        elif self.leads and records.top < record.number:
            self._try_commit(record)
        else:
            self.post(CommitRefused(record.number, "another leader wrote"))
