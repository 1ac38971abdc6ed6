"""What a step asks the leader's shell to do, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from elastic.checkpoints.pointer import Pointer
from elastic.messages import Generation, Order


@dataclass(frozen=True, slots=True)
class Commit:
    """One transaction: compared with the election key and the highest committed number."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Point:
    """Move the pointer of a series there if it is newer than where the pointer is, and tell its holder what came of
    it."""

    series: str
    pointer: Pointer


@dataclass(frozen=True, slots=True)
class Tell:
    to: tuple[str, ...]
    order: Order


@dataclass(frozen=True, slots=True)
class Note:
    """A line of the journal."""

    event: str
    fields: dict[str, object]


@dataclass(frozen=True, slots=True)
class End:
    """The job is over."""

    exit_code: int
    because: str
    digest: str = ""


Action: TypeAlias = Commit | Point | Tell | Note | End
