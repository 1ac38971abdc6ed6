"""What a step asks the leader's shell to do, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from elastic.messages import Generation, Order


@dataclass(frozen=True, slots=True)
class Commit:
    """One transaction: compared with the election key and the highest committed number."""

    generation: Generation


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


Action: TypeAlias = Commit | Tell | Note | End
