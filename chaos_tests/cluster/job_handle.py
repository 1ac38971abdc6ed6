"""A job as a harness sees it, wherever it runs: follow it, and wait for what it comes to."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from chaos_tests.support.json_lines import Journals
from elastic.errors import ElasticError

JOB_POLL_S = 0.02
OUTPUT_TAIL = 4000

T = TypeVar("T")


class JobFailed(ElasticError):
    """Look at the job's directory: it ended, or stood still, where it should have gone on."""


class Followed(ABC):
    """A context manager that leaves nothing running. on_poll: called often while something is waited for. journals: the
    paths of those that there are. Raises JobFailed from every wait when the job ends first or the wait takes longer
    than its deadline."""

    def __init__(self, on_poll: Callable[[Followed], None], journals: Callable[[], Iterable[Path]]) -> None:
        self._on_poll = on_poll
        self._journals = Journals(journals)
        self._rounds_begun = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    @property
    @abstractmethod
    def mark(self) -> str:
        """What marks all processes of the job; see processes.py."""

    @abstractmethod
    def exit_code(self) -> int | None:
        """None while it runs."""

    def new_events(self) -> list[dict[str, Any]]:
        """Journal lines of all processes since the last call, by time."""
        lines = self._journals.new()
        self._rounds_begun |= any(line["event"] == "script_started" for line in lines)
        return lines

    def has_begun(self) -> bool:
        """Whether a step was applied, or, of a job in rounds, a script was started, as far as `new_events` knows."""
        return self._rounds_begun or bool(self.steps())

    @abstractmethod
    def steps(self) -> list[dict[str, Any]]:
        """The ledger so far."""

    @abstractmethod
    def output(self) -> str:
        """What it has said, for a failure."""

    @abstractmethod
    def stop(self) -> None:
        """End it and everything it started. Any number of times."""

    def until(self, what: str, reached: Callable[[], T | None], deadline_s: float) -> T:
        """The first value of `reached` that is true."""
        until_s = time.monotonic() + deadline_s
        while True:
            self._on_poll(self)
            if value := reached():
                return value
            if (status := self.exit_code()) is not None:
                raise JobFailed(f"the job ended with {status} before {what}\n{self.last_words()}")
            if time.monotonic() > until_s:
                raise JobFailed(f"not within {deadline_s:.0f} s: {what}\n{self.last_words()}")
            time.sleep(JOB_POLL_S)  # files and a remote process: there is nothing to wait on

    def ended(self, deadline_s: float) -> int | None:
        """Its exit code; None if it is still running at the deadline."""
        until_s = time.monotonic() + deadline_s
        while (status := self.exit_code()) is None:
            if time.monotonic() > until_s:
                return None
            self._on_poll(self)
            time.sleep(JOB_POLL_S)
        self._on_poll(self)
        return status

    def last_words(self) -> str:
        return self.output()[-OUTPUT_TAIL:]
