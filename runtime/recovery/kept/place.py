"""What a worker tells its script about keeping state, in one environment variable, and where segments lie."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from runtime.recovery.kept.choice import KeptStep, RoundNumber

VARIABLE = "ELASTIC_KEPT"
DIRECTORY = "kept"
"""In the job's directory in memory."""
OFF = "off"
"""In the directory of a round: a file made by a script that keeps nothing, with its reason."""
THIN = "thin"
"""The same of a script that cannot mirror what it keeps; its rank stands behind the name."""
PART = "part"
"""With the rank behind it: the number of the part that this process, or another one of the machine, keeps of a step."""
KNOWN = "known"
"""Made by a worker: what it knows of the steps that are kept, for those that come when all are lost."""


ORDER, RANDOM, LEFT_OUT = "order of gradients", "random numbers", "left out buffers"
"""Names of what is kept with --ranks beside a script's objects, whose names are words of Python."""
EXACT = "units="
"""The same of what is kept with units=."""


@dataclass(frozen=True, slots=True)
class KeptPlace:
    """memory: the job's directory in this machine's memory; "": there is none. round: that of the script. source: what
    it loads; None: it begins at step 0. because: why nothing is kept; "": the state is kept. others: a file with what
    it needs of other machines (remote.py); "": there are none. own: the world has the same ranks in each round, so each
    process keeps and loads what only its rank has, too."""

    memory: str
    round: RoundNumber
    source: KeptStep | None = None
    because: str = ""
    others: str = ""
    own: bool = False

    def to_environment(self) -> dict[str, str]:
        source = None if self.source is None else self.source.to_json()
        return {VARIABLE: json.dumps([self.memory, *self.round, source, self.because, self.others, self.own])}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self | None:
        """None: no worker has started this process for a round."""
        if not (text := environment.get(VARIABLE, "")):
            return None
        memory, run, generation, source, because, others, own = json.loads(text)
        found = None if source is None else KeptStep.from_json(source)
        return cls(memory, RoundNumber(run, generation), found, because, others, own)

    def directory(self) -> Path:
        """Of the segments of this round, made if it is not there. The job's directory is never made again. Raises
        OSError."""
        path = directory_of(self.memory, self.round)
        for each in (path.parent, path):
            with suppress(FileExistsError):
                os.mkdir(each, 0o700)
        return path

    @property
    def directory_there(self) -> Path:
        """The same without making it."""
        return directory_of(self.memory, self.round)

    def leave_word(self, what: str, because: str) -> None:
        """For the worker. what: OFF, or THIN with the rank."""
        if self.memory:
            with suppress(OSError):  # the memory may be full, or gone: the script itself says it, too
                (self.directory() / what).write_text(because)


def directory_of(memory: str, number: RoundNumber) -> Path:
    return Path(memory) / DIRECTORY / str(number)


def rounds_in(memory: str) -> list[RoundNumber]:
    """The rounds of which there are segments, oldest first."""
    try:
        names = os.listdir(Path(memory) / DIRECTORY)
    except OSError:
        return []
    return sorted(found for name in names if (found := RoundNumber.parse(name)) is not None)
