"""The lines of the ledger of a job whose scripts keep their state in memory: each step once.

A script that is started again does some steps again. So a step is recorded when no later round can go back before it:
when all scripts have kept it and, on several machines, its mirrors are there; or when a round goes on from it. What
workers tell each other of it in their exchanges is the same for all, so all record the same. A worker that is new
hears from another one before the round begins how many steps are recorded, and what was said of later ones, as all the
others may be lost in the next moment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from runtime.frontends.restart.rounds import ScriptReport
from runtime.recovery.kept.choice import KeptStep, RoundNumber
from runtime.recovery.kept.step_log import LoggedStep
from runtime.session import StepRecord


class StepRecords:
    """Used by one thread."""

    def __init__(self, record: Callable[[StepRecord], None]) -> None:
        """record: takes each line, in the order of steps."""
        self._record = record
        self._said: dict[tuple[RoundNumber, int], dict[int, LoggedStep]] = {}
        """Round and step -> rank -> what it has logged. Of steps that are not recorded yet."""
        self._next: int | None = None
        """How many steps are done behind the first one that is not recorded; None: nobody has told this worker."""
        self._world = 0
        self._newest = RoundNumber(0, 0), 0
        """The newest step of the newest round of which a process has said something."""

    @property
    def recorded(self) -> int:
        """How many steps are recorded; -1: this worker does not know, as no other worker has told it."""
        return -1 if self._next is None else self._next - 1

    def unrecorded(self) -> Iterator[LoggedStep]:
        """What processes have said of steps that are not recorded."""
        return (one for ranks in self._said.values() for one in ranks.values())

    def hear(self, reports: Collection[ScriptReport]) -> None:
        """Take in what the workers have told each other in an exchange."""
        told = max((report.recorded for report in reports if report.tells), default=-1)
        if self._next is None and told >= 0:
            self._next = told + 1
        for one in (one for report in reports for one in report.logged):
            self._said.setdefault((one.round, one.step), {})[one.rank] = one
            self._world = one.world
            self._newest = max(self._newest, (one.round, one.step))

    def newest(self, number: RoundNumber) -> int:
        """The newest step of a round of which a process has said something; 0: there is none."""
        newest, step = self._newest
        return step if newest == number else 0

    def begin(self, number: RoundNumber, source: KeptStep | None) -> None:
        """A round begins, with this step. None: the script begins anew, or with files of its own."""
        if source is not None:
            self._keep(source.round, source.step, number.generation)
        self._next = self._next if self._next is not None else 1
        self._said.clear()

    def keep(self, number: RoundNumber, until: int) -> None:
        """Record the steps of the round in progress up to the one behind which `until` steps are done."""
        self._keep(number, until, number.generation)

    def _keep(self, number: RoundNumber, until: int, incomplete: int) -> None:
        """Steps of which not all processes have told have neither learning rates nor values, as where a machine was
        lost with them. incomplete: the generation of such lines. If a worker that was lost has recorded such a step in
        full, in its own generation, that line stands. Where all workers were lost at once, it is not known what they
        have recorded, and these are the steps of which something was left in memory, and all behind them."""
        if self._next is None:
            left = (step for said, step in self._said if said == number and step <= until)
            self._next = min(left, default=until + 1)
        for step in range(self._next, until + 1):
            self._record(record_of(step, self._said.get((number, step), {}), self._world, incomplete))
        self._next = max(self._next, until + 1)
        self._said = {key: ranks for key, ranks in self._said.items() if key[1] > until}


def record_of(step: int, said: Mapping[int, LoggedStep], world: int, incomplete: int) -> StepRecord:
    """The line of a step. said: what each rank has told. world, incomplete: world and generation of the line, if not
    all have told something."""
    ranks: Sequence[LoggedStep] = [said[rank] for rank in sorted(said)]
    if not ranks or len(ranks) < ranks[0].world:
        return StepRecord(step - 1, 0, incomplete, world, (), {}, [])
    names = dict.fromkeys(name for one in ranks for name in one.values)
    scalars = {name: mean([value for one in ranks for value in one.values.get(name, ())]) for name in names}
    return StepRecord(step - 1, 0, ranks[0].round.generation, ranks[0].world, ranks[0].lr, scalars, [])


def mean(values: Sequence[float]) -> float:
    """With the same bits in any order: their exact sum is rounded once (Shewchuk 1997, as math.fsum has it)."""
    try:
        total = math.fsum(values)
    except (OverflowError, ValueError):  # too large on the way, or infinities of both signs
        total = sum(values)
    return total / len(values)
