"""What a checker says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial


class Truth(StrEnum):
    TRUE = "true"
    FALSE = "false"
    UNKNOWN = "unknown"
    """It applies, and what was left behind does not show it."""
    NOT_APPLICABLE = "not applicable"
    """This job and these faults cannot show it, however long they run."""


@dataclass(frozen=True, slots=True)
class CheckerVerdict:
    """because: a sentence. at: the lines it rests on, as ``<file>:<byte>``."""

    answer: Truth
    because: str
    at: tuple[str, ...] = ()


holds = partial(CheckerVerdict, Truth.TRUE)
unknown = partial(CheckerVerdict, Truth.UNKNOWN)
not_applicable = partial(CheckerVerdict, Truth.NOT_APPLICABLE)


def broken(because: str, *at: str) -> CheckerVerdict:
    return CheckerVerdict(Truth.FALSE, because, tuple(place for place in at if place))


def first_broken(found: Iterable[CheckerVerdict], otherwise: CheckerVerdict) -> CheckerVerdict:
    """The first counterexample, or else what the checker says without one."""
    return next(iter(found), otherwise)
