"""The state of one job on this machine: asked of its leader, or told from its directory when the job is over."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from elastic.errors import ConfigError, ElasticError
from elastic.records import job_directory
from elastic.records.ledger_tail import StepsTail

STATUS_WAIT_S = 5.0
"""How long `status` waits for a leader: an election takes two seconds."""


def job_status(job_dir: Path, wait_s: float = STATUS_WAIT_S) -> dict[str, Any]:
    """The job's state as `elastic status --json` prints it.

    Of an ended job: state "closed", no members. Raises ConfigError if there never was a job, ElasticError if nobody
    answers for it within wait_s.
    """
    from elastic.rendezvous.operator_client import fetch_status

    job_directory.check_job(job_dir)
    deadline_s, where = time.monotonic() + wait_s, None
    while True:
        result = job_directory.read_json(job_dir / "result.json", "exit_code", "because", "digest", "generation")
        if result is not None:
            return _closed(job_dir, result)
        try:
            where = job_directory.read_json(job_dir / "rendezvous.json", "address")
            if where is None:
                raise ElasticError("the job is being started; nobody leads it yet")
            return fetch_status(where["address"], wait_s)
        except ElasticError as error:
            if time.monotonic() >= deadline_s:
                if where is None and not job_directory.is_of_run(job_dir):
                    raise ConfigError(
                        f"{job_dir} is of a job of several machines; ask for it with --rendezvous HOST:PORT,..."
                    ) from error
                if not job_directory.is_live(job_dir):
                    raise ElasticError(
                        f"the job in {job_dir} was interrupted; none of its processes is alive, and the same command "
                        "again goes on with it"
                    ) from error
                raise
            time.sleep(0.1)  # a file and a remote process: there is nothing to wait on


def _closed(job_dir: Path, result: dict[str, Any]) -> dict[str, Any]:
    tail = StepsTail(job_dir / "steps.jsonl")
    tail.poll(0.0)
    spec = job_directory.read_json(job_dir / "job.json") or {}
    return {
        "job": spec.get("name", ""),
        "state": "closed",
        "restart": spec.get("restart", False),
        "generation": result["generation"],
        "because": result["because"],
        "applied": tail.steps,
        "members": [],
        "exit_code": result["exit_code"],
        "digest": result["digest"],
    }
