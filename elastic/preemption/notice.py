"""What a provider says about the near future of this machine, and times in its documents as seconds left. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

LONGEST_S = 1e9
"""Thirty years; milliseconds of a longer time do not fit into a message."""


class NoticeKind(StrEnum):
    """Why a machine goes, or may be disturbed."""

    RECLAIM = "reclaim"
    """The provider takes a spot machine back."""
    MAINTENANCE = "maintenance"
    """It is rebooted, moved or stopped with its memory lost."""
    TIME_LIMIT = "time limit"
    """The batch system ends the allocation."""
    ASKED = "asked"
    """A person or a program wants the node empty. Lasts until it is taken back; all others end by themselves."""
    ADVICE = "advice"
    """Something may happen, or a pause that a job survives: nobody leaves because of it."""


@dataclass(frozen=True, slots=True)
class Notice:
    """seconds_left: from now until the machine may be gone; infinite for advice. because: the provider's words. source:
    who said it first, if the provider only passes it on.

    Seen again with the same because it is the same notice, and only an earlier end is news.
    """

    kind: NoticeKind
    seconds_left: float
    because: str
    source: str = ""

    @property
    def leaves(self) -> bool:
        """Whether the node has to leave."""
        return self.kind is not NoticeKind.ADVICE


def seconds_until(then: datetime, now: datetime, longest_s: float) -> float:
    """0..longest_s. longest_s: the provider's documented warning time, which a wrong clock here cannot exceed."""
    return min(max(0.0, (then - now).total_seconds()), longest_s)


def utc(text: str) -> datetime:
    """An ISO 8601 time such as 2026-01-31T08:22:00Z. Raises ValueError."""
    then = datetime.fromisoformat(text)
    return then if then.tzinfo else then.replace(tzinfo=UTC)
