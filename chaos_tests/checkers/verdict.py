"""What a checker says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Answer(StrEnum):
    TRUE = "true"
    FALSE = "false"
    UNKNOWN = "unknown"
    """It applies, and what was left behind does not show it."""
    NOT_APPLICABLE = "not applicable"
    """This job and these faults cannot show it, however long they run."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """because: a sentence. at: the lines it rests on, as ``<file>:<byte>``."""

    answer: Answer
    because: str
    at: tuple[str, ...] = ()


def holds(because: str) -> Verdict:
    return Verdict(Answer.TRUE, because)


def broken(because: str, *at: str) -> Verdict:
    return Verdict(Answer.FALSE, because, tuple(place for place in at if place))


def unknown(because: str) -> Verdict:
    return Verdict(Answer.UNKNOWN, because)


def not_applicable(because: str) -> Verdict:
    return Verdict(Answer.NOT_APPLICABLE, because)


def first_broken(found: Iterable[Verdict], otherwise: Verdict) -> Verdict:
    """The first counterexample, or else what the checker says without one."""
    return next(iter(found), otherwise)
