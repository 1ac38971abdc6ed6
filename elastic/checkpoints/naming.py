"""Names in a checkpoint directory. A name is checked before it becomes a path.

Parts of one entry come from one generation: its number and a few digits of its token are in the entry's name, so
members of two generations, or of two runs of the job, can never complete each other's parts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from elastic.errors import CheckpointCorrupt, ConfigError

PERIODIC = "_periodic"
"""The series of automatic checkpoints. No name of job.save begins with an underscore."""

MANIFEST = "manifest.json"
OWNER = "owner.json"
FILES = "files"
TOKEN_DIGITS = 8

OWN_FILES_PREFIX = "elastic-checkpoint-"
"""Prefix of the temporary directories in which on_checkpoint hooks leave their files."""

_SERIES = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_ENTRY = re.compile(rf"step-([0-9]{{12}})\.([0-9]{{1,16}})\.g([0-9]{{1,16}})-([0-9a-f]{{{TOKEN_DIGITS}}})")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+@=-]{0,199}")


def check_series(name: str) -> str:
    """The name, if job.save can use it. Raises ConfigError."""
    if not isinstance(name, str) or not _SERIES.fullmatch(name):
        raise ConfigError(
            f"save({name!r}): a name has up to 100 letters, digits, '.', '_' or '-', and starts with a letter or digit"
        )
    return name


def is_series(name: str) -> bool:
    """Whether a directory of checkpoints can have this name."""
    return name == PERIODIC or _SERIES.fullmatch(name) is not None


@dataclass(frozen=True, slots=True, order=True)
class EntryName:
    """The moment of an entry. Entries sort by age.

    step: number of applied steps. call: number of earlier collective calls of the epoch, which tells two saves of one
    step apart. token: hexadecimal digits of the generation's token.
    """

    step: int
    call: int
    generation: int
    token: str

    def __str__(self) -> str:
        return f"step-{self.step:012d}.{self.call}.g{self.generation}-{self.token[:TOKEN_DIGITS]}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The name in this text; None: the text is no name of an entry."""
        match = _ENTRY.fullmatch(text)
        return None if match is None else cls(int(match[1]), int(match[2]), int(match[3]), match[4])

    @classmethod
    def of(cls, text: str) -> Self:
        """The name in this text. Raises CheckpointCorrupt if it is none."""
        if (name := cls.parse(text)) is None:
            raise CheckpointCorrupt(f"{text!r} is no name of a checkpoint")
        return name


def part_file(rank: int, world: int) -> str:
    """The file with one member's tensors."""
    return f"part-{rank:05d}-of-{world:05d}.safetensors"


def part_note(rank: int, world: int) -> str:
    """The file with that member's note about its files."""
    return f"part-{rank:05d}-of-{world:05d}.json"


def is_inside(path: str) -> bool:
    """Whether a manifest may name this file: it is in the entry, or in its directory `files`."""
    directory, _, name = path.rpartition("/")
    return directory in ("", FILES) and _FILE.fullmatch(name) is not None and name != MANIFEST
