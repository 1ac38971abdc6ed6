"""Events of a group besides words of workers and agents, and actions that a step asks of the leader, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from elastic.checkpoints.pointer import Pointer
from elastic.protocol.messages import Generation, Order, Word


@dataclass(frozen=True, slots=True)
class Elected:
    """This process leads. chain: records from the last form or loss generation to the highest committed one."""

    term: int
    chain: tuple[Generation, ...] = ()


@dataclass(frozen=True, slots=True)
class AgentUp:
    """An agent attends. slots: number of workers that it starts, without spares; 0: the number that it said before."""

    node: str
    slots: int = 0


@dataclass(frozen=True, slots=True)
class AgentDown:
    """The agent's stream ended or went silent: its workers are silent, not dead. silent_s: the least time for which it
    has been silent already. ended: its connection was closed without a goodbye."""

    node: str
    silent_s: float = 0.0
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Committed:
    number: int


@dataclass(frozen=True, slots=True)
class CommitRefused:
    """Another leader has written a record, so the record was not committed; the caller resigns."""

    number: int
    because: str


@dataclass(frozen=True, slots=True)
class GroupTick:
    """The group's deadline is over."""


@dataclass(frozen=True, slots=True)
class Resized:
    """An operator wants the job to have this many workers, instead of the number with which it was submitted."""

    workers: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """The job is to end. at_once: in any state; else once all its nodes have said that they leave, without
    successors."""

    because: str
    at_once: bool


@dataclass(frozen=True, slots=True)
class PointerAt:
    """The newest automatic checkpoint that the store knows of."""

    entry: str


Event: TypeAlias = (
    Word | PointerAt | Resized | Stopped | Elected | AgentUp | AgentDown | Committed | CommitRefused | GroupTick
)


@dataclass(frozen=True, slots=True)
class Commit:
    """Write the record in one transaction, which checks the election key and the highest committed number."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Point:
    """Move the pointer of a series to a checkpoint, if that is newer, and tell the checkpoint's writer the result."""

    series: str
    pointer: Pointer


@dataclass(frozen=True, slots=True)
class Tell:
    to: tuple[str, ...]
    order: Order


@dataclass(frozen=True, slots=True)
class Note:
    """Write a line to the journal."""

    event: str
    fields: dict[str, object]


@dataclass(frozen=True, slots=True)
class End:
    """The job is over."""

    exit_code: int
    because: str
    digest: str = ""


Action: TypeAlias = Commit | Point | Tell | Note | End
