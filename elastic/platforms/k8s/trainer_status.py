"""Progress for Kubeflow Trainer, which shows it in the status of its TrainJob, where it has asked for it.

    POST $KUBEFLOW_TRAINER_STATUS_URL
    {"trainerStatus": {"progressPercentage", "estimatedRemainingSeconds", "metrics": [{"name", "value"}],
                       "lastUpdatedTime"}}

A server that is slow or away keeps nobody waiting: it is told by a thread of its own, and the newest state alone.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from elastic.records.journal import read_all
from elastic.records.ledger_tail import StepsTail

URL = "KUBEFLOW_TRAINER_STATUS_URL"
TOKEN = "KUBEFLOW_TRAINER_STATUS_TOKEN"
CA_CERT = "KUBEFLOW_TRAINER_STATUS_CA_CERT"
"""Environment variables; the last two are paths."""

EVERY_S = 10.0
TIMEOUT_S = 5.0
METRICS = 100
"""Most that are sent."""


def status(last: Mapping[str, Any], total: int | None, steps_per_s: float, now: datetime) -> dict[str, Any]:
    """The document. last: the newest line of the ledger. total: steps of the job; None: a stream decides. Pure."""
    told: dict[str, Any] = {"lastUpdatedTime": now.strftime("%Y-%m-%dT%H:%M:%SZ")}
    done = int(last["step"]) + 1
    if total:
        told["progressPercentage"] = min(100, 100 * done // total)
        if steps_per_s > 0:
            told["estimatedRemainingSeconds"] = max(0, round((total - done) / steps_per_s))
    told["metrics"] = [{"name": "step", "value": str(done)}]
    told["metrics"] += [
        {"name": name, "value": str(value)} for name, value in list(last.get("scalars", {}).items())[:METRICS]
    ]
    return {"trainerStatus": told}


class TrainerStatus:
    """Until `close`. speaks: whether this pod is the one that tells. From one thread."""

    def __init__(self, environment: Mapping[str, str], job_dir: Path, speaks: Callable[[], bool]) -> None:
        self._environment = environment
        self._job_dir = job_dir
        self._speaks = speaks
        self._steps = StepsTail(job_dir / "steps.jsonl")
        self._told = -1
        self._said = ""
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainer status", daemon=True)
        if URL in environment:
            self._thread.start()

    def close(self) -> None:
        """Tell the last step, if it is in time."""
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join(2 * TIMEOUT_S)

    def _run(self) -> None:
        while True:
            ends = self._ends.wait(EVERY_S)
            self._steps.poll(time.monotonic())
            step = self._steps.last.get("step")
            if step is not None and step != self._told and self._speaks():
                self._tell(step)
            if ends:
                return

    def _tell(self, step: int) -> None:
        plan = read_all(self._job_dir, ("steps_planned",))
        total = plan[-1]["total"] if plan else None
        document = status(self._steps.last, total, self._steps.steps_per_s, datetime.now(UTC))
        trouble = _post(self._environment, json.dumps(document).encode())
        if not trouble:
            self._told = step
        elif trouble != self._said:
            print(f"elastic: Kubeflow Trainer is not told of the progress: {trouble}", file=sys.stderr, flush=True)
        self._said = trouble


def _post(environment: Mapping[str, str], body: bytes) -> str:
    """What went wrong, or ""."""
    import ssl
    from http.client import HTTPException
    from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

    try:
        context = ssl.create_default_context(cafile=environment.get(CA_CERT) or None)
        # Python 3.13 asks for what certificates of many clusters do not have, such as identifiers of keys.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        token = Path(environment.get(TOKEN, "")).read_text().strip()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        request = Request(environment[URL], body, headers, method="POST")
        with build_opener(ProxyHandler({}), HTTPSHandler(context=context)).open(request, timeout=TIMEOUT_S) as answer:
            answer.read(1024)
    except (OSError, HTTPException, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
