"""Rounds of replicas with a quorum: the rules, what a leader tells late members, drawn schedules in virtual time."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

import pytest

from elastic.config import JobSpec
from elastic.errors import ConfigError
from elastic.protocol import membership, outer_round
from elastic.protocol.membership import Action, AgentUp, Commit, Committed, Elected, Event, Tell
from elastic.protocol.messages import Announce, Doing, EndRound, Progress, RingUp, WorkerDead
from elastic.protocol.outer_round import Quorum

BEAT_S = 0.25


@pytest.mark.parametrize("least", [0, -1, 1.5, True])
def test_a_quorum_is_of_one_replica_or_more(least: int) -> None:
    with pytest.raises(ConfigError, match="min_replicas"):
        Quorum(least)


@pytest.mark.parametrize("grace_s", [-0.1, float("inf"), float("nan"), 1e6])
def test_a_grace_window_has_an_end(grace_s: float) -> None:
    with pytest.raises(ConfigError, match="grace_s"):
        Quorum(1, grace_s)


def test_a_round_is_over_when_its_quorum_has_waited_for_the_grace_window() -> None:
    assert not outer_round.is_over(1, 0.0, [])
    assert outer_round.is_over(1, 0.0, [(1, 0.0)])
    assert not outer_round.is_over(2, 0.0, [(1, 9.0)]), "one is no quorum of two"
    assert not outer_round.is_over(2, 0.0, [(1, 9.0), (0, 9.0)]), "who has stopped early, or has no replica, is none"
    assert not outer_round.is_over(2, 5.0, [(1, 9.0), (1, 4.9)]), "the window begins with the second"
    assert outer_round.is_over(2, 5.0, [(1, 4.9), (1, 9.0), (1, 5.0)]), "the third is not needed"
    assert outer_round.is_over(3, 1.0, [(2, 1.0), (1, 2.0)])


def test_each_worker_trains_one_replica_and_more_below_the_quorum() -> None:
    assert outer_round.computes(2, 0, 5, left=0, over=True), "each living worker takes part"
    assert not outer_round.computes(2, 0, 5, left=1, over=False), "with its last one"
    assert not outer_round.computes(2, 1, 2, left=0, over=False)
    assert outer_round.computes(2, 0, 1, left=1, over=False)
    assert outer_round.computes(2, 1, 1, left=0, over=False)
    assert not outer_round.computes(2, 1, 1, left=0, over=True)


# ------------------------------------------------------------------------------------------------------- the leader


class Leader:
    """Three members of one node, in a ring that trains."""

    def __init__(self) -> None:
        self.group = membership.Group(JobSpec(name="job", command=("train",), workers=3), seed="seed")
        self.feed(Elected(1), AgentUp("n", 3))
        for slot in range(3):
            self.feed(Announce(f"n.{slot}.0", "n", slot, 1, "host", 1, "same"))
        for slot in range(3):
            self.feed(RingUp(f"n.{slot}.0", 1))

    def feed(self, *events: Event) -> list[EndRound]:
        told = []
        for event in events:
            for action in membership.advance(self.group, (event,), 0.0):
                told += self._done(action)
        return told

    def _done(self, action: Action) -> list[EndRound]:
        if isinstance(action, Commit):
            return self.feed(Committed(action.generation.number))
        if isinstance(action, Tell) and isinstance(action.order, EndRound):
            assert action.to == (action.order.worker_id,)
            return [action.order]
        return []


def beat(slot: int, doing: Doing = Doing.SHARD, *, op: int = 7, replicas: int = 0, waited_s: float = 0.0) -> Progress:
    ms = round(1000 * waited_s)
    word = Progress(f"n.{slot}.0", 1, op, op, "a round", doing=doing, for_ms=ms, replicas=replicas)
    return replace(word, min_replicas=2, grace_ms=1000)


def waits(slot: int, waited_s: float, op: int = 7, replicas: int = 1) -> Progress:
    return beat(slot, Doing.WAITING, op=op, replicas=replicas, waited_s=waited_s)


def test_a_late_member_is_told_to_stop_once_the_others_have_a_quorum() -> None:
    leader = Leader()
    assert leader.feed(waits(0, 5.0), beat(1), beat(2)) == []
    assert leader.feed(waits(1, 0.9), beat(2)) == [], "the grace window is not over"
    end = EndRound(1, "n.2.0", 1, 7)
    assert leader.feed(waits(1, 1.1), beat(2)) == [end]
    assert leader.feed(beat(2)) == [end], "an order may be lost, so it is said again"
    assert leader.feed(waits(2, 0.0, replicas=0)) == [] and leader.feed(beat(2, op=8)) == []


@pytest.mark.parametrize(
    "others",
    [
        (waits(0, 9.0, op=6), waits(1, 9.0)),
        (replace(waits(0, 9.0), generation=0), waits(1, 9.0)),
        (waits(0, 9.0, replicas=0), waits(1, 9.0)),
        (beat(0, replicas=1, waited_s=9.0), waits(1, 9.0)),
    ],
    ids=["another operation", "another generation", "no replica", "computes a second one"],
)
def test_only_members_that_have_done_their_part_of_this_round_make_a_quorum(others: tuple[Progress, ...]) -> None:
    assert Leader().feed(*others, beat(2)) == []


def test_a_dead_member_makes_no_quorum() -> None:
    leader = Leader()
    leader.feed(waits(0, 9.0), waits(1, 9.0), WorkerDead("n.1.0", "killed"))
    assert leader.feed(beat(2)) == []


def test_without_a_quorum_nobody_is_told_to_stop() -> None:
    plain = [replace(word, min_replicas=0, grace_ms=0) for word in (waits(0, 9.0), waits(1, 9.0), beat(2))]
    assert Leader().feed(*plain) == []


# ---------------------------------------------------------------------------------------------- drawn schedules


@dataclass(frozen=True)
class Rules:
    """outer_round, or a rule of it that is wrong."""

    is_over: Callable[[int, float, Iterable[tuple[int, float]]], bool] = outer_round.is_over
    computes: Callable[..., bool] = outer_round.computes


@dataclass
class Replica:
    unit: int
    steps: int = 0
    begun_s: float = 0.0


@dataclass
class Worker:
    """A worker in virtual time. step_s: of an inner step. held: unit -> inner steps of what it has delivered."""

    step_s: float
    todo: list[int] = field(default_factory=list)
    running: Replica | None = None
    held: dict[int, int] = field(default_factory=dict)
    whole: int = 0
    since_s: float = 0.0
    over: bool = False
    alive: bool = True


class Rounds:
    """Rounds of workers of any speed that die at any time, under a leader that may be away. A generation follows a
    death within 0.1 s; what a dead worker held is lost, and its units are dealt to the survivors."""

    def __init__(self, seed: int, rules: Rules) -> None:
        self.rng, self.rules = random.Random(seed), rules
        draw = self.rng
        count = draw.randint(1, 5)
        self.inner_steps, self.grace_s = draw.randint(1, 6), draw.choice([0.0, 0.0, 0.5, 3.0])
        self.units = draw.randint(count, count + 2)
        self.quorum = draw.randint(1, self.units)
        self.workers = [Worker(draw.choice([0.1, 0.1, 0.2, 1.0, 5.0])) for _ in range(count)]
        self.away = (draw.uniform(0, 20), draw.uniform(0, 10)) if draw.random() < 0.3 else (0.0, 0.0)
        self.now_s = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.number = 0
        self.rounds = 0
        self.open = False
        self.quorum_s: float | None = None
        self.disturbed = False
        for worker in self.workers[1:]:  # one lives
            if draw.random() < 0.4:
                self.after(draw.uniform(0, 30), partial(self.die, worker))

    @property
    def alive(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.alive]

    @property
    def waiting(self) -> list[Worker]:
        return [one for one in self.alive if one.running is None and not one.todo]

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        self.number += 1
        heapq.heappush(self.events, (self.now_s + seconds, self.number, act))

    def run(self) -> None:
        self.begin()
        self.after(BEAT_S, self.beat)
        while self.rounds < 6:
            self.now_s, _, act = heapq.heappop(self.events)
            assert self.now_s < 2000, "a round does not end"
            act()

    def begin(self) -> None:
        alive = self.alive
        self.open, self.quorum_s, self.disturbed = True, None, False
        for place, worker in enumerate(alive):
            worker.todo = [unit for unit in range(self.units) if unit % len(alive) == place]
            worker.held, worker.whole, worker.over = {}, 0, False
        for worker in alive:
            self.go_on(worker)

    def made(self, worker: Worker) -> int:
        return sum(steps > 0 for steps in worker.held.values())

    def go_on(self, worker: Worker) -> None:
        """The worker takes its next unit, or waits."""
        while worker.alive and worker.running is None and worker.todo:
            unit = worker.todo.pop(0)
            left, over = len(worker.todo), worker.over
            if self.rules.computes(self.quorum, self.made(worker), len(self.alive), left=left, over=over):
                worker.running = Replica(unit)
                self.after(worker.step_s, lambda: self.stepped(worker, worker.running))
            else:
                worker.held[unit] = 0
        if worker.alive and worker.running is None:
            worker.since_s = self.now_s
            if self.quorum_s is None and sum(one.whole for one in self.waiting) >= self.quorum:
                self.quorum_s = self.now_s
            self.commit_if_complete()

    def stepped(self, worker: Worker, replica: Replica | None) -> None:
        if not worker.alive or replica is None or worker.running is not replica:
            return
        replica.steps += 1
        if replica.steps < self.inner_steps and not worker.over:
            self.after(worker.step_s, lambda: self.stepped(worker, replica))
            return
        worker.held[replica.unit] = replica.steps
        worker.running = None
        worker.whole += replica.steps == self.inner_steps
        self.go_on(worker)

    def beat(self) -> None:
        self.after(BEAT_S, self.beat)
        begins_s, lasts_s = self.away
        if begins_s <= self.now_s < begins_s + lasts_s:
            self.disturbed = True
            return
        delivered = [(one.whole, self.now_s - one.since_s) for one in self.waiting]
        for worker in self.alive:
            if worker.running is not None and self.rules.is_over(self.quorum, self.grace_s, delivered):
                whole = sum(one.whole for one in self.waiting)
                assert whole >= self.quorum, f"a replica is told to stop, and {whole} of {self.quorum} are there"
                if not self.disturbed:
                    assert self.quorum_s is not None and self.now_s >= self.quorum_s + self.grace_s, "no grace"
                worker.over = True

    def die(self, worker: Worker) -> None:
        if worker.alive:
            worker.alive, self.disturbed = False, True
            self.after(0.1, self.deal)

    def deal(self) -> None:
        """The next generation: it has heard of no order to stop."""
        alive = self.alive
        if not self.open:
            return
        present = {unit for one in alive for unit in (*one.held, *one.todo)}
        present |= {one.running.unit for one in alive if one.running is not None}
        for worker in alive:
            worker.over, worker.since_s = False, self.now_s
        for unit in sorted(set(range(self.units)) - present):
            min(alive, key=lambda one: len(one.held) + len(one.todo)).todo.append(unit)
        for worker in alive:
            self.go_on(worker)

    def commit_if_complete(self) -> None:
        held = [unit for one in self.alive for unit in one.held]
        if not self.open or len(held) < self.units or any(one.running is not None or one.todo for one in self.alive):
            return
        assert sorted(held) == list(range(self.units)), "a replica counts once"
        trained = sum(self.made(one) for one in self.alive)
        assert trained >= self.quorum, f"{trained} replicas, and the quorum is {self.quorum}"
        for one in self.alive:
            assert self.made(one) >= 1, "a living worker takes part"
        if not self.disturbed and len(self.alive) >= self.quorum:
            assert trained == len(self.alive), "each worker is one replica"
            assert self.quorum_s is not None
            slack_s = self.grace_s + 2 * BEAT_S + max(one.step_s for one in self.alive)
            assert self.now_s <= self.quorum_s + slack_s, "a late replica is waited for"
        self.rounds, self.open = self.rounds + 1, False
        self.after(0.01, self.begin)


SCHEDULES = 1000


def first_violation(rules: Rules) -> str:
    for seed in range(SCHEDULES):
        try:
            Rounds(seed, rules).run()
        except AssertionError as wrong:
            return f"seed {seed}: {wrong}"
    return ""


def test_drawn_schedules_keep_every_promise() -> None:
    assert first_violation(Rules()) == ""


@pytest.mark.parametrize(
    ("wrong", "promise"),
    [
        (Rules(is_over=lambda least, s, seen: outer_round.is_over(least - 1, s, [*seen, (0, 99)])), "told to stop"),
        (Rules(is_over=lambda least, s, seen: outer_round.is_over(least, s / 2, seen)), "no grace"),
        (Rules(is_over=lambda least, s, seen: False), "waited for"),
        (Rules(computes=lambda least, made, *_, left, over: made == left == 0), "and the quorum is"),
        (Rules(computes=lambda least, made, *_, left, over: made == left == 0 and not over), "quorum is|takes part"),
        (Rules(computes=lambda *_, left, over: left == 1), "quorum is|takes part"),
        (Rules(computes=lambda *_, left, over: True), "each worker is one replica"),
    ],
    ids=["too few", "no grace", "never over", "no more below it", "late ones take no part", "not the last", "all"],
)
def test_a_wrong_rule_is_found(wrong: Rules, promise: str) -> None:
    found = first_violation(wrong)
    assert any(words in found for words in promise.split("|")), found
