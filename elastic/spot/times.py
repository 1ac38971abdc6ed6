"""Times in the documents of providers, as seconds that are left."""

from __future__ import annotations

from datetime import UTC, datetime


def seconds_until(then: datetime, now: datetime, longest_s: float) -> float:
    """0..longest_s. longest_s: the provider's documented warning time, which a wrong clock here cannot exceed."""
    return min(max(0.0, (then - now).total_seconds()), longest_s)


def utc(text: str) -> datetime:
    """An ISO 8601 time such as 2026-01-31T08:22:00Z. Raises ValueError."""
    then = datetime.fromisoformat(text)
    return then if then.tzinfo else then.replace(tzinfo=UTC)
