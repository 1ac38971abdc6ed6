"""Follows the files of this machine's jobs, on a thread of its own: what was written before the process began is not
read, and of what comes later a bounded piece at each look.

Lines of several processes are taken in the order of their times: a line that is as young as the look waits for the
next look.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from elastic.metrics.job_fold import EVENTS, JobFold
from elastic.metrics.metric_registry import MetricRegistry
from elastic.records.job_directory import is_live
from elastic.records.journal import Line, parse

LOOK_S = 1.0
"""From the end of one look to the next."""

READ_BYTES = 1 << 22
"""Most bytes of one file in one look."""

SETTLE_NS = 50_000_000
"""Between the time in a line and the moment when it is in its file."""

OLD_S = 30.0
"""After so long without a look the values are old, and /healthz says so."""

CLOSED_S = 300.0
"""For so long the metrics of a job that is over are shown."""

_WANTED = re.compile(f'"event":"({"|".join(EVENTS)})"'.encode())


class Growing:
    """The new whole lines of a file to which others append. Another file of that name is read from its beginning."""

    def __init__(self, path: Path, *, from_end: bool) -> None:
        self._path = path
        self._offset, self._inode = 0, 0
        if from_end:
            with contextlib.suppress(FileNotFoundError):
                facts = path.stat()
                self._offset, self._inode = facts.st_size, facts.st_ino

    def lines(self) -> list[bytes]:
        try:
            facts = self._path.stat()
            if (facts.st_ino, facts.st_size) == (self._inode, self._offset):
                return []
            with self._path.open("rb") as file:
                if facts.st_ino != self._inode or facts.st_size < self._offset:
                    self._offset, self._inode = 0, facts.st_ino
                file.seek(self._offset)
                data = file.read(READ_BYTES)
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        # A line that does not fit into one look is of no process of ours, and must not end the reading.
        self._offset += len(whole) if whole or len(data) < READ_BYTES else len(data)
        return whole.splitlines()


class JobFiles:
    """The files of one job directory. from_end: they are older than this process."""

    def __init__(self, job_dir: Path, fold: JobFold, *, from_end: bool) -> None:
        self._dir = job_dir
        self._fold = fold
        self._ledger = Growing(job_dir / "steps.jsonl", from_end=from_end)
        self._journals: dict[Path, Growing] = {}
        self._waiting: list[Line] = []
        self._resumes = len(self._resumed()) if from_end else 0
        if from_end:
            self._find(from_end=True)

    def look(self, now_ns: int, now_wall: float) -> None:
        """Take in what is new. now_ns: monotonic."""
        resumes = self._resumed()
        for resume in resumes[self._resumes :]:
            self._fold.resumed(resume["redone"])
        self._resumes = len(resumes)
        self._find(from_end=False)
        texts = (text for tail in self._journals.values() for text in tail.lines() if _WANTED.search(text))
        self._waiting += filter(None, map(parse, texts))
        self._waiting.sort(key=lambda line: int(line["t_mono_ns"]))
        settled = [line for line in self._waiting if line["t_mono_ns"] <= now_ns - SETTLE_NS]
        del self._waiting[: len(settled)]
        for line in settled:
            self._fold.see(line)
        self._fold.applied(list(_parsed(self._ledger.lines())), now_ns / 1e9)
        self._fold.tick(now_ns / 1e9, now_wall)

    def _find(self, *, from_end: bool) -> None:
        present = set((self._dir / "journal").glob("*.jsonl"))
        for path in present - self._journals.keys():
            self._journals[path] = Growing(path, from_end=from_end)
        for path in self._journals.keys() - present:
            del self._journals[path]

    def _resumed(self) -> list[dict[str, Any]]:
        try:
            return [json.loads(text) for text in (self._dir / "resumes.jsonl").read_bytes().splitlines()]
        except FileNotFoundError:
            return []


def _parsed(texts: list[bytes]) -> Iterator[dict[str, Any]]:
    for text in texts:
        with contextlib.suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict) and type(line.get("step")) is int and isinstance(line.get("samples"), list):
                yield line


class JobsIn:
    """All jobs of a directory: of a replica, or of a node. They come and go."""

    def __init__(self, parent: Path, registry: MetricRegistry, *, leader_only: bool) -> None:
        self._parent = parent
        self._registry = registry
        self._leader_only = leader_only
        self._jobs: dict[str, JobFiles] = {}
        self._over = {path.parent.name for path in parent.glob("*/result.json")}
        self._closed_ns: dict[str, int] = {}
        self._find(from_end=True)

    def look(self, now_ns: int, now_wall: float) -> None:
        self._find(from_end=False)
        for job, files in list(self._jobs.items()):
            files.look(now_ns, now_wall)
            if (self._parent / job / "result.json").exists():
                since_ns = self._closed_ns.setdefault(job, now_ns)
                if now_ns - since_ns > CLOSED_S * 1e9:
                    self._over.add(job)
                    self._forget(job)

    def _find(self, *, from_end: bool) -> None:
        present = {path.parent.name for path in self._parent.glob("*/job.json")}
        for job in present - self._jobs.keys() - self._over:
            fold = JobFold(self._registry, job, leader_only=self._leader_only)
            self._jobs[job] = JobFiles(self._parent / job, fold, from_end=from_end)
            if self._leader_only or not from_end or is_live(self._parent / job):
                fold.begin()
        for job in self._jobs.keys() - present:
            self._forget(job)
        self._over &= present

    def _forget(self, job: str) -> None:
        self._jobs.pop(job)
        self._closed_ns.pop(job, None)
        self._registry.forget(job)


class Follower:
    """Looks at everything it was given, again and again, on a thread, until `close`. What raises is counted, and tried
    again at the next look."""

    def __init__(self, registry: MetricRegistry, *looks: Callable[[int, float], None]) -> None:
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

    def _tried(self, look: Callable[[int, float], None]) -> str:
        try:
            look(time.monotonic_ns(), time.time())
        except Exception as error:  # whatever it is: nothing else may end with it
            self._registry.add("elastic_metrics_failures_total", 1)
            return f"{type(error).__name__}: {error}"
        return ""
