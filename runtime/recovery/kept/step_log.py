"""What each process of a script says of its steps: learning rates, and the values that it logs, such as its loss.

A process writes its newest steps into a small file beside its segments in each done(), before the segment of the step.
So who finds that a step is kept finds in these files what was logged in it. Workers read those of their machine.
"""

from __future__ import annotations

import errno
import json
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from runtime.allreduce.reduction.partial_sum import Json
from runtime.recovery.kept.choice import RoundNumber
from runtime.recovery.kept.place import directory_of, rounds_in

NAME = "log"
"""Of the file, with the rank behind it."""
STEPS_MAX = 256
"""A worker reads so many of the newest steps in a file. A script whose steps take less than a millisecond may lose what
it logs, as workers look five times a second."""
FILE_STEPS_MAX = 2 * STEPS_MAX
"""When a file has so many steps, a new file with the newest STEPS_MAX takes its place."""


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """What one process says of one step. step: steps done. rank, world: of the process in its round. lr: of each
    parameter group. values: by name, all that the process has logged in this step."""

    round: RoundNumber
    step: int
    rank: int
    world: int
    lr: tuple[float, ...]
    values: Mapping[str, tuple[float, ...]]

    def to_json(self) -> list[Json]:
        values: dict[str, Json] = {name: list[Json](each) for name, each in self.values.items()}
        return [*self.round, self.step, self.rank, self.world, list[Json](self.lr), values]

    @classmethod
    def from_json(cls, said: Any) -> Self:
        run, generation, step, rank, world, lr, values = said
        found = {str(name): tuple(map(float, each)) for name, each in values.items()}
        return cls(RoundNumber(int(run), int(generation)), int(step), int(rank), int(world), tuple(lr), found)


class StepLog:
    """The script's side. Used by its main thread."""

    def __init__(self, number: RoundNumber, rank: int, world: int) -> None:
        self._round, self._rank, self._world = number, rank, world
        self._lines: deque[str] = deque(maxlen=STEPS_MAX)
        self._file = -1
        """Its descriptor, open as long as the process lives; -1: no step was written yet."""
        self._written = 0
        """Lines in the file."""
        self._lr: dict[str, tuple[float, ...]] = {}
        self._values: dict[str, list[float]] = {}

    def take(self, name: str, value: float) -> None:
        """A value of the step in progress."""
        self._values.setdefault(name, []).append(value)

    def take_lr(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to take its step. One that is a tensor is left out: it may be on a device."""
        rates = [group.get("lr") for group in optimizer.param_groups]
        self._lr[name] = tuple(float(rate) for rate in rates if isinstance(rate, float | int))

    def write(self, directory: Path, step: int) -> None:
        """A step is done. directory: of the round; it is there. Raises OSError."""
        lr = tuple(rate for rates in self._lr.values() for rate in rates)
        values = {name: tuple(each) for name, each in self._values.items()}
        said = LoggedStep(self._round, step, self._rank, self._world, lr, values)
        self._values = {}
        line = json.dumps(said.to_json(), separators=(",", ":")) + "\n"
        self._lines.append(line)
        if self._file >= 0 and self._written < FILE_STEPS_MAX:
            self._write(line)
            self._written += 1
        else:
            self._begin_file(directory / f"{NAME}{self._rank}")

    def _begin_file(self, path: Path) -> None:
        """Write the newest steps into a new file, as the one before has become long."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        new = f"{path}.new"
        self._file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._write("".join(self._lines))
        self._written = len(self._lines)
        os.replace(new, path)  # a worker that reads it at any time finds all of them

    def _write(self, text: str) -> None:
        data = text.encode()
        if os.write(self._file, data) < len(data):  # nothing may follow half a line
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class StepLogs:
    """The worker's side. Used by its main thread. memory: the job's directory in memory; "": there is none."""

    def __init__(self, memory: str) -> None:
        self._memory = memory
        self._told: dict[tuple[RoundNumber, int], int] = {}
        """Round and rank -> the newest step that was read."""

    def news(self, number: RoundNumber, rank: int) -> list[LoggedStep]:
        """The steps of a rank that were not read before, oldest first."""
        if not self._memory:
            return []
        try:
            text = (directory_of(self._memory, number) / f"{NAME}{rank}").read_text()
        except OSError:
            return []
        whole, _, _ = text.rpartition("\n")  # the last line may be in the middle of being written
        lines = whole.splitlines()[-STEPS_MAX:]
        told, found = self._told.get((number, rank), 0), list[LoggedStep]()
        for line in reversed(lines):
            if (one := LoggedStep.from_json(json.loads(line))).step <= told:
                break
            found.append(one)
        if found:
            self._told[number, rank] = found[0].step
        return found[::-1]

    def newest(self, number: RoundNumber, rank: int) -> int:
        """The newest step of a rank that was read; 0: none."""
        return self._told.get((number, rank), 0)

    def left(self, share: int, shares: int) -> list[LoggedStep]:
        """The same of all rounds that are in memory, of this worker's share: no script of theirs runs now."""
        ranks = {number: self._ranks(number) for number in rounds_in(self._memory)} if self._memory else {}
        return [
            one for number, every in ranks.items() for rank in every if rank % shares == share
            for one in self.news(number, rank)
        ]  # fmt: skip

    def _ranks(self, number: RoundNumber) -> list[int]:
        try:
            names = os.listdir(directory_of(self._memory, number))
        except OSError:
            return []
        return sorted(int(name.removeprefix(NAME)) for name in names if name.removeprefix(NAME).isdigit())
