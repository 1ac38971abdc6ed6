"""`python -m tests.soak.busy`: every processor has twice as much to do as it can, for ten minutes, while a job trains.

Its workers compile their model, evaluate for long, wait for `job.once` and write checkpoints meanwhile. Nobody may be
taken for dead: all must be there at the end, in the processes in which they began. Exit code 1, and the reason, if not.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_tests.cluster.hosts import PREFIX
from chaos_tests.cluster.job_handle import Followed, JobFailed
from chaos_tests.cluster.local_job import elastic_run
from chaos_tests.support import processes
from elastic.errors import ElasticError
from tests.soak.driven_job import DrivenJob

SCRIPT = Path(__file__).resolve().parent / "scripts" / "laden.py"
WORKERS = 3
SECONDS = 600.0
LOAD = 2
"""Processes a processor that compute for nothing."""

BEGIN_S = 600.0
"""Until the first step: three workers compile at the same time, at a third of their speed."""
MORE_S = 600.0
"""For what such a machine has not managed once in the time."""
END_S = 600.0
"""For the evaluation that has just begun."""
IDLE_MAX = 0.05
"""The largest share of all processor time that may be idle; with more, the machine is not saturated."""

DUTIES = ("evaluated", "prepared", "saved")
EXPELLED = ("member_lost", "expelled", "worker_lost", "worker_exited", "newcomer_hung")


@dataclass(slots=True)
class SeenWorkers:
    """What the job's journals and its output tell. pids: of members. lost: why somebody was, in words."""

    pids: dict[str, int] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    checkpoints: int = 0
    ending: bool = False
    """From here on processes end as they should."""

    def feed(self, line: dict[str, Any]) -> None:
        match line["event"]:
            case "worker_started":
                self.pids[line["worker_id"]] = line["pid"]
            case "checkpoint_complete":
                self.checkpoints += 1
            case event if event in EXPELLED and not self.ending:
                self.lost.append(f"{event} {line['worker_id']}: {line.get('because', '')}")


@dataclass(frozen=True, slots=True)
class BusyOutcome:
    """done: how often each of DUTIES, in the saturated time. idle: the part of all processor time that nobody used."""

    seconds: float
    idle: float
    steps: int
    checkpoints: int
    workers: int
    done: Counter[str]
    lost: tuple[str, ...]

    def faults(self) -> list[str]:
        found = [*self.lost]
        if self.workers != WORKERS:
            found.append(f"{self.workers} processes of workers were started for {WORKERS} places")
        found += [f"the script has {duty} nothing: give it more time" for duty in DUTIES if not self.done[duty]]
        if not self.checkpoints:
            found.append("no checkpoint is complete")
        if self.idle > IDLE_MAX:
            found.append(f"processors were idle for {self.idle:.0%} of the time: that is no saturation")
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Saturate the machine while a job trains; nobody may be expelled.")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long (default %(default)g)")
    parser.add_argument(
        "--busy-s", type=float, default=45.0, help="of an evaluation, and of a once (default %(default)g)"
    )
    options = parser.parse_args()
    processes.exit_on_signals()
    home = Path(tempfile.mkdtemp(prefix="busy-"))
    try:
        outcome = saturate(home, options.seconds, options.busy_s)
        faults = outcome.faults()
    except (ElasticError, OSError) as error:
        faults = [str(error)]
    if faults:
        print(f"journals and logs: {home}", file=sys.stderr)
        print(f"busy: FAILED {'; '.join(faults)}")
        return 1
    shutil.rmtree(home)
    done = " ".join(f"{duty}={outcome.done[duty]}" for duty in DUTIES)
    print(
        f"busy: OK seconds={outcome.seconds:.0f} idle={outcome.idle:.1%} steps={outcome.steps} {done} "
        f"checkpoints={outcome.checkpoints} expelled=0"
    )
    return 0


def saturate(home: Path, seconds: float, busy_s: float) -> BusyOutcome:
    """In an empty directory. Raises JobFailed if the job ends early, or does not begin or end in time."""
    until, seen = home / "enough", SeenWorkers()
    options = ["--workers", str(WORKERS), "--name", "busy", "--checkpoint-every", "10 s"]
    command = [str(SCRIPT), "--until", str(until), "--busy-s", str(busy_s)]
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(home / "torch-cache")}  # nothing is compiled already

    def follow(job: Followed) -> None:
        for line in job.new_events():
            seen.feed(line)

    with DrivenJob(home / "job", elastic_run(home / "job", options, command), follow, environment) as job:
        before, begun_s = _processors(), time.monotonic()
        with _hogs():
            job.until("the first step", job.steps, BEGIN_S)
            end_s = time.monotonic() + seconds
            job.until("the time is over", lambda: time.monotonic() >= end_s, seconds + END_S)
            job.until("everything is done once", lambda: set(DUTIES) <= set(job.output().split()), MORE_S)
        after, seconds, done = _processors(), time.monotonic() - begun_s, Counter(job.output().split())
        follow(job)
        seen.ending = True
        until.touch()
        job.wait(END_S)
        numbers = [line["step"] for line in job.steps()]
        if numbers != list(range(len(numbers))):
            raise JobFailed(f"the ledger does not hold each step once: {len(numbers)} lines, {len(set(numbers))} steps")
    all_s, idle_s = (now - then for now, then in zip(after, before, strict=True))
    return BusyOutcome(seconds, idle_s / all_s, len(numbers), seen.checkpoints, len(seen.pids), done, tuple(seen.lost))


@contextmanager
def _hogs() -> Iterator[None]:
    """Processes that compute and compute."""
    command = [*PREFIX, sys.executable, "-c", "while True: pass"]
    hogs = [subprocess.Popen(command) for _ in range(LOAD * len(os.sched_getaffinity(0)))]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
        for hog in hogs:
            hog.wait()


def _processors() -> tuple[float, float]:
    """All time of all processors since they began, and what of it nobody used, in ticks."""
    times = [float(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return sum(times), times[3] + times[4]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
