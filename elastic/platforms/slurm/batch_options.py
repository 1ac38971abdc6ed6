"""What the batch scripts have in common: the lines for sbatch, and the words that an agent is started with."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from elastic.errors import ConfigError

SUBMIT = ("sbatch", "--parsable")
"""Reads a script from its input, and prints the id of the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """name: of the job in Slurm. nodes: how many. programs: the directory of `elastic`, which all nodes see, as they
    see `directory`, an absolute path for what the agents write. grace_s: as of `elastic agent`. slots: for workers, of
    each node; None: as Slurm tells the agent. sbatch: further words for sbatch, which count more than those of the
    script. Raises ConfigError."""

    name: str
    nodes: int
    programs: str
    directory: str
    grace_s: int
    slots: int | None = None
    sbatch: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise ConfigError(f"--nodes {self.nodes} must be at least 1")
        if self.grace_s < 1:
            raise ConfigError(f"--grace {self.grace_s} must be at least 1 second")
        if self.slots is not None and self.slots < 1:
            raise ConfigError(f"--slots {self.slots} must be at least 1")
        for word in (self.name, self.programs, self.directory, *self.sbatch):
            if not word.isprintable():
                raise ConfigError(f"{word!r:.80} cannot stand in a batch script; leave out what is not printable")
        if self.sbatch and not self.sbatch[0].startswith("-"):
            raise ConfigError(f"{self.sbatch[0]!r:.80} is no option of sbatch; write -- --partition=spot")

    def lines(self, *options: str) -> list[str]:
        """The beginning of the script: what sbatch is to know, these options first, and where programs are."""
        own = (f"--job-name={self.name}", *options, "--exclusive", "--requeue", "--open-mode=append")
        said = [" ".join(map(_quoted, words)) for words in (*((option,) for option in own), *_by_option(self.sbatch))]
        return [
            "#!/bin/bash",
            *(f"#SBATCH {words}" for words in said),
            f"export PATH={shlex.quote(self.programs)}:$PATH",
        ]

    def slot_words(self) -> list[str]:
        """For `elastic agent`."""
        return [] if self.slots is None else ["--slots", str(self.slots)]


def _by_option(words: Sequence[str]) -> list[list[str]]:
    """Each option with its values."""
    found: list[list[str]] = []
    for word in words:
        if word.startswith("-") or not found:
            found.append([])
        found[-1].append(word)
    return found


def _quoted(word: str) -> str:
    """As sbatch takes it from a line of a script: it knows quotes, and takes # for the beginning of a comment."""
    return word if re.fullmatch(r"[\w@%+=:,./\[\]*-]+", word) else shlex.quote(word)
