"""``steps.jsonl``: one line for every applied step of a job, in order, each step exactly once.

    {"step", "epoch", "generation", "world_size", "lr", "scalars", "samples", "data"}

Every member of a step sends the same line. The process that holds the lock of the job directory owns the only `Ledger`
on the file; it takes the first line of a step and compares the others with it. Numbers that JSON does not know are
written as the strings "nan", "inf" and "-inf".

In a job over several nodes each node keeps a *part*: the steps in which it had members, in the order of their arrival;
`merged` puts parts together.

A line is handed to the kernel at once, so it survives any kill of a process; the file is fsynced when it is closed. If
a line is lost with the machine, the state of its step is lost too. Lines that a full disk does not take are kept in
memory, in order, until it takes them.
"""

from __future__ import annotations

import json
import math
import os
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, Self, TypeAlias

from elastic.errors import ElasticError
from elastic.process import file_modes
from elastic.protocol import outer_round

Line: TypeAlias = dict[str, Any]

IDENTITY = ("step", "epoch", "lr", "scalars", "samples")
"""The fields that are the same in every run of a job, whatever died or joined."""

PLANNED = ("step", "epoch", "samples")
"""Those of them that follow from the plan alone, and not from sums of floats."""

UNWAITING = "unwaiting"
"""Among the data of a step: whether workers do not wait for each other in it, so that it differs from run to run."""

WAITING_LIMIT = 4096
"""The most lines of later steps that wait for an earlier one."""


class LedgerConflict(ElasticError):
    """Stop the job: two members report one step differently, or the file is not a ledger. Names step and field."""


class LedgerRefused(ElasticError):
    """Make room and start the job again: the disk has refused lines for so long that no more can be kept."""


@dataclass(slots=True)
class _Stretch:
    """The places in the file of the lines of consecutive steps."""

    first: int
    begins: array[int] = field(default_factory=lambda: array("q"))
    ends: array[int] = field(default_factory=lambda: array("q"))

    @property
    def end(self) -> int:
        return self.first + len(self.ends)


class Ledger:
    """The only writer of one ledger. Not thread-safe.

    whole: the ledger begins with step 0 and misses none, so a line that comes before its predecessors waits for them. A
    part takes every line as it comes. stable: a step that is done again, after a resume or a loss of every copy of the
    state, has the same bits. If it has not, and for a round with a quorum, its first line stands, and only what is
    planned is compared. Opening it cuts off a torn last line. Raises LedgerConflict if an earlier line is not of the
    next step, or, in a part, of no step.
    """

    def __init__(self, path: Path, *, whole: bool = True, stable: bool = True) -> None:
        self._path = path
        self._whole = whole
        self._stable = stable
        self._file = file_modes.opener(str(path), os.O_RDWR | os.O_APPEND | os.O_CREAT)
        self._stretches: list[_Stretch] = []
        self._size = 0
        self._waiting: dict[int, Line] = {}
        self.refused: OSError | None = None
        """Why the next line could not be written; None: it could."""
        try:
            self._repair()
        except BaseException:
            os.close(self._file)
            raise
        self._begun_with = self.next_step
        """Lines of steps before this one are of an earlier writer."""

    @property
    def next_step(self) -> int:
        """The step after the last one on file; 0 for an empty ledger."""
        return max((stretch.end for stretch in self._stretches), default=0)

    def append(self, line: Line) -> bool:
        """Take a line; False if its step was known already, with the same content.

        A line that comes before its predecessors, or while the disk is full, is kept. Raises LedgerConflict if it
        differs from the known line in epoch, lr, scalars or samples, or if more than WAITING_LIMIT lines wait for a
        missing one; LedgerRefused if that many wait for the disk.
        """
        line = plain(line)
        step = line["step"]
        known = self._line_of(step) or self._waiting.get(step)
        if known is not None:
            again = step < self._begun_with or known.get("generation") != line.get("generation")
            if (field := _first_difference(known, line, _compared(line, again=again, stable=self._stable))) is not None:
                raise LedgerConflict(
                    f"{self._path}: step {step} was applied with {field}={_shown(known.get(field))} by one worker and "
                    f"{field}={_shown(line.get(field))} by another"
                )
            return False
        if len(self._waiting) >= WAITING_LIMIT and step != self.next_step:
            if self.refused is not None:
                raise LedgerRefused(self._full())
            raise LedgerConflict(
                f"{self._path}: step {self.next_step} is missing, and {WAITING_LIMIT} later steps have been reported"
            )
        self._waiting[step] = line
        self.flush()
        return True

    def flush(self) -> None:
        """Write what can be written; `refused` says whether the disk took it."""
        try:
            while (step := self._ready()) is not None:
                self._put(self._waiting[step])
                del self._waiting[step]
        except OSError as error:
            self.refused = error
        else:
            self.refused = None

    def close(self) -> None:
        """Make the file durable and close it. Raises LedgerRefused if lines could not be written."""
        try:
            self.flush()
            if self.refused is not None:
                raise LedgerRefused(self._full())
            os.fsync(self._file)
        finally:
            os.close(self._file)

    def _full(self) -> str:
        because = self.refused.strerror if self.refused is not None else ""
        return f"cannot write {self._path} from step {self.next_step} on: {because}; make room and start the job again"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ready(self) -> int | None:
        """The step of the next waiting line that may be written, or None."""
        if self._whole:
            return self.next_step if self.next_step in self._waiting else None
        return min(self._waiting, default=None)

    def _put(self, line: Line) -> None:
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        try:
            written = os.write(self._file, data)
            if written < len(data):
                raise OSError(28, "No space left on device")
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._place(line["step"], self._size + len(data))

    def _place(self, step: int, end: int) -> None:
        """Note that the line of that step, and the file, end there."""
        stretch = next((known for known in self._stretches if known.end == step), None)
        if stretch is None:
            self._stretches.append(stretch := _Stretch(step))
        stretch.begins.append(self._size)
        stretch.ends.append(end)
        self._size = end

    def _line_of(self, step: int) -> Line | None:
        """The line on file of that step, or None."""
        stretch = next((known for known in self._stretches if known.first <= step < known.end), None)
        if stretch is None:
            return None
        begin, end = stretch.begins[step - stretch.first], stretch.ends[step - stretch.first]
        line: Line = json.loads(os.pread(self._file, end - begin, begin))
        return line

    def _repair(self) -> None:
        with open(os.dup(self._file), "rb") as file:
            file.seek(0)
            for number, text in enumerate(file):
                if not text.endswith(b"\n"):
                    break
                try:
                    step: int = _parsed(text, self._path, number + 1)["step"]
                except LedgerConflict as error:
                    raise LedgerConflict(f"{error}; move the job directory aside") from error
                if self._whole and step != number:
                    raise LedgerConflict(
                        f"{self._path}: line {number + 1} should be that of step {number}, but is that of step {step}; "
                        "move the job directory aside"
                    )
                self._place(step, self._size + len(text))
        os.ftruncate(self._file, self._size)


