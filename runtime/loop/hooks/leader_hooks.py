"""Tasks of the leader besides training: on_lead hooks, and sinks that get every applied step once, in order.

Every worker keeps its newest records, so that the next leader can go on where the sink of a dead leader ended; older
records come from the ledger. Only the sink knows exactly where it ended.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from elastic.errors import ConfigError
from runtime.data.random_state import randomness_kept
from runtime.session import Session, StepRecord

RECORDS_KEPT = 1024
"""How many applied steps a worker keeps; the ledger must have them on file by then."""


class JobView(Protocol):
    """The part of its job that a sink may read."""

    @property
    def worker_id(self) -> str: ...

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...


class Sink(Protocol):
    """A receiver of the records of applied steps. Used by the leader's user thread only, between steps."""

    def open(self, job: JobView) -> int | None:
        """This worker leads now. Returns the first step that the sink has no record of, 0 if it is empty. None: that is
        not known yet; it is asked again after the next step."""

    def write(self, record: StepRecord) -> bool | None:
        """Write the next applied step. Its samples, of which there may be thousands, are in the ledger only. False: the
        sink has not taken it; `open` is asked again what to write next."""

    def close(self) -> None:
        """The job has ended."""


REFILL_MAX = 16384
"""How many steps are read from the ledger at a time, between two steps; a sink may be a million behind."""
CLOSE_S = 60.0
"""Seconds that the end of a job waits for sinks that are not ready, at most."""


@dataclass(slots=True)
class _Feed:
    sink: Sink
    job: JobView
    next_step: int | None = None
    """The next step to write; None: the sink is not open."""
    asked: bool = False
    """The sink was asked to open, and is to be closed."""
    refilled: bool = False
    """The ledger has given it steps, and has more."""


class LeaderHooks:
    """One worker's readiness to lead. Nothing here is collective."""

    def __init__(self, session: Session) -> None:
        self.hooks: list[Callable[[], None]] = []
        self._session = session
        self._feeds: list[_Feed] = []
        self._leads = False
        self._recent: deque[StepRecord] = deque(maxlen=RECORDS_KEPT)
        self._fresh = False

    def add(self, sink: Sink, job: JobView) -> None:
        """Feed this sink whenever this worker leads."""
        self._feeds.append(_Feed(sink, job))

    def begin(self, step: int) -> None:
        """The loop begins here, with this step."""
        self._fresh = step == 0

    def applied(self, record: StepRecord) -> None:
        """Keep the record of an applied step; `check` has to follow."""
        if self._feeds and not self._session.script.at.behind:
            self._recent.append(replace(record, samples=[]))

    def check(self) -> None:
        """Between steps: begin to lead if this worker is the leader now, and bring the sinks up to date."""
        if self._session.script.at.joining or self._session.rank != 0:
            return
        if self._leads and not self._feeds:
            return
        with randomness_kept():
            if not self._leads:
                self._leads = True
                for hook in self.hooks:
                    hook()
            for feed in self._feeds:
                self._feed(feed)

    def close(self) -> None:
        """The job has ended: write the remaining records, for up to CLOSE_S, and close the sinks that are open here."""
        end_s = time.monotonic() + CLOSE_S
        for feed in self._feeds:
            if not feed.asked:
                continue
            while not self._feed(feed, last=True) and time.monotonic() < end_s:
                time.sleep(0.05)  # it has no room, or its end is not known yet: nothing here tells when
            if feed.next_step is None and self._recent:
                self._say_gap(feed, f"the last steps up to {self._recent[-1].step} could not be written")
            feed.sink.close()
            feed.next_step, feed.asked = None, False

    def _feed(self, feed: _Feed, last: bool = False) -> bool:
        """Whether the sink has everything that this worker keeps."""
        newest = self._recent[-1].step if self._recent else -1
        if feed.next_step is None:
            feed.asked, feed.next_step = True, feed.sink.open(feed.job)
            if feed.next_step is None:
                return False
            # A leader that died may have written the one step that this worker has not applied yet. If a job begins
            # again from its first step, its processes are restarted, and the steps in the sink are its own.
            fresh = self._fresh and not self._session.restarted
            if fresh and feed.next_step > newest + (2 if self._recent else 1):
                raise ConfigError(
                    f"{feed.sink} has {feed.next_step} steps of another run, and this one starts at step 0; give it "
                    "another path, or move the old one aside"
                )
        if (
            self._recent
            and feed.next_step < self._recent[0].step
            and not self._refill(feed, self._recent[0].step, last)
        ):
            return False
        return all(self._write(feed, record) for record in self._recent if record.step >= (feed.next_step or 0))

    def _refill(self, feed: _Feed, end: int, last: bool) -> bool:
        """Write steps from before this worker's time. False: wait, because the ledger may yet get them.

        The ledger is asked ever less often, because it is read from its beginning.
        """
        assert feed.next_step is not None
        waiting = len(self._recent)
        last = last or waiting == RECORDS_KEPT
        if waiting & (waiting - 1) and not last and not feed.refilled:
            return False
        part = min(end, feed.next_step + REFILL_MAX)
        records = self._session.history(feed.next_step, part)
        feed.refilled = bool(records) and part < end
        for record in records:
            if not self._write(feed, replace(record, samples=[])):
                return False
        if feed.refilled:
            return False
        if feed.next_step < end and not last:
            return False
        if feed.next_step < end:
            self._say_gap(feed, f"steps {feed.next_step} to {end - 1} are not in the ledger here")
        return True

    def _say_gap(self, feed: _Feed, why: str) -> None:
        missing = f"{why}, so {feed.sink} is without them"
        self._session.note("sink_gap", because=missing)
        print(f"elastic: {missing}", file=sys.stderr, flush=True)

    def _write(self, feed: _Feed, record: StepRecord) -> bool:
        taken = feed.sink.write(record) is not False
        feed.next_step = record.step + 1 if taken else None
        return taken
