"""The records of applied steps on their way into the ledger. A record that the ledger refuses ends the job."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from elastic.agent.worker import step_spool
from elastic.errors import ExitCode
from elastic.protocol.messages import Failed
from elastic.records.journal import Journal
from elastic.records.ledger import Ledger, LedgerConflict, LedgerRefused, Line
from elastic.wire import codec


class LedgerWriter:
    """Writes the records of one agent's workers. fail: called once, with a word to the leader, if the ledger is
    broken."""

    def __init__(self, ledger: Ledger, job_dir: Path, journal: Journal, fail: Callable[[Failed], None]) -> None:
        self._ledger = ledger
        self._job_dir = job_dir
        self._journal = journal
        self._fail = fail
        self._broken = False
        self._refused: OSError | None = None
        self._refused_since_s = 0.0

    @property
    def next_step(self) -> int:
        """The first step that is not in the ledger yet."""
        return self._ledger.next_step

    def keep(self, worker_id: str, text: str) -> None:
        """Add a record to the ledger. Two workers that differ about a step train two models, so the job must end.

        Raises WireError for a text that is no record of a step.
        """
        self._append(worker_id, record(text))

    def keep_left_behind(self, worker_id: str) -> None:
        """Add the records of a worker that ended before the agent had received them."""
        path = step_spool.spill_path(self._job_dir, worker_id)
        for text in step_spool.left_behind(path):
            self._append(worker_id, record(text))
        path.unlink(missing_ok=True)

    def _append(self, worker_id: str, line: Line) -> None:
        if self._broken:
            return
        step = line["step"]
        try:
            self._ledger.append(line)
        except LedgerConflict as error:
            self._break(worker_id, f"LedgerConflict step {step}", str(error), ExitCode.DISAGREE)
        except LedgerRefused as error:
            self._break(worker_id, f"LedgerRefused step {step}", str(error), ExitCode.BAD_INPUT)
        self._watch_disk()

    def settle(self) -> None:
        """To be called now and then: write what a full disk has not taken, if the disk takes it now."""
        if self._refused is not None and not self._broken:
            self._ledger.flush()
            self._watch_disk()

    def _watch_disk(self) -> None:
        """Note in the journal, after the fact, that the disk was full: the journal lies on the same disk."""
        refused = self._ledger.refused
        if refused is None and self._refused is not None:
            late_s, because = round(time.monotonic() - self._refused_since_s, 3), self._refused.strerror
            self._journal.write("ledger_late", seconds=late_s, because=because, step=self._ledger.next_step)
        if refused is not None and self._refused is None:
            self._refused_since_s = time.monotonic()
        self._refused = refused

    def _break(self, worker_id: str, place: str, because: str, exit_code: ExitCode) -> None:
        self._broken = True
        self._journal.write("ledger_broken", worker_id=worker_id, because=because)
        self._fail(Failed(worker_id, 0, place, because, exit_code))


def record(text: str | bytes) -> Line:
    """A line for the ledger, parsed from a worker's text. Raises WireError for a text that is no record of a step."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise codec.WireError(f"a step record is no JSON: {error}") from error
    step = line.get("step") if isinstance(line, dict) else None
    if not isinstance(line, dict) or type(step) is not int or not 0 <= step <= codec.NUMBER_LIMIT:
        raise codec.WireError("a step record needs a step")
    return line
