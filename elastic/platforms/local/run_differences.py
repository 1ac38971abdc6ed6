"""What the runs of an examined script have noted, and the first difference between two of them. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Line = dict[str, Any]
"""What a process notes, see elastic/agent/worker/examination.py."""


@dataclass(frozen=True, slots=True)
class EndedRun:
    """A run that is over. raised: the note of the exception that ended it. errors: what it has written to stderr."""

    exit_code: int
    lines: list[Line]
    raised: Line | None
    errors: str


@dataclass(frozen=True, slots=True)
class Difference:
    """The first one between two runs. what: in words, the parameter first of those that differ."""

    step: int | None
    """In which it came about; None: before the first one."""
    what: str
    because: str


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    difference: Difference | None
    """None: the same bits."""
    tried: bool = True
    """False: the script has too few steps for it."""


def indented(difference: Difference) -> Iterator[str]:
    """The lines of a report that tell of it."""
    where = "before the first step" if difference.step is None else f"first in step {difference.step}"
    for text in (f"{where}: {difference.what}", difference.because):
        yield textwrap.fill(text, 100, initial_indent=" " * 13, subsequent_indent=" " * 13)


def first_difference(one: Sequence[Line], other: Sequence[Line]) -> Difference | None:
    """A line is of the moment in which its step begins, so what differs there has differed since the step before."""
    for a, b in zip(one, other, strict=False):
        step = a["step"] - 1 if a["step"] else None
        for field, say in (("samples", "its samples"), ("state", "{}"), ("scalars", "the logged {}")):
            if a[field] != b[field]:
                return Difference(step, say.format(_first_key(a[field], b[field])), "")
    if len(one) != len(other):
        return Difference(min(len(one), len(other)), "one run has fewer steps", "")
    return None


def late_difference(once: Sequence[Line], late: Sequence[Line], at: int, how: str) -> Difference | None:
    """The difference between a run (`once`) and a run that has entered it before step `at` (`late`), without a reason.
    A newcomer's values in step `at` do not count: the copy of the state replaces them. A resumed run has no scalars
    and samples from before step `at`. how: "resumed" or "joins"."""
    first = at if how == "resumed" else at + 1
    one, other = ([line for line in lines if line["step"] >= first] for lines in (once, late))
    if how == "resumed":
        nothing: Line = {"scalars": {}, "samples": []}
        one[:1], other[:1] = ([{**line, **nothing} for line in lines[:1]] for lines in (one, other))
    return first_difference(one, other)


def moved_names(field: str, once: Sequence[Line], again: Sequence[Line], late: Sequence[Line], at: int) -> list[str]:
    """Names that two runs have alike when that step begins, and a third one has not."""
    a, b, c = (next(line for line in lines if line["step"] == at)[field] for lines in (once, again, late))
    return [name for name, value in a.items() if b.get(name) == value and c.get(name, value) != value]


def _first_key(one: Any, other: Any) -> str:
    """Parameters come first among the state, in the order in which they were registered."""
    if not isinstance(one, dict):
        return ""
    names: list[str] = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    more = len(names) - 1
    return names[0] + (f", and {more} more" if more else "")
