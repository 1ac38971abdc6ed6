"""Phases of training without waiting under virtual time: stores, unit shares, notes and the end of a phase are the
product's own code (runtime/asynchronous), with its threads; membership, network and script are made up.

An operation of all workers has what all members of the newest generation bring. Its result is the same for all, and a
planned change takes effect behind it: newcomers come in the pass with which a phase begins, leavers go behind any one.
A leaver whose result is not acknowledged yet is taken back if all others die. Workers are killed at any time, also
while they ask or answer, also two at once; they stand still, for longer than it takes to be expelled, too.

Each update adds a power of two of its own to every piece, so the values of a piece say which updates are in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch

from elastic.protocol.local_phase import LOST
from runtime.asynchronous import loop, phase_notes, store
from runtime.asynchronous.loop import LocalPhases
from runtime.asynchronous.piece_copies import LostUpdates, PieceCopies
from runtime.asynchronous.store import MembersNow, ParameterStore, PieceUpdate
from runtime.asynchronous.units_left import UnitsLeft
from runtime.asynchronous.update_rules import DelayedNesterov, PieceState, StalenessBound
from runtime.recovery.transfer.connection import CopyConnection
from runtime.session import LoopPlace
from tests.sim.clock import Clock
from tests.sim.phase_members import Calls, Line, Member, Operation
from tests.sim.tasks import Ended, Tasks

PIECES = 4
UPDATES_MAX = 50
"""Float64 holds the sum of so many powers of two exactly."""
EVICT_S = 3.0
"""Whoever stands still for longer is expelled."""
LIMIT_S = 600.0
"""After the last fault; the longest unit takes seconds."""


class PhasesWorld:
    """One job. `run` raises AssertionError for whatever must not be."""

    def __init__(self, seed: int) -> None:
        self.clock = Clock(seed)
        self.tasks = Tasks(self.clock)
        drawn = self.clock.random
        self.size, self.nodes = drawn.randint(1, 5), drawn.randint(1, 3)
        self.shards, self.every = drawn.randint(1, 5), drawn.randint(1, 3)
        self.total = drawn.randint(2, 5)
        self.phase_s = drawn.choice([0.05, 0.5, 5.0])
        self.slow = drawn.choice([1.0, 1.0, 20.0])
        self.strikes = drawn.choice([0.0, 0.002, 0.01])
        self.leaves = drawn.choice([0.0, 0.0, 0.1])
        self.faults_left = drawn.randint(0, 5)
        self.members: dict[str, Member] = {}
        self.newcomers: list[str] = []
        self.generations: list[tuple[str, ...]] = [()]
        self.operations: list[Operation] = []
        self.incarnations: Counter[int] = Counter()
        self.issued = 0
        self.units: dict[int, list[int]] = {}
        """Unit -> updates that were made of it."""
        self.acknowledged: list[set[int]] = [set() for _ in range(PIECES)]
        self.forgiven: list[set[int]] = [set() for _ in range(PIECES)]
        """What is lost with owner and mirror, and was named."""
        self.named: set[int] = set()
        """Pieces that have fallen back in this phase."""
        self.gone = self.gone_before = 0
        """Workers that have died or left; and how many had before this phase."""
        self.judged: set[int] = set()
        self.lost = 0.0
        self.last_fault_s = 0.0
        self.reached: set[str] = set()

    # ------------------------------------------------------------------------------------------------- the course

    def run(self) -> set[str]:
        """What this job has gone through, by name."""
        with self._virtual():
            try:
                self._run()
            finally:
                self.tasks.end()
        return self.reached

    @contextmanager
    def _virtual(self) -> Iterator[None]:
        tasks = self.tasks

        def thread(target: Callable[[], object], name: str) -> Any:
            process = tasks.me().process
            return SimpleNamespace(start=lambda: tasks.start(process, target))

        time = SimpleNamespace(sleep=tasks.sleep, monotonic=lambda: self.clock.now_s)
        with (
            patch.object(store, "threading", tasks.as_threading()),
            patch.object(store, "TorchThread", thread),
            patch.object(store, "received", lambda line, sizes: line.receive()[1]),
            patch.object(loop, "received", lambda line, sizes: []),
            patch.object(loop, "time", time),
        ):
            yield

    def _run(self) -> None:
        first = [self._add(slot) for slot in range(self.size)]
        self.generations.append(tuple(first))
        left = UnitsLeft.of(self.total * self.shards)
        for name in first:
            member = self.members[name]
            member.knows = MembersNow(1, tuple(first))
            zeros = [PieceState(zero(), zero(), zero()) for _ in range(PIECES)]
            member.state = zeros, left, {}, 0
            self._begin(member)
        self.newcomers.clear()
        span_s = self.total * self.shards * self.every * max(one.inner_s for one in self.members.values()) / self.size
        for _ in range(self.faults_left):
            self.clock.after(self.clock.between(0.0, span_s), self._fault)
        while not (living := self._living()) or not all(member.done for member in living):
            assert self.clock.turn(), "nothing happens any more"
            assert self.clock.now_s < self.last_fault_s + LIMIT_S, f"it does not end: {self.operations[-1]}"
        trained = {unit for unit, updates in self.units.items() if updates}
        assert trained == set(range(self.total * self.shards)), "a unit was not trained"

    def _add(self, slot: int) -> str:
        name = f"{'abc'[slot % self.nodes]}.{slot}.{self.incarnations[slot]}"
        self.incarnations[slot] += 1
        copies = PieceCopies(name, DelayedNesterov(1.0, 0.0, 1), StalenessBound(10**6, 1e9, "drop"))
        calls = Calls(self, name)
        fell_back: list[LostUpdates] = []

        def lost(pieces: Sequence[LostUpdates]) -> None:
            fell_back.extend(pieces)
            self._fell_back(name, pieces)

        made = ParameterStore(name, copies, cast(Any, calls), lambda: self.members[name].knows, lost)
        inner_s = self.clock.random.choice([0.01, 0.03, 0.3])
        self.members[name] = Member(name, inner_s, MembersNow(0, ()), made, copies, fell_back=fell_back)
        self.newcomers.append(name)
        return name

    def _begin(self, member: Member) -> None:
        def script() -> None:
            member.store.follow_members()
            self._script(member)

        self.tasks.start(member.name, script)

    def _living(self) -> list[Member]:
        return [member for name, member in self.members.items() if name in self.generations[-1] and self._lives(name)]

    def _lives(self, name: str) -> bool:
        return name not in self.tasks.dead

    # -------------------------------------------------------------------------------------------------- a worker

    def _script(self, w: Member) -> None:
        """As LocalPhases and LocalPhase have it."""
        while True:
            assert w.state is not None
            pieces, left, begun, phase = w.state
            if not left.count:
                w.done = True
                return
            w.has_left = False
            self.together(w, f"pass {phase}", None)
            ranks = self.together(w, f"roster {phase}", w.knows.members.index(w.name) if self._is_member(w) else 99)
            roster = sorted(ranks, key=lambda name: (ranks[name], name))
            w.fell_back.clear()
            w.seen.clear()
            w.store.begin(phase, roster, pieces, in_step=not w.has_left)
            done, unit = self._train(w, phase, list(left.share(w.name, roster, begun)), pieces)
            self._stop_together(w, phase, roster, idle=unit is None)
            w.store.end_phase()
            counts = {"applied": self._applied(w), "sums": {}, "most": {}, "values": {}}
            notes = self.together(w, f"note {phase}", phase_notes.note(done, unit, {}, counts))
            sums, attempt = None, 0
            while sums is None:
                brought = self.together(w, f"sum {phase} {attempt}", w.store.owned())
                sums, attempt = whole(brought), attempt + 1
                if sums is None:
                    self.reached.add("summed again")
            fell_back, seen = [list(one) for one in w.fell_back], [[*at, version] for at, version in w.seen.items()]
            ends = self.together(w, f"end {phase}", {"ended_s": 0.0, "fell_back": fell_back, "seen": seen})
            found = phase_notes.summary(notes, ends, roster, left, begun)
            w.store.pause()
            self._judge(w, phase, notes, ends, found, sums)
            w.state = sums, found.left, found.begun, phase + 1

    def _train(self, w: Member, phase: int, units: list[int], pieces: list[PieceState]) -> tuple[list[int], int | None]:
        """The units that are done, and the one that has begun and is not."""
        bases = {piece: state.version for piece, state in enumerate(pieces)}
        since_s, done, trained = self.clock.now_s, list[int](), False
        for place, unit in enumerate(units):
            while w.inner < self.every:
                more = place + 1 < len(units)
                due = w.drains or bool(self.newcomers)
                asked = (more and w.asked >= phase) or (w.drains and trained)
                if trained and loop.is_over(self.clock.now_s - since_s, self.phase_s, 0.0, due=due, asked=asked):
                    return done, unit
                self.tasks.sleep(w.inner_s)
                trained, w.inner = True, w.inner + 1
            w.inner = 0
            if self.issued >= UPDATES_MAX:
                self.reached.add("too many updates")
                done.append(unit)
                continue
            done.append(unit)
            self._push(w, unit, len(done), bases)
        return done, None

    def _push(self, w: Member, unit: int, number: int, bases: dict[int, int]) -> None:
        bit, self.issued = self.issued, self.issued + 1
        self.units.setdefault(unit, []).append(bit)
        difference = torch.full((1,), -float(1 << bit), dtype=torch.float64)
        update = PieceUpdate(number, dict(bases), 0.0, {piece: difference.clone() for piece in range(PIECES)})
        pushed = w.store.push(update, self.tasks.check)
        for piece, mark in pushed.marks.items():
            self.acknowledged[piece].add(bit)
            bases[piece] = mark[1]
            w.seen[piece, mark[0]] = mark[1]

    def _stop_together(self, w: Member, phase: int, roster: list[str], *, idle: bool) -> None:
        session = SimpleNamespace(
            worker_id=w.name, waits=lambda what: None, leave_if_over=self.tasks.check, place=lambda: self._place(w)
        )
        phases = SimpleNamespace(session=session, calls=Calls(self, w.name), stopped=w.stopped, goes=w.drains)
        LocalPhases.stop_together(cast(Any, phases), phase, roster, idle=idle)

    def _applied(self, w: Member) -> dict[str, int]:
        applied: dict[str, int] = {}
        for held in w.store.owned().values():
            for worker, number in held.applied.items():
                applied[worker] = max(number, applied.get(worker, 0))
        return applied

    def _place(self, w: Member) -> LoopPlace:
        members = w.knows.members
        return LoopPlace(w.knows.generation, members.index(w.name) if w.name in members else 99, members, "")

    def _is_member(self, w: Member) -> bool:
        return w.name in w.knows.members

    def answer(self, w: Member, line: Line, request: Mapping[str, Any]) -> None:
        if request["want"] == "phase_over":
            w.asked = max(w.asked, request["phase"] if request["idle"] or request["goes"] else -1)
            w.stopped[request["worker"]] = request["phase"]
            line.send({})
        else:
            w.store.answer(cast(CopyConnection, line), cast(Any, request))

    # ------------------------------------------------------------------------------------------------ operations

    def together(self, w: Member, label: str, own: Any) -> dict[str, Any]:
        """Bring something to the next operation of all, and wait for its result."""
        number, w.place = w.place, w.place + 1
        if number == len(self.operations):
            self.operations.append(Operation(label))
        operation = self.operations[number]
        assert operation.label == label, f"{w.name} is in {label}, and others are in {operation.label}"
        operation.said[w.name] = own
        if self.clock.chance(self.leaves):
            self._drain()
        self._complete(operation)
        operation.waiting.append(self.tasks.me())
        while operation.result is None:
            self.tasks.me().wait(None)
        if w.name not in operation.result:  # it was expelled while it stood still
            raise Ended
        if w.knows.generation < operation.generation:  # a planned generation is entered with the result
            w.knows = MembersNow(operation.generation, self.generations[operation.generation])
        self.tasks.sleep(self.clock.between(0.0, 0.02))
        while w.leaves:  # it may go as soon as all others have the result
            self.tasks.sleep(0.01)
        return operation.result

    def _complete(self, operation: Operation) -> None:
        members = self.generations[-1]
        if operation.result is not None or not all(name in operation.said for name in members):
            return
        operation.result = {name: operation.said[name] for name in members}
        self._change(operation)
        for task in operation.waiting:
            task.wake()

    def _change(self, operation: Operation) -> None:
        """A planned change takes effect behind it."""
        members = self.generations[-1]
        leavers = [name for name in members if self.members[name].drains]
        stay = [name for name in members if name not in leavers] if len(leavers) < len(members) else list(members)
        ready = [name for name in self.newcomers if self._lives(name)] if operation.label.startswith("pass") else []
        if stay == list(members) and not ready:
            return
        donor = self.members[stay[0]]
        for name in ready:
            newcomer = self.members[name]
            newcomer.state, newcomer.place = donor.state, self.operations.index(operation) + 1
            self.newcomers.remove(name)
            self.reached.add("join")
        self.generations.append((*stay, *ready))
        operation.generation = len(self.generations) - 1
        for name in (name for name in members if name not in stay):
            self.members[name].leaves = True
            self.members[name].acknowledged = [set(bits) for bits in self.acknowledged]
            self.gone += 1
            self.reached.add(f"left behind {operation.label.partition(' ')[0]}")
            all_die = self.clock.chance(0.3)
            goes_s = 5.0 if all_die else self.clock.between(0.0, 0.2)
            self.clock.after(goes_s, lambda name=name: self._goes(name))  # type: ignore[misc]
            for other in self.generations[-1] if all_die else ():
                self.clock.after(self.clock.between(0.0, 3.0), lambda other=other: self.kill(other))  # type: ignore[misc]
        for name in ready:
            self.members[name].knows = MembersNow(operation.generation, self.generations[-1])
            self._begin_in(self.members[name], operation)

    def _begin_in(self, member: Member, operation: Operation) -> None:
        """A newcomer has the result of the pass, and goes on behind it."""
        number = member.place

        def script() -> None:
            member.store.follow_members()
            member.place = number - 1
            self._script(member)

        assert operation.result is not None
        operation.result[member.name] = operation.said[member.name] = None
        self.tasks.start(member.name, script)

    def _goes(self, name: str) -> None:
        member = self.members[name]
        if member.leaves and self._lives(name):
            self.tasks.kill(name)

    def _hears(self, name: str) -> None:
        member, generation = self.members[name], len(self.generations) - 1
        members = self.generations[-1]

        def hear() -> None:
            if member.knows.generation < generation:
                member.knows = MembersNow(generation, members)

        self.clock.after(self.clock.between(0.0, 0.05), hear)

    # ----------------------------------------------------------------------------------------------------- faults

    def _fault(self) -> None:
        living = self._living()
        kind = self.clock.random.choice(("kill", "two", "freeze", "drain", "join"))
        victims = [member.name for member in living if not member.done]
        if kind == "join":
            self._add(self.clock.random.randrange(self.size + 2))
        elif len(victims) > 1 and kind in ("kill", "two"):
            for name in self.clock.random.sample(victims, min(len(victims) - 1, 1 + (kind == "two"))):
                self.kill(name)
        elif len(victims) > 1 and kind == "freeze":
            self._freeze(self.clock.random.choice(victims))
        elif kind == "drain":
            self._drain()

    def _drain(self) -> None:
        """A worker is to leave as planned; another one stays."""
        names = [member.name for member in self._living() if not member.done]
        if len(names) > 1 and self.faults_left:
            self.faults_left -= 1
            stays, leaver = self.clock.random.sample(names, 2)
            self.members[leaver].drains = not self.members[stays].drains
            self.last_fault_s = self.clock.now_s
            self.reached.add("drain")

    def kill(self, name: str) -> None:
        """The leader hears of it a moment later; a replacement comes after some time."""
        others = [other for other, member in self.members.items() if other != name and self._lives(other)]
        others = [other for other in others if other in self.generations[-1] or self.members[other].leaves]
        if not others or not self._lives(name):
            return
        self.gone += 1
        self.last_fault_s = self.clock.now_s
        self.reached.add("lost")
        self.tasks.kill(name)
        self.clock.after(self.clock.between(0.01, 0.3), self._lose)
        if self.clock.chance(0.7):
            slot = int(name.split(".")[1])
            self.clock.after(self.clock.between(0.2, 5.0), lambda: self._replace(slot))

    def _replace(self, slot: int) -> None:
        if not all(member.done for member in self._living()):
            self._add(slot)

    def _freeze(self, name: str) -> None:
        until_s = self.clock.now_s + self.clock.between(0.1, 2 * EVICT_S)
        self.last_fault_s = until_s
        self.tasks.frozen[name] = until_s
        self.reached.add("frozen")

        def evict() -> None:
            if self._lives(name) and len(self._living()) > 1 and name in self.generations[-1]:
                self.reached.add("expelled")
                self.gone += 1
                self._lose(expelled=name)
                self.clock.at(until_s + self.clock.between(0.0, 0.2), lambda: self.tasks.kill(name))

        if until_s > self.clock.now_s + EVICT_S:
            self.clock.after(EVICT_S, evict)

    def _lose(self, expelled: str = "") -> None:
        members = self.generations[-1]
        living = tuple(name for name in members if self._lives(name) and name != expelled)
        if living == members:
            return
        if not living:  # whoever was about to leave has the state: it is taken back
            living = tuple(name for name, member in self.members.items() if member.leaves and self._lives(name))
            assert living, "nobody is left"
            newest = max(self.members[name].place for name in living)
            for name in living:
                if self.members[name].place < newest:
                    self.tasks.kill(name)
            living = tuple(name for name in living if self._lives(name))
            self.reached.add("taken back")
            for name in living:
                self._take_back(self.members[name])
        self.generations.append(living)
        for name in living:
            self._hears(name)
        if self.operations:
            self._complete(self.operations[-1])

    def _take_back(self, w: Member) -> None:
        """It has the state of when it left, and goes on from there; nobody has what came after that. Of updates that
        others have made in the phase that had begun it has to say that they are lost."""
        w.leaves = w.drains = False
        w.has_left = True
        assert w.state is not None
        self.judged = {phase for phase in self.judged if phase < w.state[3]}
        if self.operations[w.place - 1].label.startswith(("note", "sum", "end")):
            self.acknowledged = [set(bits) for bits in w.acknowledged]
        else:
            self.reached.add("taken back where a phase begins")
        del self.operations[w.place :]

    # ----------------------------------------------------------------------------------------------------- checks

    def _fell_back(self, name: str, pieces: Sequence[LostUpdates]) -> None:
        self.reached.add("fell back")
        assert self.gone - self.gone_before >= 2 or "taken back" in self.reached, (
            f"{name} says that {pieces} are lost, and nobody has gone"
        )
        self.named.update(one.piece for one in pieces)

    def _judge(
        self,
        w: Member,
        phase: int,
        notes: Mapping[str, Any],
        ends: Mapping[str, Any],
        found: phase_notes.PhaseSummary,
        sums: list[PieceState],
    ) -> None:
        if phase in self.judged:  # all have the same
            return
        self.judged.add(phase)
        for piece, state in enumerate(sums):
            bits = {bit for bit in range(self.issued) if int(state.values.item()) >> bit & 1}
            assert state.version == len(bits), f"phase {phase}: an update was applied twice to piece {piece}"
            missing = self.acknowledged[piece] - bits - self.forgiven[piece]
            if piece in self.named:
                self.forgiven[piece] |= missing
                missing = set()
            assert not missing, f"phase {phase}: piece {piece} has lost the acknowledged updates {missing}"
        self.lost += found.metrics[LOST]
        for name, said in notes.items():
            for unit in said["done"]:
                assert not any(unit in gap for gap in found.left.gaps), f"unit {unit} of {name} is to be trained again"
        self.named.clear()
        self.gone_before = self.gone


def zero() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.float64)


def whole(brought: Mapping[str, Mapping[int, Any]]) -> list[PieceState] | None:
    """The pieces, if each of them has one owner."""
    found: dict[int, PieceState] = {}
    for owned in brought.values():
        for piece, held in owned.items():
            if piece in found:
                return None
            found[piece] = held.state.clone()
    return [found[piece] for piece in range(PIECES)] if len(found) == PIECES else None
