"""Trials as jobs of a fleet, under names that a search finds again: all jobs of one name are one trial.

A trial has several jobs if it was preempted, or goes on after it lost its nodes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from elastic.checkpoints.series import newest_at
from elastic.config import JobSpec
from elastic.errors import ElasticError
from elastic.fleet.client import FleetClient
from elastic.fleet.registry import base_name
from elastic.platforms.search.decisions import JobState, TrialJobView, values_of
from elastic.records.job_files import LEDGER
from elastic.records.job_follower import parsed_steps

STOP_S = 90.0
"""A job that is stopped is over by then."""

POLL_S = 0.2

AWAY_S = 60.0
"""How long the last values of a job that is over are waited for, where a node does not answer: it may be busy, or its
agent may be started again just now. What another node has too is known without it."""

OVERVIEW_S = 0.3
"""All trials are looked at by one overview."""
BECAUSE = "its trial is over for `elastic search`"


class FleetJobs:
    """spec: of each trial, but for its name and command. study: makes the names of its jobs."""

    def __init__(self, client: FleetClient, spec: JobSpec, study: str, metric: str) -> None:
        self._client = client
        self._spec = spec
        self._study = study
        self._metric = metric
        self._ends: dict[tuple[str, str], int] = {}
        """(job, node) -> where its ledger was read last."""
        self._read_whole: set[str] = set()
        """The jobs that are over, and whose ledgers were read since."""
        self._nodes: dict[str, set[str]] = {}
        """Job -> the nodes on which it was seen."""
        self._patient_s: dict[str, float] = {}
        """Job that is over -> until when nodes that do not answer are asked again."""
        self._values: dict[int, dict[int, float]] = {}
        self._overview: dict[str, Any] = {}
        self._asks_s = 0.0
        """When the overview has to be asked for again."""
        self._begun: set[int] = set()
        self._seen: dict[int, TrialJobView] = {}

    def name(self, trial: int) -> str:
        return f"{self._study}-t{trial}"

    def begin(self, trial: int, words: Sequence[str]) -> None:
        """Submit the job, or let it go on from its newest checkpoint. Raises ElasticError."""
        before = self._jobs(trial)
        resume = ""
        if before:
            if before[-1]["state"] != "ended":
                return  # a request whose answer was lost has been followed
            found = newest_at(before[-1]["checkpoints"], before[-1]["identity"])
            resume = f"{before[-1]['job']}@{found}" if found is not None else ""
        spec = replace(self._spec, name=self.name(trial), command=("python", *words))
        self._client.submit(spec, resume)
        self._begun.add(trial)
        self._asks_s = 0.0

    def look(self, trial: int) -> TrialJobView:
        """The last view while nobody leads the fleet."""
        try:
            self._seen[trial] = self._look(trial)
        except ElasticError as error:
            seen = self._seen.get(trial, TrialJobView(JobState.WAITS))
            return replace(seen, because=str(error)) if seen.state is not JobState.ENDED else seen
        return self._seen[trial]

    def _look(self, trial: int) -> TrialJobView:
        if time.monotonic() > self._asks_s:
            self._overview, self._asks_s = self._client.overview(), time.monotonic() + OVERVIEW_S
        jobs = self._jobs(trial, self._overview)
        if not jobs:
            return TrialJobView(JobState.ABSENT)
        last = jobs[-1]
        over = last["state"] == "ended"
        up = [node["node"] for node in self._overview["nodes"] if node["up"]]
        for job in (job for job in jobs if job["job"] not in self._read_whole):
            name, ended = str(job["job"]), job["state"] == "ended"
            known = self._nodes.setdefault(name, set())
            known.update(job["slots"])
            silent = [node for node in sorted(known.union(up if ended else ())) if not self._read(trial, name, node)]
            now_s = time.monotonic()
            if ended and silent and now_s < self._patient_s.setdefault(name, now_s + AWAY_S):
                because = f"{name} is over, and {', '.join(silent)} does not say yet what it has logged"
                return TrialJobView(JobState.RUNS, because=because, values=dict(self._values.get(trial, {})))
            if ended:
                self._read_whole.add(name)
        values = dict(self._values.get(trial, {}))
        if over:
            because, stopped = str(last["because"]).partition("\n")[0], bool(last.get("stopped"))
            return TrialJobView(JobState.ENDED, int(last["exit_code"]), because, stopped, values=values)
        if last["state"] == "waits":
            return TrialJobView(JobState.WAITS, because=str(last["because"]), values=values)
        return TrialJobView(
            JobState.RUNS, workers=sum(last["slots"].values()), because=str(last["because"]), values=values
        )

    def _read(self, trial: int, job: str, node: str) -> bool:
        """Take in what a node's ledger has besides. Whether the node answers."""
        while True:
            piece = self._client.log(job, node, LEDGER, self._ends.get((job, node), 0))
            whole = piece.text[: piece.text.rfind(b"\n") + 1]
            if not whole:
                return not piece.away
            self._ends[job, node] = self._ends.get((job, node), 0) + len(whole)
            self._values.setdefault(trial, {}).update(values_of(parsed_steps(whole.splitlines()), self._metric))

    def stop(self, trial: int) -> None:
        jobs = self._jobs(trial)
        if jobs and jobs[-1]["state"] not in ("ended", "stopping"):
            self._client.stop(jobs[-1]["job"], BECAUSE)

    def close(self) -> None:
        """Stop the jobs that are not over, and wait until they are."""
        running = {trial for trial, seen in self._seen.items() if seen.state is not JobState.ENDED} | self._begun
        for trial in running:
            self.stop(trial)
        deadline_s = time.monotonic() + STOP_S
        while any(jobs and jobs[-1]["state"] != "ended" for jobs in map(self._jobs, running)):
            if time.monotonic() > deadline_s:
                raise ElasticError(f"not all trials are over after {STOP_S:g} s; `elastic jobs` shows them")
            time.sleep(POLL_S)  # remote processes: there is nothing to wait on

    def _jobs(self, trial: int, overview: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """The jobs of the trial, oldest first."""
        jobs = (overview or self._client.overview())["jobs"]
        return [job for job in jobs if base_name(job["job"]) == self.name(trial)]