def read(path: Path, first: int = 0, end: int | None = None) -> list[Line]:
    """The complete lines of steps first..end-1 (default: to the last), in order; a torn last line is left out.

    Raises LedgerConflict naming a damaged line.
    """
    return list(lines(path, first, end))


def lines(path: Path, first: int = 0, end: int | None = None) -> Iterator[Line]:
    """As `read`, one line after the other."""
    with path.open("rb") as file:
        for number, text in enumerate(islice(file, first, end), start=first + 1):
            if text.endswith(b"\n"):
                yield _parsed(text, path, number)


def between(path: Path, first: int, end: int) -> list[Line]:
    """The lines of steps first..end-1 that the file, which may be a part, has; ordered by step."""
    found: dict[int, Line] = {}
    with path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            if (begin := _BEGIN.match(text)) and first <= int(begin[1]) < end and text.endswith(b"\n"):
                found[int(begin[1])] = _parsed(text, path, number)
    return [found[step] for step in sorted(found)]


_BEGIN = re.compile(rb'\{"step":(\d{1,18}),')
"""The beginning of every line that a Ledger writes."""


def merged(paths: Iterable[Path], *, stable: bool = True) -> list[Line]:
    """All steps of a job from the parts of its nodes, by step; of two lines of a step the one with values. stable: as
    in Ledger. Raises LedgerConflict if two parts differ in a step."""
    found: dict[int, Line] = {}
    for path in paths:
        for line in lines(path):
            known = found.setdefault(line["step"], line)
            again, more = known.get("generation") != line.get("generation"), _says_more(line, known)
            fields = PLANNED if more or _says_more(known, line) else _compared(line, again=again, stable=stable)
            if (field := _first_difference(known, line, fields)) is not None:
                raise LedgerConflict(f"{path}: step {line['step']} differs in {field} from another node's")
            if more:
                found[line["step"]] = line
    return [found[step] for step in sorted(found)]


def _says_more(line: Line, known: Line) -> bool:
    """Whether it has learning rates or values, and the other one has none: it was written for what was lost."""
    return any(line.get(name) for name in ("lr", "scalars")) and not any(known.get(name) for name in ("lr", "scalars"))


def compare(a: Sequence[Line], b: Sequence[Line]) -> str | None:
    """The first difference of two runs in step, epoch, lr, scalars or samples, as a sentence; None: identical."""
    for number, (one, other) in enumerate(zip_longest(a, b)):
        if one is None or other is None:
            return f"step {number} is only in the {'second' if one is None else 'first'} run"
        if (field := _first_difference(one, other)) is not None:
            return f"step {number} differs in {field}: {_shown(one.get(field))} and {_shown(other.get(field))}"
    return None


def depends_on_time(line: Line) -> bool:
    """Whether what the workers did in a step, with which samples, depends on how fast they were."""
    data = line.get("data")
    return outer_round.has_quorum(line) or (isinstance(data, dict) and bool(data.get(UNWAITING)))


def _compared(line: Line, *, again: bool, stable: bool) -> Sequence[str]:
    """The fields in which two lines of one step, of which this is one, have to be the same."""
    return PLANNED if again and (depends_on_time(line) or not stable) else IDENTITY


def _first_difference(a: Line, b: Line, fields: Sequence[str] = IDENTITY) -> str | None:
    # As text, because 0.0 == -0.0 and 1 == 1.0 while their bits differ.
    return next((field for field in fields if _text(a.get(field)) != _text(b.get(field))), None)


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:200] + "..."


def _parsed(text: bytes, path: Path, number: int) -> Line:
    """The line of a step. Raises LedgerConflict for other texts. number: the line's number in the file, from 1."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LedgerConflict(f"{path}: line {number} is damaged: {error}") from error
    step = line.get("step") if isinstance(line, dict) else None
    if not isinstance(line, dict) or type(step) is not int or step < 0:
        raise LedgerConflict(f"{path}: line {number} is damaged: it is of no step")
    return line


def plain(line: Line) -> Line:
    """The line as it will be read back, so that it can be compared with a line on file."""
    plain: Line = json.loads(json.dumps(_finite(line)))
    return plain


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_finite(item) for item in value]
    return value
