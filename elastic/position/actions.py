"""What a step asks the worker's threads to do, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from elastic.messages import Generation, Word
from elastic.position.state import Position
from elastic.tree import Node


@dataclass(frozen=True, slots=True)
class AbortRings:
    """Every ring, entered, pending or retired. Done before anything is said."""


@dataclass(frozen=True, slots=True)
class BuildRing:
    generation: Generation


@dataclass(frozen=True, slots=True)
class RetireRing:
    """Keep it open until the headers of operation ``until`` have come, then close it."""

    generation: int
    until: int


@dataclass(frozen=True, slots=True)
class CloseRetired:
    """Rings retired until an operation up to ``op`` may be closed."""

    op: int


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Tell the leaving members, on the old ring, that the result of op is held here."""

    generation: int
    op: int
    to: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AwaitAcknowledgements:
    """of: members of the ring that stay; whoever joins holds the state of op and needs nothing from this one."""

    generation: int
    op: int
    of: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FreeResult:
    op: int


@dataclass(frozen=True, slots=True)
class DropRoots:
    """Free every partial sum that is not one of ``keep``."""

    keep: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Say:
    word: Word


@dataclass(frozen=True, slots=True)
class Leave:
    """Stop this process: fenced."""

    because: str


Action: TypeAlias = (
    AbortRings
    | BuildRing
    | RetireRing
    | CloseRetired
    | Acknowledge
    | AwaitAcknowledgements
    | FreeResult
    | DropRoots
    | Say
    | Leave
)


Outcome: TypeAlias = tuple[Position, tuple[Action, ...]]
