"""Which step the next round goes on from: the newest one of which every part is there."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

from elastic.protocol.worker_id import node_of


class RoundNumber(NamedTuple):
    """A round, in the order of time. run: how often the job was started again before; generation: of that run."""

    run: int
    generation: int

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """The round of the directory with that name; None: it is no such directory."""
        run, dot, generation = name.partition(".")
        return cls(int(run), int(generation)) if dot and run.isdigit() and generation.isdigit() else None

    def __str__(self) -> str:
        return f"{self.run}.{self.generation}"


NO_ROUND = RoundNumber(0, 0)
"""Before the first round."""


@dataclass(frozen=True, slots=True, order=True)
class HeldSegment:
    """A segment that a machine has, and that is as it was written. The segments of a step with one `group` have the
    whole state when all `parts` of them are there."""

    step: int
    """Steps done."""
    round: RoundNumber
    group: int
    part: int
    parts: int
    copies: int = field(default=1, compare=False)
    """On so many other machines each part of the step is to be, as elastic.keep() was told."""

    def to_json(self) -> list[int]:
        return [self.step, *self.round, self.group, self.part, self.parts, self.copies]

    @classmethod
    def from_json(cls, said: Any) -> Self:
        step, run, generation, group, part, parts, copies = map(int, said)
        return cls(step, RoundNumber(run, generation), group, part, parts, copies)


@dataclass(frozen=True, slots=True, order=True)
class KeptStep:
    """What all scripts of a round load."""

    step: int
    round: RoundNumber
    group: int

    def to_json(self) -> list[int]:
        return [self.step, *self.round, self.group]

    @classmethod
    def from_json(cls, said: Any) -> Self:
        step, run, generation, group = map(int, said)
        return cls(step, RoundNumber(run, generation), group)


@dataclass(frozen=True, slots=True, order=True)
class KnownStep:
    """A step that all scripts of a round have kept, on other machines, too, or have begun with, and the nodes of the
    round, whose memory has it, and perhaps newer ones. The greatest one is that of the latest round: it may have begun
    with an earlier step than a round before it has kept."""

    round: RoundNumber
    """That round, also where the step that it has begun with was kept in an earlier one."""
    step: int
    nodes: tuple[str, ...]
    """(): they are not known, as all that knew them were lost, and a machine remembers the step alone."""

    def to_json(self) -> list[Any]:
        return [*self.round, self.step, list(self.nodes)]

    @classmethod
    def from_json(cls, said: Any) -> Self:
        run, generation, step, nodes = said
        return cls(RoundNumber(int(run), int(generation)), int(step), tuple(map(str, nodes)))


@dataclass(frozen=True, slots=True)
class ThinPart:
    """A part of a step that too few machines have. held: the part. at: a worker of one of them. to: the workers of
    others that copy it. machines: how many have it."""

    held: HeldSegment
    at: str
    to: tuple[str, ...]
    machines: int = 1


def holders(held: Mapping[str, Iterable[HeldSegment]], source: KeptStep) -> dict[HeldSegment, list[str]]:
    """The parts of a step -> the workers that have found each of them, in the order of `held`."""
    found: dict[HeldSegment, list[str]] = {}
    for worker, segments in held.items():
        for one in segments:
            if (one.step, one.round, one.group) == (source.step, source.round, source.group):
                found.setdefault(one, []).append(worker)
    return found


def thin_parts(held: Mapping[str, Iterable[HeldSegment]], source: KeptStep, members: Sequence[str]) -> list[ThinPart]:
    """What is lost with fewer machines than the script wants, and who is to copy it: a worker of each of the next
    machines, in the order of ranks, until as many have it as want it or are there.

    held: by worker id. members: in rank order. A state without shards is on each machine that has kept it.
    """
    nodes = list(dict.fromkeys(map(node_of, members)))
    alike = {
        node_of(w)
        for w, every in held.items()
        for h in every
        if (h.step, h.round, h.parts) == (source.step, source.round, 1)
    }
    found = []
    for part, workers in sorted(holders(held, source).items()):
        homes = alike | set(map(node_of, workers))
        first = nodes.index(node_of(workers[0]))
        others = [node for node in nodes[first:] + nodes[:first] if node not in homes]
        to = []
        for node in others[: max(0, 1 + part.copies - len(homes))]:
            there = [worker for worker in members if node_of(worker) == node]
            to.append(there[part.part % len(there)])
        if to:
            found.append(ThinPart(part, workers[0], tuple(to), len(homes)))
    return found


@dataclass(frozen=True, slots=True)
class PartPlan:
    """What one process keeps. part, parts: as of HeldSegment. writes: whether it writes the part; otherwise another
    process of its machine, which has the same, does. machines: how many have the part without sending it. targets:
    numbers of other machines to which it sends the part."""

    part: int
    parts: int
    writes: bool
    machines: int
    targets: tuple[int, ...]


def plan_part(rank: int, has: Sequence[Hashable], nodes: Sequence[int], copies: int) -> PartPlan:
    """Processes that have the same, as the replicas of a shard, keep one part together: one of them on each machine
    writes it. The first one sends it to the next machines that have it not, if fewer than `copies` others have it.

    has: what each rank has. nodes: the number of its machine, of 0 to the number of machines.
    """
    kinds = list(dict.fromkeys(has))
    alike = [other for other, what in enumerate(has) if what == has[rank]]
    homes = {nodes[other] for other in alike}
    writes = rank == min(other for other in alike if nodes[other] == nodes[rank])
    count = max(nodes) + 1
    others = [node for step in range(1, count) if (node := (nodes[rank] + step) % count) not in homes]
    targets = others[: max(0, 1 + copies - len(homes))] if rank == alike[0] else []
    return PartPlan(kinds.index(has[rank]), len(kinds), writes, len(homes), tuple(targets))


def mirrors_of(worker: str, members: Sequence[str]) -> tuple[str, ...]:
    """A worker of each other machine, from the next one on in the order of ranks, that takes what the script of this
    one sends there; (): there is one machine."""
    nodes = list(dict.fromkeys(map(node_of, members)))
    here = [member for member in members if node_of(member) == node_of(worker)]
    at, found = nodes.index(node_of(worker)), []
    for node in nodes[at + 1 :] + nodes[:at]:
        there = [member for member in members if node_of(member) == node]
        found.append(there[here.index(worker) % len(there)])
    return tuple(found)


COPIES_MAX = 2
"""On so many other machines a step may be."""
LAG = 2
"""When one machine is lost, so many of the newest kept steps of its round may not be whole: the mirrors of that machine
had not got its newest step yet, and other machines had kept the next step already."""


def awaited(
    known: KnownStep | None, held: Iterable[HeldSegment], source: KeptStep | None, members: Iterable[str]
) -> KnownStep | None:
    """A step that is newer than the source, with the nodes that have no member now and may have what lacks of it.
    None: the source is as new as it may be, or nobody else can have more. known: None, or without nodes: all workers
    are new, so it is not known which nodes there were. held: all segments that are there: they tell of steps, too. Of
    rounds before the one of `known` they tell of none that is newer than its step: when that round began, its nodes
    were there, and together they had no newer step whole."""
    away: tuple[str, ...] = ()
    seen = known if known is not None and known.nodes else None
    if seen is not None and not (away := tuple(sorted(set(seen.nodes) - set(map(node_of, members))))):
        return None
    steps: dict[RoundNumber, set[int]] = {}
    for one in held:
        if source is None or one.round >= source.round:
            steps.setdefault(one.round, set()).add(one.step)
    lag = LAG if seen is not None else LAG - 1  # then some of these nodes may just be a little later
    newest = KnownStep(RoundNumber(0, 0), 0, away) if seen is None else replace(seen, nodes=away)
    for number, found in steps.items():
        # The first step of a round is void if a script has changed its weights while it was copied. In the round of
        # `seen` that is the step behind `seen.step`; where all that is found is newer, it has been written over.
        may_be_void = seen is not None and (source is None or number > source.round)
        if seen is not None and number == seen.round and min(found) > seen.step + 1:
            may_be_void = False
        may_lack = lag + int(may_be_void)
        if len(found) > may_lack:
            step = sorted(found)[-1 - may_lack]
            step = min(step, known.step) if known is not None and number < known.round else step
            newest = KnownStep(number, step, away) if step > newest.step else newest
    return newest if newest.step > (0 if source is None else source.step) else None


def newest_whole(held: Iterable[HeldSegment]) -> KeptStep | None:
    """The newest step of which all parts are there; of a step that two rounds have made, that of the later one.
    None: no step is whole."""
    whole = (source for (source, count), found in _parts(held).items() if found >= set(range(count)))
    return max(whole, default=None)


def lost_parts(held: Iterable[HeldSegment]) -> str:
    """What lacks of the newest step of which there is a part, in words, where no step is whole."""
    (newest, count), found = max(_parts(held).items())
    lost = [str(part) for part in range(count) if part not in found]
    return (
        f"step {newest.step} of round {newest.round.generation} lacks {len(lost)} of {count} parts: {', '.join(lost)}"
    )


def _parts(held: Iterable[HeldSegment]) -> dict[tuple[KeptStep, int], set[int]]:
    """A step, and how many parts it has -> the numbers of those that are there."""
    found: dict[tuple[KeptStep, int], set[int]] = {}
    for one in held:
        found.setdefault((KeptStep(one.step, one.round, one.group), one.parts), set()).add(one.part)
    return found


def bytes_at(node: int, bodies: Iterable[tuple[int, Sequence[int]]]) -> int:
    """Bytes of one step that a machine holds. bodies: of each process, the size of its segment and the machines where
    it is: its own, and those to which it is sent."""
    return sum(size * list(nodes).count(node) for size, nodes in bodies)
