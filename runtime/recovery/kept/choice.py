"""Which step the next round goes on from: the newest one of which every part is there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self


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

    def to_json(self) -> list[int]:
        return [self.step, *self.round, self.group, self.part, self.parts]

    @classmethod
    def from_json(cls, said: Any) -> Self:
        step, run, generation, group, part, parts = map(int, said)
        return cls(step, RoundNumber(run, generation), group, part, parts)


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


def newest_whole(held: Iterable[HeldSegment]) -> KeptStep | None:
    """The newest step of which all parts are there; of a step that two rounds have made, that of the later one.
    None: no step is whole."""
    parts: dict[tuple[KeptStep, int], set[int]] = {}
    for one in held:
        parts.setdefault((KeptStep(one.step, one.round, one.group), one.parts), set()).add(one.part)
    whole = (source for (source, count), found in parts.items() if found >= set(range(count)))
    return max(whole, default=None)
