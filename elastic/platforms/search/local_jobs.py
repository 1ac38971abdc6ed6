"""Trials as jobs of this machine: `elastic run` in a directory of each, which goes on there when it is run again.

The kernel ends them with the search, so a search that is started again finds what they have kept, and nobody running.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from elastic.errors import ExitCode
from elastic.platforms.search.decisions import JobState, TrialJobView, values_of
from elastic.process import children
from elastic.records import job_directory
from elastic.records.job_follower import Growing, parsed_steps

STOP_S = 15.0
"""A stop takes `elastic run` 10 s at most; after so long it is killed."""

PATIENCE_S = 30.0
"""What a killed search leaves is gone by then."""

POLL_S = 0.05


class LocalJobs:
    """home: the directory of the search. options: of `elastic run`."""

    def __init__(self, home: Path, options: Sequence[str], metric: str) -> None:
        self._home = home
        self._options = options
        self._metric = metric
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._ledgers: dict[int, Growing] = {}
        self._values: dict[int, dict[int, float]] = {}
        self._stopped: set[int] = set()

    def name(self, trial: int) -> str:
        return f"trial-{trial}"

    def begin(self, trial: int, words: Sequence[str]) -> None:
        directory = self._directory(trial)
        deadline_s = time.monotonic() + PATIENCE_S
        while job_directory.is_live(directory) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)  # processes of a search that was killed: there is nothing to wait on
        own = ("--quiet", "--name", self.name(trial), "--job-dir", str(directory))
        command = children.dying_with_this(*children.python("elastic.cli", "run", *self._options, *own, *words))
        self._running[trial] = children.start(command, self._home / f"{self.name(trial)}.log", obeys=False)
        self._stopped.discard(trial)

    def look(self, trial: int) -> TrialJobView:
        process, directory = self._running.get(trial), self._directory(trial)
        code = process.poll() if process is not None else None
        ledger = self._ledgers.setdefault(trial, Growing(directory / "steps.jsonl", from_end=False))
        values = self._values.setdefault(trial, {})
        values |= values_of(parsed_steps(ledger.all_lines()), self._metric)
        if process is not None and code is None:
            status = job_directory.read_json(directory / "job.json") or {}
            return TrialJobView(JobState.RUNS, workers=int(status.get("workers", 0)), values=dict(values))
        result = job_directory.read_json(directory / "result.json")
        if process is None and result is None:
            if not (directory / "job.json").exists():
                return TrialJobView(JobState.ABSENT)
            return TrialJobView(JobState.ENDED, ExitCode.INTERRUPTED, "the search was killed", values=dict(values))
        if code is None:
            assert result is not None
            code = int(result["exit_code"])
        because = str(result["because"]) if result is not None else self._last_words(trial)
        stopped = trial in self._stopped
        return TrialJobView(JobState.ENDED, code, because.partition("\n")[0], stopped, values=dict(values))

    def stop(self, trial: int) -> None:
        """Ask for the end of the job: after a step, with a checkpoint."""
        process = self._running.get(trial)
        if process is not None and process.poll() is None and trial not in self._stopped:
            children.ask(process)
        self._stopped.add(trial)

    def close(self) -> None:
        """End all jobs, each after a step if it can."""
        for trial in self._running:
            self.stop(trial)
        for process in self._running.values():
            children.wait_or_kill(process, STOP_S)

    def _directory(self, trial: int) -> Path:
        return self._home / self.name(trial)

    def _last_words(self, trial: int) -> str:
        """What `elastic run` has said last: a paragraph, which it breaks into lines."""
        text = (self._home / f"{self.name(trial)}.log").read_text(errors="replace")
        return " ".join(text.rpartition("elastic: ")[2].split())
