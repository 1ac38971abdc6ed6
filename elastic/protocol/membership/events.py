"""What happens to a group beside the words of workers and agents, and what a step asks the leader to do, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from elastic.checkpoints.pointer import Pointer
from elastic.protocol.messages import Generation, Order, Word


@dataclass(frozen=True, slots=True)
class Elected:
    """This process leads. chain: records from the last form or loss generation to the highest committed."""

    term: int
    chain: tuple[Generation, ...] = ()


@dataclass(frozen=True, slots=True)
class AgentUp:
    """slots: workers that it starts, without spares; 0: as it said before."""

    node: str
    slots: int = 0


@dataclass(frozen=True, slots=True)
class AgentDown:
    """The agent's stream ended or went silent: its workers are silent, not dead. silent_s: for how long, at least, it
    has been silent already. ended: its connection was closed without a goodbye."""

    node: str
    silent_s: float = 0.0
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Committed:
    number: int


@dataclass(frozen=True, slots=True)
class CommitRefused:
    """Another leader wrote; the shell resigns."""

    number: int
    because: str


@dataclass(frozen=True, slots=True)
class GroupTick:
    """The group's deadline is over."""


@dataclass(frozen=True, slots=True)
class Resized:
    """Somebody wants the job to have so many workers, instead of those with which it was submitted."""

    workers: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """Somebody wants the job to end: in whatever state, or else as soon as all its nodes have said that they leave,
    without waiting whether somebody takes over."""

    because: str
    at_once: bool


@dataclass(frozen=True, slots=True)
class PointerAt:
    """The newest checkpoint taken by itself that the store knows of."""

    entry: str


Event: TypeAlias = (
    Word | PointerAt | Resized | Stopped | Elected | AgentUp | AgentDown | Committed | CommitRefused | GroupTick
)


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
