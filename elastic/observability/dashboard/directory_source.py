"""A job of this machine, by its directory."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from elastic.errors import ConfigError, ElasticError
from elastic.fleet import remote_logs
from elastic.observability.dashboard.job_history import EVENTS, JobHistory
from elastic.observability.dashboard.sources import Action, act_on_worker
from elastic.records import flight_recorder, journal, last_notes
from elastic.records.events import problems
from elastic.records.job_directory import check_job, is_live, is_removed, job_id, read_json, removal
from elastic.records.job_follower import JobFiles
from elastic.records.journal import Line
from elastic.rendezvous.job_status import job_status
from elastic.rendezvous.operator_client import signal_worker

STATUS_S = 1.0
"""Seconds for an answer of the leader; there is another look."""

ACTION_S = 5.0


class DirectorySource:
    """run: the pid of the `elastic run` that has started the dashboard and is told to stop; None: nobody can be told.

    Raises ConfigError if the directory holds no job.
    """

    def __init__(self, job_dir: Path, run: int | None) -> None:
        check_job(job_dir)
        self._dir = job_dir
        self._run = run
        self._files: JobFiles | None = None
        self._job = ""
        self._alive = True
        """False: no process of the job answered, and none holds its locks."""

    @property
    def actions(self) -> Sequence[Action]:
        return (Action.STACKS, Action.KILL, *([Action.STOP] if self._run is not None else []))

    def poll(self, history: JobHistory) -> bool:
        if is_removed(self._dir):
            raise ElasticError(removal(self._dir))
        job = job_id(self._dir) if (self._dir / "id").exists() else ""
        if job != self._job and self._job:  # `elastic run --fresh`
            history.anew()
            self._files = None
        self._job = job
        if self._files is None:
            self._read_earlier_runs(history)
            self._files = JobFiles(self._dir, history, from_end=False)
        found = self._files.look(time.monotonic_ns(), time.time())
        result = self._dir / "result.json"
        try:
            history.ended(result.stat().st_mtime)
        except FileNotFoundError:
            history.ended(None if self._alive else 0.0)
        return found

    def status(self) -> Mapping[str, Any]:
        try:
            status = job_status(self._dir, STATUS_S)
            self._alive = True
        except ElasticError as error:
            self._alive = is_live(self._dir)
            return {"state": "unknown", "because": str(error), "generation": 0, "members": []}
        if status["state"] != "closed":
            status["troubles"] = [asdict(trouble) for trouble in problems.of_settings(self._dir)]
        return status

    def logs(self) -> remote_logs.LogSource:
        return remote_logs.DirectoryLogs(self._dir)

    def lines(self) -> tuple[list[Line], dict[str, str]]:
        return [line for run in (*self._earlier_runs(), self._dir) for line in journal.read_all(run)], {}

    def flight(self) -> str:
        flights = flight_recorder.read_all(self._dir)
        now_ns = time.time_ns() if is_live(self._dir) else None
        ranks = last_notes.ranks(journal.read_all(self._dir, ("entered",)))
        return last_notes.text(last_notes.last_notes(flights, now_ns, ranks))

    def act(self, action: Action, worker: str = "", workers: int = 0) -> str:
        match action:
            case Action.STACKS | Action.KILL:
                return act_on_worker(action, worker, self.logs(), lambda kill: self._signal(worker, kill=kill))
            case Action.STOP if self._run is not None:
                os.kill(self._run, signal.SIGTERM)
                return "the job stops after a step, with a checkpoint of it; the same command goes on from there"
        raise ConfigError(f"{action} is not possible for a job of this machine")

    def _signal(self, worker: str, *, kill: bool) -> None:
        if (where := read_json(self._dir / "rendezvous.json")) is None:
            raise ElasticError("nobody leads the job now")
        signal_worker(where["address"], worker, kill=kill, timeout_s=ACTION_S)

    def _earlier_runs(self) -> list[Path]:
        runs = [path for path in (self._dir / "runs").glob("*") if path.name.isdecimal()]
        return sorted(runs, key=lambda path: int(path.name))

    def _read_earlier_runs(self, history: JobHistory) -> None:
        """The journals of earlier runs are not in the directory's own any more. Which steps were done again, the
        follower of the directory tells from resumes.jsonl."""
        for run in self._earlier_runs():
            for line in journal.read_all(run, EVENTS):
                history.see(line)
            history.resumed(None)
