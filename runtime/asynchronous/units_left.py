"""Which units of the training are left, and who takes which.

A *unit* is the work of one replica in one round: H inner steps on its batches. Units are numbered from 0, by round and
replica. In a phase each worker goes through units of its own, at its own speed: of those that were left when the phase
began, worker i of n takes the i-th, the (i + n)-th and so on. What is left then is dealt out anew in the next phase, so
a fast worker takes more of them, and the units of a dead one go to others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Self


@dataclass(frozen=True, slots=True)
class UnitsLeft:
    """total: units of the job. gaps: the ranges of units that are not done, in order."""

    total: int
    gaps: tuple[range, ...]

    @classmethod
    def of(cls, total: int) -> Self:
        """All of them."""
        return cls(total, (range(total),) if total else ())

    @property
    def count(self) -> int:
        """How many are left."""
        return sum(map(len, self.gaps))

    def without(self, done: Iterable[int]) -> UnitsLeft:
        """What is left when these are done, too."""
        gone = sorted(set(done))
        gaps: list[range] = []
        for gap in self.gaps:
            first = gap.start
            for unit in gone:
                if unit in gap:
                    gaps.append(range(first, unit))
                    first = unit + 1
            gaps.append(range(first, gap.stop))
        return UnitsLeft(self.total, tuple(gap for gap in gaps if gap))

    def of_total(self, total: int) -> UnitsLeft:
        """The same for a job of so many units: further ones are left, too, and none beyond them."""
        further = range(self.total, max(self.total, total))
        gaps = (range(gap.start, min(gap.stop, total)) for gap in (*self.gaps, further))
        return UnitsLeft(total, tuple(gap for gap in gaps if gap))

    def _free(self, taken: Collection[int]) -> Iterator[int]:
        return (unit for gap in self.gaps for unit in gap if unit not in taken)

    def share(self, worker: str, roster: Sequence[str], begun: Mapping[str, int]) -> Iterator[int]:
        """The units of this worker in a phase, in its order. roster: the workers of the phase. begun: worker -> the
        unit that it has begun in an earlier phase, which comes first; of workers that are gone, nothing is begun."""
        mine = {other: unit for other, unit in begun.items() if other in roster}
        if worker in mine:
            yield mine[worker]
        takes = sorted(roster, key=lambda other: other in mine)  # whoever has nothing to do comes first
        yield from islice(self._free(set(mine.values())), takes.index(worker), None, len(takes))

    def to_json(self) -> list[list[int]]:
        return [[gap.start, gap.stop] for gap in self.gaps]

    @classmethod
    def from_json(cls, total: int, gaps: Iterable[Sequence[int]]) -> Self:
        return cls(total, tuple(range(first, end) for first, end in gaps))


def finished_by(dead: str, count: int, left: UnitsLeft, roster: Sequence[str], begun: Mapping[str, int]) -> list[int]:
    """The first so many units of a worker that cannot say any more what it has done in a phase."""
    return list(islice(left.share(dead, roster, begun), count))
