"""A run of MLflow: one that is found by its tag, or made."""

from __future__ import annotations

import hashlib
import posixpath
import re
import time
from collections.abc import Iterator
from typing import Any

from elastic.observability.trackers.process import StepPoints, Superseded

STEP = "elastic/step"
"""A metric that each step has: its newest value says how far the run is."""
RUN = "elastic.run"
"""The tag by which the next leader finds the run."""
WRITER = "elastic.writer"
"""The tag that says which process sends the steps of the run."""
METRICS_MAX = 1000
"""How many metrics MLflow takes in one request."""
NAME_MAX = 250
"""Characters of the name of a metric, for MLflow. It refuses the whole request for a longer one."""
SETTLE_S = 2.0
"""Requests of a dead leader's process have ended after so many seconds."""


class MLflowTracker:
    """See Tracker. run: unique within the experiment. uri: None: as MLFLOW_TRACKING_URI says. token: of this writer."""

    def __init__(self, experiment: str, run: str, uri: str | None, token: str) -> None:
        self._experiment, self._run, self._uri, self._token = experiment, run, uri, token
        self._client: Any = None
        self._id = ""

    def connect(self) -> int:
        from mlflow import MlflowClient

        self._client = client = MlflowClient(tracking_uri=self._uri)
        found = client.get_experiment_by_name(self._experiment)
        experiment = client.create_experiment(self._experiment) if found is None else found.experiment_id
        runs = client.search_runs([experiment], filter_string=f"tags.`{RUN}` = '{self._run}'", max_results=1)
        if not runs:
            tags = {RUN: self._run, WRITER: self._token}
            self._id = client.create_run(experiment, run_name=self._run, tags=tags).info.run_id
            return 0
        self._id = runs[0].info.run_id
        if not self._leads():
            client.set_tag(self._id, WRITER, self._token)
            time.sleep(SETTLE_S)
        client.update_run(self._id, status="RUNNING")
        last = client.get_run(self._id).data.metrics.get(STEP)
        return 0 if last is None else int(last) + 1

    def _leads(self) -> bool:
        return bool(self._client.get_run(self._id).data.tags.get(WRITER) == self._token)

    def send(self, steps: list[StepPoints]) -> None:
        if not self._leads():
            raise Superseded
        # A batch that is tried again has steps that the run has: a metric with the same time counts once.
        for request in _requests(steps):
            self._client.log_batch(self._id, metrics=request)

    def finish(self, *, complete: bool) -> None:
        if complete and self._leads():
            self._client.set_terminated(self._id, "FINISHED")


def metric_name(name: str) -> str:
    """The name as MLflow allows it: letters, digits, and _-./: and spaces, spelled as a path that has no shorter
    spelling. One that is too long is cut, and ends in a digest of the whole, so that no two become one."""
    allowed = posixpath.normpath(re.sub(r"[^\w\-./: ]", "_", name)).lstrip("./") or "_"
    if len(allowed) <= NAME_MAX:
        return allowed
    digest = hashlib.sha256(name.encode(errors="backslashreplace")).hexdigest()[:16]
    return f"{allowed[: NAME_MAX - len(digest) - 1]}-{digest}"


def _requests(steps: list[StepPoints]) -> Iterator[list[Any]]:
    """Metrics for one request each, whole steps where they fit. What says how far the run is comes last in a step."""
    from mlflow.entities import Metric

    request: list[Any] = []
    for step in steps:
        points = {metric_name(name): value for name, value in step.points.items()} | {STEP: float(step.number)}
        metrics = [Metric(name, value, int(step.time_s * 1000), step.number) for name, value in points.items()]
        if request and len(request) + len(metrics) > METRICS_MAX:
            yield request
            request = []
        request += metrics
        while len(request) > METRICS_MAX:
            yield request[:METRICS_MAX]
            request = request[METRICS_MAX:]
    if request:
        yield request
