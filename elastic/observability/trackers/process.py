"""What the process does, from the first line to the last.

Standard input has a JSON line for each applied step, {"step": 7, "points": {"loss": 0.5}}, in order and without a gap,
and {"end": true} when the job is over. Standard output has the answers: {"next": 5} once the tracker is reached, which
is the first step to send; {"said": "..."} for people. Exit status 0: everything was sent. 3: another leader's process
has taken over.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import tenacity

FLUSH_S = 5.0
"""Seconds between two batches."""
BATCH_MAX = 1000
"""Steps of one batch, at most."""
RETRY_MAX_S = 30.0
"""Seconds between two attempts to reach the tracker, at most."""
SUPERSEDED = 3
"""Exit status."""


@dataclass(frozen=True, slots=True)
class StepPoints:
    """An applied step. time_s: when it came, in seconds since 1970."""

    number: int
    points: Mapping[str, float]
    time_s: float = field(default_factory=time.time)


class Superseded(Exception):
    """Another process sends the steps of this run: this worker does not lead any more, and may not know it yet."""


class Tracker(Protocol):
    """A run of an experiment tracker. Methods raise whatever the library raises; they are tried again then."""

    def connect(self) -> int:
        """Become the one process that sends the steps of the run. Returns the first step that the run has not got."""

    def send(self, steps: list[StepPoints]) -> None:
        """Send steps, at least one. Raises Superseded."""

    def finish(self, *, complete: bool) -> None:
        """There are no more steps. complete: the job is over; else this worker has died, and another goes on."""


class Lines:
    """The lines of a pipe."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._read = b""

    def are_over(self) -> bool:
        """Whether there is no line, and will be none."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return any(seen == select.POLLHUP for _, seen in poll.poll(0))

    def next(self, timeout_s: float) -> bytes | None:
        """The next line; None: there was none for so long. Raises EOFError."""
        end_s = time.monotonic() + timeout_s
        while b"\n" not in self._read:
            ready, _, _ = select.select([self._descriptor], [], [], max(0.0, end_s - time.monotonic()))
            if not ready:
                return None
            found = os.read(self._descriptor, 1 << 16)
            if not found:
                raise EOFError
            self._read += found
        line, _, self._read = self._read.partition(b"\n")
        return line


def serve(tracker: Tracker, lines: Lines, answer: Callable[[dict[str, Any]], None]) -> int:
    """Send what the lines say until they end. Returns the exit status."""
    parent = os.getppid()

    def insist(action: Callable[[], Any]) -> Any:
        """Try until it works, or until the worker has died."""

        def say(state: tenacity.RetryCallState) -> None:
            if state.attempt_number == 1 and state.outcome is not None:
                why = state.outcome.exception()
                answer({"said": f"{type(why).__name__}: {why}; it is tried again, and steps are kept until then"})

        return tenacity.Retrying(
            retry=tenacity.retry_if_not_exception_type(Superseded),
            wait=tenacity.wait_exponential(multiplier=0.5, max=RETRY_MAX_S),
            stop=lambda state: os.getppid() != parent,
            before_sleep=say,
            reraise=True,
        )(action)

    try:
        if lines.are_over():
            return 0  # this process was slow to start, and would take the run from the next leader's
        answer({"next": insist(tracker.connect)})
        while True:
            steps, complete = _batch(lines)
            if steps:
                insist(partial(tracker.send, steps))
            if complete:
                insist(partial(tracker.finish, complete=True))
                return 0
    except Superseded:
        return SUPERSEDED
    except EOFError:
        tracker.finish(complete=False)
        return 0
    except Exception:
        if os.getppid() == parent:
            raise
        return 0


def _batch(lines: Lines) -> tuple[list[StepPoints], bool]:
    """(the steps that come in FLUSH_S, whether they are the last). Raises EOFError if the worker dies: what it has sent
    last may be known to nobody else, and the next leader sends it again."""
    steps: list[StepPoints] = []
    end_s = time.monotonic() + FLUSH_S
    while len(steps) < BATCH_MAX and (line := lines.next(max(0.0, end_s - time.monotonic()))) is not None:
        found = json.loads(line)
        if found.get("end"):
            return steps, True
        steps.append(StepPoints(found["step"], found["points"]))
    return steps, False
