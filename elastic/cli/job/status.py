"""`elastic status`: what one job is doing, asked of its leader, or told from its directory when the job is over."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from elastic.cli.options import EXIT_CODES, add_answer, add_either, answer, client_of, job_dir_of
from elastic.errors import ConfigError
from elastic.protocol import local_phase, outer_round
from elastic.records.ledger_tail import last_step
from elastic.rendezvous.job_status import job_status

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
    from elastic.records.events import problems

    job_dir = job_dir_of(options)
    if job_dir is None:
        document = client_of(options).status(options.job or "")
    elif options.job is not None:
        raise ConfigError(f"{options.job}: a directory holds one job; give JOB with --rendezvous only")
    else:
        document = job_status(job_dir)
        line = last_step(job_dir / "steps.jsonl")
        if document.get("restart") and line:  # the leader does not hear of steps of scripts in rounds
            document["applied"] = int(line["step"]) + 1
        if told := outer_round.told_of(line):
            document["outer"] = told
        if told := local_phase.told_of(line):
            document["phase"] = told
        if document["state"] != "closed":
            document["troubles"] = [asdict(trouble) for trouble in problems.of_job(job_dir)]
    return answer(options, document, status_text(document))


def status_text(document: dict[str, Any]) -> str:
    rounds = document.get("restart", False)
    lines = [
        f"{document['job']}: {document['state']}, {'round' if rounds else 'generation'} {document['generation']}"
        + (f", {document['applied']} steps" if "applied" in document and (document["applied"] or not rounds) else ""),
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
    if outer := document.get("outer"):
        lines.append(_outer_text(outer))
    if phase := document.get("phase"):
        lines.append(_phase_text(phase))
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


def _outer_text(outer: dict[str, float]) -> str:
    """One line that says what elastic/protocol/outer_round.py has found out about the last outer step."""
    text = f"last outer step: drift {outer['drift']:.3g}, {outer['summed_bytes'] / 1e6:.3g} MB summed"
    if "replicas" not in outer:
        return text
    counts = ", ".join(f"{outer[name]:.0f} {name}" for name in ("replicas", "late", "lost"))
    return f"{text}; {counts}; {outer['inner_steps']:.0f} inner steps"


def _phase_text(phase: dict[str, float]) -> str:
    """A line about the last phase of training without waiting. phase: as local_phase.told_of returns it."""
    parts = [f"{phase.get('updates', 0.0):.4g} updates"]
    if "staleness" in phase:
        parts.append(f"staleness {phase['staleness']:.3g} (at most {phase['staleness_max']:.0f})")
    if "consensus" in phase:
        parts.append(f"consensus {phase['consensus']:.3g}")
    words = {"scaled": "scaled", "dropped": "dropped", "lost_updates": "lost", "skipped": "without a partner"}
    parts += [f"{phase[name]:.4g} {word}" for name, word in words.items() if phase.get(name)]
    if phase.get("pieces_fell_back"):
        parts.append(f"{phase['pieces_fell_back']:.0f} pieces fell back")
    return f"last phase: {', '.join(parts)}"


def _speed_text(member: dict[str, Any]) -> str:
    shard_ms, shards = member.get("shard_ms"), member.get("shards", 0)
    return "" if shard_ms is None else f"  {shards} shard{'s' * (shards != 1)} of {_three_digits(shard_ms)} ms"


def _three_digits(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 1000 else f"{ms:.3g}"
