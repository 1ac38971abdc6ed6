"""Follows the files of this machine's jobs, on a thread of its own: what was written before the process began is not
read."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from elastic.metrics.job_fold import JobFold
from elastic.metrics.metric_registry import MetricRegistry
from elastic.records.job_directory import is_live
from elastic.records.job_follower import JobFiles

LOOK_S = 1.0
"""From the end of one look to the next."""

OLD_S = 30.0
"""After so long without a look the values are old, and /healthz says so."""

CLOSED_S = 300.0
"""For so long the metrics of a job that is over are shown."""


class JobsIn:
    """All jobs of a directory: of a replica, or of a node. They come and go."""

    def __init__(self, parent: Path, registry: MetricRegistry, *, leader_only: bool) -> None:
        self._parent = parent
        self._registry = registry
        self._leader_only = leader_only
        self._jobs: dict[str, JobFiles] = {}
        self._over = {path.parent.name for path in parent.glob("*/result.json")}
        self._closed_ns: dict[str, int] = {}
        self._earlier = self._present()
        """Jobs that were there when this process began."""
        self._find()  # what raises is told by the first look

    def look(self, now_ns: int, now_wall: float) -> None:
        """Look at each job, whatever another one raises. Raises the first error of them."""
        errors = self._find()
        for job, files in list(self._jobs.items()):
            try:
                files.look(now_ns, now_wall)
            except Exception as error:
                errors.append(error)
            if (self._parent / job / "result.json").exists():
                since_ns = self._closed_ns.setdefault(job, now_ns)
                if now_ns - since_ns > CLOSED_S * 1e9:
                    self._over.add(job)
                    self._forget(job)
        if errors:
            raise errors[0]

    def _present(self) -> set[str]:
        return {path.parent.name for path in self._parent.glob("*/job.json")}

    def _find(self) -> list[Exception]:
        """Take jobs that have come, and forget those that are gone. Returns what was raised."""
        present = self._present()
        self._earlier &= present
        errors = []
        for job in present - self._jobs.keys() - self._over:
            try:
                self._follow(job, from_end=job in self._earlier)
            except Exception as error:  # the next look tries it again
                errors.append(error)
        for job in self._jobs.keys() - present:
            self._forget(job)
        self._over &= present
        return errors

    def _follow(self, job: str, *, from_end: bool) -> None:
        fold = JobFold(self._registry, job, leader_only=self._leader_only)
        files = JobFiles(self._parent / job, fold, from_end=from_end)
        if self._leader_only or not from_end or is_live(self._parent / job):
            fold.begin()
        self._jobs[job] = files

    def _forget(self, job: str) -> None:
        self._jobs.pop(job)
        self._closed_ns.pop(job, None)
        self._registry.forget(job)


class Follower:
    """Looks at everything it was given, again and again, on a thread, until `close`. What raises is counted, and tried
    again at the next look."""

    def __init__(self, registry: MetricRegistry, *looks: Callable[[int, float], object]) -> None:
        self._registry = registry
        self._looks = looks
        self._stop = threading.Event()
        self._looked_s = time.monotonic()
        self._because = ""
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(3 * LOOK_S)

    @property
    def problem(self) -> str:
        """Why the values may be old, or ""."""
        if self._because:
            return self._because
        old_s = time.monotonic() - self._looked_s
        return f"the last look at the job's files was {old_s:.0f} s ago" if old_s > OLD_S else ""

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S):
            self._because = "; ".join(filter(None, map(self._tried, self._looks)))
            self._looked_s = time.monotonic()

    def _tried(self, look: Callable[[int, float], object]) -> str:
        try:
            look(time.monotonic_ns(), time.time())
        except Exception as error:  # whatever it is: nothing else may end with it
            self._registry.add("elastic_metrics_failures_total", 1)
            return f"{type(error).__name__}: {error}"
        return ""
