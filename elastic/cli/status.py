"""`elastic status`: what one job is doing, asked of its leader, or told from its directory when the job is over."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from elastic.cli.options import EXIT_CODES, add_answer, add_either, answer, client_of, job_dir_of
from elastic.errors import ConfigError, ElasticError
from elastic.records import job_directory
from elastic.records.ledger_tail import StepsTail

EXAMPLES = """\
examples:
  elastic status                                 of the newest job in ./elastic-jobs
  elastic status --job-dir elastic-jobs/train-1
  elastic status --job-dir elastic-jobs/train-1 --json | jq .generation
  elastic status train-1 --rendezvous 127.0.0.1:7070
"""


def add(verbs: Any) -> None:
    status = verbs.add_parser(
        "status",
        help="what a job is doing",
        description="Show the state of a job: its members, how far it is, and why it is in this state.",
        epilog=EXAMPLES + EXIT_CODES,
    )
    status.add_argument("job", metavar="JOB", nargs="?", help="job of a fleet (default: the only one that is not over)")
    add_either(status)
    add_answer(status, _status)


def _status(options: argparse.Namespace) -> int:
    from elastic.records import problems

    job_dir = job_dir_of(options)
    if job_dir is None:
        document = client_of(options).status(options.job or "")
    elif options.job is not None:
        raise ConfigError(f"{options.job}: a directory holds one job; give JOB with --rendezvous only")
    else:
        document = job_status(job_dir)
        if document["state"] != "closed":
            document["troubles"] = [asdict(trouble) for trouble in problems.of_job(job_dir)]
    return answer(options, document, status_text(document))


def status_text(document: dict[str, Any]) -> str:
    rounds = document.get("restart", False)
    lines = [
        f"{document['job']}: {document['state']}, {'round' if rounds else 'generation'} {document['generation']}"
        + (f", {document['applied']} steps" if "applied" in document and not rounds else ""),
        f"because {document['because']}",
    ]
    if document.get("level"):
        lines.append(document["level"])
    if document.get("exit_code") is not None:
        digest = f", digest {document['digest']}" if document.get("digest") else ""
        lines.append(f"exit {document['exit_code']}{digest}")
    if (ring := document.get("ring", {})).get("over"):
        instead = f", not {ring['asked']}: {ring['because']}" if ring["because"] else ""
        lines.append(f"gradients over {ring['over']}{instead}")
    if document.get("checkpoint"):
        lines.append(f"newest checkpoint {document['checkpoint']}")
    lines += [
        f"  rank {member['rank']}  {member['worker_id']}  on {member['node']}  pid {member['pid']}"
        + (f"  {member['phase']}" if rounds else f"  {member['applied']} steps{_speed_text(member)}")
        for member in document["members"]
    ]
    lines += [f"  straggler {worker_id}: {because}" for worker_id, because in document.get("stragglers", {}).items()]
    lines += [f"  {worker_id}: {how}" for worker_id, how in document.get("held_up_by", {}).items()]
    lines += [f"  spare   {worker_id}" for worker_id in document.get("spares", ())]
    troubles = document.get("troubles", ())
    lines += [f"trouble: {trouble['because']}; {trouble['advice']}" for trouble in troubles]
    untold = sorted({*document.get("in_vain", ())} - {trouble.get("where") for trouble in troubles})
    lines += [
        f"trouble: training has waited for slot {slot} to copy the state, and goes on without it" for slot in untold
    ]
    lines += [
        f"trouble: slot {slot} gets no worker any more: {because}"
        for slot, because in document.get("given_up", {}).items()
    ]
    return "\n".join(lines)


def _speed_text(member: dict[str, Any]) -> str:
    shard_ms, shards = member.get("shard_ms"), member.get("shards", 0)
    return "" if shard_ms is None else f"  {shards} shard{'s' * (shards != 1)} of {_three_digits(shard_ms)} ms"


def _three_digits(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 1000 else f"{ms:.3g}"


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
        if (result := job_directory.read_json(job_dir / "result.json")) is not None:
            return _closed(job_dir, result)
        try:
            where = job_directory.read_json(job_dir / "rendezvous.json")
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
