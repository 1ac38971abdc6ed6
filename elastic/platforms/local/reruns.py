"""All runs of one `elastic run`: a job that loses every copy of its state goes on from the newest snapshot or
checkpoint, again and again, as long as each run has completed a newer one.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from elastic.config import JobSpec
from elastic.errors import ConfigError, ExitCode
from elastic.platforms.local import job_run
from elastic.platforms.local.interrupts import Interrupted, Signals
from elastic.platforms.local.job_run import RunOutcome
from elastic.platforms.local.live import expendable, has_room, summary_text
from elastic.records import resume
from elastic.records.journal import Line, merge, read_all, recoveries
from elastic.records.ledger_tail import StepsTail
from elastic.records.resume import Resumption


def to_the_end(
    spec: JobSpec,
    job_dir: Path,
    *,
    again: bool,
    memory: Path | None,
    notices: str,
    grace_s: float | None,
    quiet: bool,
    as_json: bool,
) -> int:
    """Run the job of a claimed directory to its end, and say in one summary how it went. Returns the exit code of the
    command.

    again, memory: as resume.begin. notices, grace_s: as run.attempt. Raises ConfigError if it cannot even begin.
    """
    begun_s, told = time.monotonic(), _Told()
    if not quiet:
        with expendable():
            print(f"elastic: {spec.level}", file=sys.stderr, flush=True)
    with Signals() as signals:  # to the last word: one that comes later changes nothing of what is told
        while True:
            outcome = _begun(spec, job_dir, told, signals, again=again, memory=memory)
            if outcome is None:
                outcome = job_run.attempt(
                    spec, job_dir, signals, notices=notices, grace_s=grace_s, quiet=quiet, as_json=as_json
                )
                told.take_in(job_dir)
            if outcome.exit_code != ExitCode.STATE_LOST or not resume.has_advanced(job_dir):
                break
            with expendable():
                _say_failure(outcome)
            again = True
        summary = _summary(spec, job_dir, outcome, told, time.monotonic() - begun_s)
        with expendable():
            if has_room(sys.stderr, lambda: signals.asked):
                _say_failure(outcome)
            if as_json and has_room(sys.stdout, lambda: signals.asked):
                print(json.dumps({"event": "summary", **summary}), flush=True)
            elif not as_json and not quiet and has_room(sys.stderr, lambda: signals.asked):
                print(summary_text(summary), file=sys.stderr, flush=True)
    return outcome.exit_code


class _Told:
    """What all runs so far have left for the summary; the next one puts their journals aside."""

    def __init__(self) -> None:
        self.runs = 0
        self.generation = 0
        self.recoveries: list[Line] = []
        self.resumes: list[Resumption] = []

    def take_in(self, job_dir: Path) -> None:
        """The journals of the run that has just ended."""
        try:
            merge(job_dir)
        except OSError as error:
            print(f"elastic: cannot write journal.jsonl: {error.strerror}; journal/ has its parts", file=sys.stderr)
        lines = read_all(job_dir)
        self.runs += 1
        self.generation = max((line["generation"] for line in lines if line["event"] == "published"), default=0)
        self.recoveries += recoveries(lines)


def _begun(
    spec: JobSpec, job_dir: Path, told: _Told, signals: Signals, *, again: bool, memory: Path | None
) -> RunOutcome | None:
    """Prepare the directory for a run; how the command ends if there is to be none. A signal ends it also in here,
    between two runs, in order: it leaves what a kill could leave, which the next command knows how to go on from."""
    try:
        with signals.raising():
            resumption = resume.begin(spec, job_dir, again=again, memory=memory)
    except Interrupted:
        return job_run.interrupted(signals)
    except ConfigError as error:
        if not told.runs:
            raise
        return RunOutcome(ExitCode.BAD_INPUT, str(error))
    if resumption is not None:
        told.resumes.append(resumption)
        with expendable():
            for sentence in resumption.sentences():
                print(f"elastic: {sentence}", file=sys.stderr, flush=True)
    return None


def _summary(spec: JobSpec, job_dir: Path, outcome: RunOutcome, told: _Told, seconds: float) -> dict[str, Any]:
    tail = StepsTail(job_dir / "steps.jsonl")
    tail.poll(0.0)
    return {
        "job": spec.name,
        "restart": spec.restart,
        "exit_code": int(outcome.exit_code),
        "because": outcome.because,
        "digest": outcome.digest,
        "steps": tail.steps,
        "samples": tail.samples,
        "seconds": round(seconds, 3),
        "generation": told.generation,
        "recoveries": told.recoveries,
        "resumes": [asdict(resumption) for resumption in told.resumes],
        "job_dir": str(job_dir),
    }


def _say_failure(outcome: RunOutcome) -> None:
    """The traceback first, unless it was told when it happened; then one paragraph."""
    if outcome.exit_code == ExitCode.DONE:
        return
    sentence, _, traceback = outcome.because.partition("\n")
    if traceback and not outcome.told:
        print(traceback.rstrip(), file=sys.stderr)
    print(f"elastic: {sentence}", file=sys.stderr, flush=True)
