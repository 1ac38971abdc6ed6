"""A job as a harness sees it, wherever it runs: follow it, and wait for what it comes to."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from elastic.errors import ElasticError

JOB_POLL_S = 0.02
OUTPUT_TAIL = 4000

T = TypeVar("T")


class JobFailed(ElasticError):
    """Look at the job's directory: it ended, or stood still, where it should have gone on."""


class Followed(ABC):
    """Raises JobFailed from every wait when the job ends first or the wait takes longer than its deadline."""

    @property
    @abstractmethod
    def mark(self) -> str:
        """What marks all processes of the job; see processes.py."""

    @abstractmethod
    def exit_code(self) -> int | None:
        """None while it runs."""

    @abstractmethod
    def new_events(self) -> Iterator[dict[str, Any]]:
        """Journal lines of all processes since the last call, by time."""

    @abstractmethod
    def steps(self) -> list[dict[str, Any]]:
        """The ledger so far."""

    @abstractmethod
    def output(self) -> str:
        """What it has said, for a failure."""

    @abstractmethod
    def stop(self) -> None:
        """End it and everything it started. Any number of times."""

    @abstractmethod
    def polled(self) -> None:
        """Called often while something is waited for."""

    def until(self, what: str, reached: Callable[[], T | None], deadline_s: float) -> T:
        """The first value of `reached` that is true."""
        until_s = time.monotonic() + deadline_s
        while True:
            self.polled()
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
            self.polled()
            time.sleep(JOB_POLL_S)
        self.polled()
        return status

    def last_words(self) -> str:
        return self.output()[-OUTPUT_TAIL:]
