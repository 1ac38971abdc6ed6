"""What scripts keep in the memories of machines, and what a round that begins may have lost of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TypeAlias

from elastic.protocol.worker_id import node_of
from runtime.frontends.restart.places import share
from runtime.frontends.restart.rounds import StartScript
from runtime.recovery.kept.choice import (
    NO_ROUND,
    HeldSegment,
    KnownStep,
    RoundNumber,
    ThinPart,
    holders,
    newest_whole,
)
from runtime.recovery.kept.segment import BUFFERS
from runtime.recovery.kept.step_log import LoggedStep
from tests.sim.clock import Clock

LoggedKey: TypeAlias = tuple[RoundNumber, int, int]
"""Round, rank and step."""


class Memories:
    """Of all machines of a job. `load` raises AssertionError for more lost steps than there may be."""

    def __init__(self, clock: Clock, reached: set[str], every: int) -> None:
        """reached: takes the names of what happens. every: scripts keep a step of so many."""
        self.done = 0
        """The newest step that all scripts of a round have done, in the round in progress."""
        self.mirrored = 0
        """The newest step that each of them has kept, on another machine, too, if there is one."""
        self.everywhere = 0
        """The newest step that each of them has kept, on its own machine."""
        self.newest_round = 0
        """The newest one whose scripts have begun."""
        self._clock = clock
        self._reached = reached
        self._every = every
        self._held: dict[str, set[HeldSegment]] = {}
        self._logs: dict[str, list[LoggedStep]] = {}
        self._known: dict[str, KnownStep] = {}
        self._lost: set[str] = set()
        """Machines that were lost since each part was known to be on two of them."""
        self._only, self._thin = "", False
        """The machine of the newest round, if it has one, so that all it has kept is there; whether that round began
        with a part that one machine alone had."""
        self._agreed = False
        """Whether all scripts of the newest round have ended behind one step, as planned."""
        self._recorded = 0
        """So many steps were in the ledger when steps were done again as all machines that had them were lost."""
        self._void: set[int] = set()
        """Rounds whose first step some scripts have not kept, as they have changed their weights meanwhile."""
        self._off: dict[str, RoundNumber] = {}
        """Machine -> the newest round in which one of its scripts has kept nothing any more."""
        self.off = 0
        """The newest such round of all machines; 0: there was none."""

    def put(self, node: str, held: HeldSegment) -> None:
        """Into the file with the oldest step of that part."""
        segments = self._held.setdefault(node, set())
        segments.add(held)
        alike = sorted(one for one in segments if (one.round, one.part) == (held.round, held.part))
        segments -= set(alike[:-BUFFERS])

    def begin(self, worker: str, members: Sequence[str], generation: int, step: int) -> HeldSegment:
        """Begin to write the segment of a step over the oldest one."""
        held = HeldSegment(step, RoundNumber(0, generation), 0, members.index(worker), len(members))
        if len(own := sorted(self._own(worker, members, generation))) == BUFFERS:
            self._held[node_of(worker)].discard(own[0])
        return held

    def log(self, worker: str, members: Sequence[str], generation: int, step: int) -> None:
        """A script has done a step. One that is done again has another loss, as sums of another world have."""
        rank, loss = members.index(worker), self._clock.between(0.0, 1.0)
        said = LoggedStep(RoundNumber(0, generation), step, rank, len(members), (0.1,), {"loss": (loss,)})
        self._logs.setdefault(node_of(worker), []).append(said)

    def news(self, worker: str, told: set[LoggedKey], wanted: Callable[[LoggedStep], bool]) -> tuple[LoggedStep, ...]:
        """What is on its machine, and wanted, and what it has not read."""
        found = [
            one
            for one in self._logs.get(node_of(worker), ())
            if (one.round, one.rank, one.step) not in told and wanted(one)
        ]
        told.update((one.round, one.rank, one.step) for one in found)
        return tuple(found)

    def newest(self, worker: str, members: Sequence[str], generation: int) -> int:
        """As the worker reports it."""
        if self.is_off(worker, generation):
            return -1
        return max((one.step for one in self._own(worker, members, generation)), default=-1)

    def _own(self, worker: str, members: Sequence[str], generation: int) -> list[HeldSegment]:
        wanted = RoundNumber(0, generation), members.index(worker), len(members)
        held = self._held.get(node_of(worker), ())
        return [one for one in held if (one.round, one.part, one.parts) == wanted]

    def lose(self, node: str) -> None:
        self._held.pop(node, None)
        self._logs.pop(node, None)
        self._known.pop(node, None)
        self._off.pop(node, None)
        self._lost.add(node)

    def turn_off(self, worker: str, generation: int) -> None:
        """The script of this worker keeps nothing any more in this round."""
        self._off[node_of(worker)] = RoundNumber(0, generation)
        self.off = max(self.off, generation)

    def is_off(self, worker: str, generation: int) -> bool:
        return self._off.get(node_of(worker)) == RoundNumber(0, generation)

    def forget_void(self, worker: str) -> RoundNumber:
        """The machine of this worker forgets what is not newer than a round in which it has kept nothing any more."""
        node = node_of(worker)
        off = self._off.pop(node, NO_ROUND)
        self._held[node] = {one for one in self._held.get(node, ()) if one.round > off}
        return off

    def look(self, worker: str, members: Sequence[str]) -> tuple[HeldSegment, ...]:
        mine, workers = share(worker, members)
        held = self._held.get(node_of(worker), set())
        return tuple(sorted(one for one in held if one.part % workers == mine))

    def remember(self, worker: str, known: KnownStep | None) -> None:
        """A worker writes what it knows, if something was kept on its machine."""
        node = node_of(worker)
        if known is not None and (self._logs.get(node) or self._held.get(node)):
            self._known[node] = replace(known, nodes=())

    def remembered(self, worker: str) -> KnownStep | None:
        return self._known.get(node_of(worker))

    def copy(self, worker: str, parts: Sequence[ThinPart]) -> list[HeldSegment]:
        """What this worker copies of what too few machines have, while it is there."""
        found = []
        for part in parts:
            if worker in part.to and part.held in self._held.get(node_of(part.at), ()):
                self._reached.add("copied")
                self.put(node_of(worker), part.held)
                found.append(part.held)
        return found

    def void(self, generation: int) -> None:
        """A script of that round has not kept its first step."""
        self._void.add(generation)

    def agree(self, generation: int, step: int) -> None:
        """All scripts of a round have ended behind that step, says a worker; another one may have begun meanwhile."""
        if generation >= self.newest_round:
            assert self.done <= step, f"step {self.done} is done, and the last one is {step}"
            self._agreed = True

    def settle(self, worker: str, generation: int) -> None:
        """The machine of this worker forgets earlier rounds."""
        held = self._held.get(node_of(worker), set())
        held -= {one for one in held if one.round.generation < generation}

    def load(
        self,
        members: Sequence[str],
        generation: int,
        start: StartScript,
        *,
        dead: Collection[str],
        in_vain: bool,
        nobody_knows: bool,
        recorded: int,
        off: RoundNumber,
    ) -> None:
        """The scripts of a round begin. dead: machines of members that have died since they said what they have.
        in_vain: they have waited for a machine without a worker, and none came. nobody_knows: all workers are new,
        since all were lost. recorded: so many steps are in the ledger. off: the newest round of which it is known that
        a script has kept nothing any more."""
        step = 0
        if start.source is not None:
            step, found = start.source.step, holders(start.held, start.source)
            parts = {one.part for one in found}
            assert parts and parts == set(range(next(iter(found)).parts)), f"step {step} is not whole"
            assert start.source.round >= off, f"step {step} is older than what a script had when it kept nothing more"
        if generation <= self.newest_round:
            return
        again = self.done - step
        nodes = set(map(node_of, members))
        away = set(self._held) - nodes  # a mirror has the step kept before its newest one
        last = {node for node in away if any(one.round.generation == self.newest_round for one in self._held[node])}
        if 0 < self.off == self.newest_round:  # its own files are newer
            self._reached.add("off")
        elif len(self._lost) > 1:  # a second machine, before what the first one had was on two of those left
            self._reached.add("two nodes lost")
        elif self._only in self._lost or (self._lost and self._thin):
            self._reached.add("only node lost")
        elif self._lost and last - self._lost:  # the second had what lacks, and may not come back
            self._reached.add("a node lost and one away")
            there = newest_whole(one for segments in self._held.values() for one in segments)
            newer = there.step - step if there is not None else 0
            # Nobody can tell whether the first of three steps was void.
            assert in_vain or nobody_knows or newer <= 2 * self._every + 1, f"{newer} steps done again were there"
        elif len(self._lost | away) > 1 and self.newest_round in self._void:
            self._reached.add("two nodes away")  # too few steps are there to tell what lacks
        elif in_vain:
            self._reached.add("waited in vain")
        elif nobody_knows and again > self._every:
            self._reached.add("nobody knows")
        else:
            limit = 2 * self._every if self._lost or away else 0 if self._agreed else self._every
            limit += self.newest_round in self._void
            assert again <= limit, f"{again} steps are done again of {limit}, {len(self._lost)} nodes were lost"
            if not (nobody_knows and away):
                assert recorded <= max(step, self._recorded), f"step {recorded} is in the ledger, and is done again"
        if recorded > step:
            self._recorded = recorded
        if again:
            self._reached.add("done again" if self._every == 1 else "several done again")
        self.newest_round, self.done, self.mirrored, self._agreed = generation, step, step, False
        self.everywhere = step
        if not start.thin:
            self._lost &= set(dead)  # they were there when it was looked at who has what
        self._only, self._thin = (nodes.pop() if len(nodes) == 1 else ""), bool(start.thin)
