"""The pure membership machine alone: a job of N members forms, trains, loses one, goes on and gets another leader.

What the leader does with its mailbox: `membership.advance` with as many events as it takes at once, and a look at the
group's next deadline.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastic.config import JobSpec
from elastic.protocol import membership
from elastic.protocol.membership import AgentUp, Commit, Committed, Elected, Event, Group, State
from elastic.protocol.messages import Announce, Doing, Generation, Progress, Report, RingState, RingUp, WorkerDead
from elastic.rendezvous.leader import events_at_once


@dataclass(frozen=True, slots=True)
class Part:
    """So many decisions of one kind, and how long they took together."""

    name: str
    decisions: int
    seconds: float

    @property
    def per_s(self) -> float:
        return self.decisions / self.seconds

    @property
    def decision_us(self) -> float:
        return 1e6 * self.seconds / self.decisions


class Drill:
    """One life of a group of so many members, each on a node of its own, with one shard each."""

    def __init__(self, members: int) -> None:
        spec = JobSpec(name="drill", command=("train",), workers=members, min_workers=1)
        self._group: Group = membership.Group(spec, seed="drill")
        self._now_s = 0.0
        self._committing: Generation | None = None
        self.workers = [f"n{number:06}.0.0" for number in range(members)]
        self.parts: list[Part] = []

    def run(self) -> Sequence[Part]:
        lost, *left = self.workers
        self._part("elect", [Elected(1)])
        self._part("form", (event for number, worker in enumerate(self.workers) for event in _arrival(worker, number)))
        self._commit()
        self._part("build", (RingUp(worker, 1) for worker in self.workers))
        self._part("train", (_progress(worker, step) for step in (1, 2) for worker in self.workers))
        self._part("lose", [WorkerDead(lost, "killed by SIGKILL")])
        units = len(self.workers)
        self._part("report", (_report(worker, rank, units) for rank, worker in enumerate(left, start=1)))
        self._commit()
        self._part("rebuild", (RingUp(worker, 2) for worker in left))
        if self._group.state is not State.RUNNING or self._group.running is None:
            raise AssertionError(f"not running: {self._group.because}")
        if self._group.running.ids != tuple(left):
            raise AssertionError("the survivors are not who goes on")
        self._group = membership.Group(self._group.spec, seed="drill")
        assert self._committing is not None
        self._part("elect again", [Elected(2, (self._committing,))])
        self._part("adopt", (event for rank, worker in enumerate(left, start=1) for event in _arrival(worker, rank, 2)))
        return self.parts

    def _part(self, name: str, events: Iterable[Event]) -> None:
        ready = list(events)
        began_s = time.perf_counter()
        done = 0
        while done < len(ready):
            self._now_s += 0.01
            events = ready[done : done + events_at_once(len(self._group.workers))]
            done += len(events)
            actions = membership.advance(self._group, events, self._now_s)
            membership.deadline_s(self._group)
            for action in actions:
                if isinstance(action, Commit):
                    self._committing = action.generation
        self.parts.append(Part(name, len(ready), time.perf_counter() - began_s))

    def _commit(self) -> None:
        if self._committing is None:
            raise AssertionError(f"nothing is decided: {self._group.because}")
        self._part("commit", [Committed(self._committing.number)])


def _arrival(worker: str, number: int, entered: int = 0) -> tuple[Event, Event]:
    node, ring = worker.split(".")[0], RingState.LIVE if entered else RingState.NONE
    announced = Announce(worker, node, 0, 1000 + number, "10.0.0.1", 4000, "torch 2", entered, ring, 2 * entered)
    return AgentUp(node, 1), announced


def _progress(worker: str, step: int) -> Progress:
    return Progress(worker, 1, step, phase=f"step {step}", shards=0, shard_us=5000, exchange_us=100, doing=Doing.SHARD)


def _report(worker: str, rank: int, units: int) -> Report:
    """Half of them have computed their shard, the others are in it."""
    done = rank % 2 == 0
    roots, running = (((rank, rank + 1),), None) if done else ((), rank)
    return Report(worker, 1, 1, 1, has_state=True, reduced=2, units=units, roots=roots, running=running, kept=1)
