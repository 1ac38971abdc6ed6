"""`elastic jobs` and `elastic stop`: all jobs of a fleet, and the end of one."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from elastic.cli.options import EXIT_CODES, add_answer, add_replicas, answer, client_of, waiting
from elastic.errors import ConfigError, ElasticError
from elastic.protocol.worker_id import node_of

if TYPE_CHECKING:
    from elastic.fleet.client import FleetClient

END_POLL_S = 0.2


STOP_WAIT_S = 90.0
"""A job that is stopped is over by then: it is ended if it has not left in order."""

JOBS_EXAMPLES = """\
examples:
  elastic jobs --rendezvous 127.0.0.1:7070
  elastic jobs --rendezvous 127.0.0.1:7070 --json | jq '.jobs[] | select(.state == "waits")'
  elastic jobs --rendezvous 127.0.0.1:7070 --wait train-1              ends with the job's exit code
"""

STOP_EXAMPLES = """\
examples:
  elastic stop train-1 --rendezvous 127.0.0.1:7070

A job that trains stops after a step, with a checkpoint of it; `elastic submit --resume` goes on from there.
"""


def add(verbs: Any) -> None:
    jobs = verbs.add_parser(
        "jobs",
        help="the jobs and nodes of a fleet",
        description="Show all jobs of a fleet, what those that wait are waiting for, and its nodes.",
        epilog=JOBS_EXAMPLES + EXIT_CODES,
    )
    add_replicas(jobs)
    jobs.add_argument("--long", action="store_true", help="also the members of each, and who has submitted it")
    jobs.add_argument("--wait", metavar="JOB", help="until this one is over, and end with its exit code")
    add_answer(jobs, _jobs)
    stop = verbs.add_parser(
        "stop",
        help="end a job of a fleet",
        description="End a job of a fleet: in order, if it trains, and wait until it is over.",
        epilog=STOP_EXAMPLES + EXIT_CODES,
    )
    stop.add_argument("job", metavar="JOB")
    add_replicas(stop)
    add_answer(stop, _stop)


def _jobs(options: argparse.Namespace) -> int:
    if options.wait is not None:
        return wait_for(options, client_of(options), options.wait)
    from elastic.cli.job import top

    overview = top.with_members(client_of(options).look())
    return answer(options, overview, overview_text(overview, long=options.long))


def overview_text(overview: dict[str, Any], *, long: bool = False) -> str:
    """The jobs, oldest first, the nodes, and what does not work although no job says so. long: with members, owners."""
    lines = []
    for job in overview["jobs"]:
        there = Counter(map(node_of, job.get("members") or ())) or job["slots"]
        where = ", ".join(f"{count} on {node}" for node, count in sorted(there.items()))
        told = f"{job['job']:<20} {job['state']:<9}"
        if job["state"] == "ended":
            told += f" exit {job['exit_code']}: {job['because'].partition(chr(10))[0]}"
        else:
            queued = f", place {job['place']} in the queue" if job.get("place") else ""
            told += f" {where or str(job['workers']) + ' workers' + queued}"
            told += f": {job['because']}" if job["because"] else ""
        lines.append(told.rstrip())
        if long and job.get("members"):
            lines.append(f"  members of generation {job['generation']}: {', '.join(job['members'])}")
        if long:
            lines.append(f"  submitted by {owner_text(job.get('owner'))}")
        if long and "priority" in job:
            lines.append(f"  priority {job['priority']}, owner {job['account'] or 'not named'}")
        lines += [f"  trouble: {trouble['because']}; {trouble['advice']}" for trouble in job.get("troubles", ())]
    lines = lines or ["no jobs"]
    for node in overview["nodes"]:
        taken = sum(node["jobs"].values())
        state = f"{taken} of {node['slots']} slots taken" if node["up"] else "away"
        labels = f", {' '.join(node['labels'])}" if node["labels"] else ""
        because = f": {node['because']}" if node["because"] and node["up"] else ""
        lines.append(f"node {node['node']:<15} {state}{labels}{because}")
    for owner in overview.get("owners", ()):
        quota = f", quota {owner['quota']}" if owner["quota"] else ""
        lines.append(f"owner {owner['owner']:<14} {owner['slots']} slots{quota}")
    told_already = [trouble for job in overview["jobs"] for trouble in job.get("troubles", ())]
    troubles = [trouble for trouble in overview.get("troubles", ()) if trouble not in told_already]
    lines += [f"trouble: {trouble['because']}; {trouble['advice']}" for trouble in troubles]
    return "\n".join(lines)


def owner_text(owner: dict[str, str] | None) -> str:
    if owner is None:
        return "somebody whom the version of then did not note"
    who = f"{owner['role']} {owner['name']}" if owner["role"] else "somebody without a certificate"
    return f"{who}, from {owner['address']}"


def _stop(options: argparse.Namespace) -> int:
    from elastic.fleet.client import ended_text

    client = client_of(options)
    job = client.stop(options.job, "asked for by `elastic stop`")
    with waiting(f"{job} ends by itself; `elastic jobs` shows when it has"):
        ended = await_end(client, job, STOP_WAIT_S)
    return answer(options, ended, ended_text(ended))


def wait_for(options: argparse.Namespace, client: FleetClient, job: str) -> int:
    """Until the job is over, which is said. Returns its exit code."""
    from elastic.fleet.client import ended_text

    with waiting(f"{job} goes on; `elastic stop {job}` ends it"):
        ended = await_end(client, job, None)
    return answer(options, ended, ended_text(ended), int(ended["exit_code"]))


def await_end(client: FleetClient, job: str, within_s: float | None) -> dict[str, Any]:
    """The job's entry when it is over; of one that was preempted, of that as which it goes on. Raises ElasticError if
    that takes longer."""
    deadline_s = None if within_s is None else time.monotonic() + within_s
    while True:
        try:
            entry = client.job(job)
        except ConfigError:
            raise
        except ElasticError:  # nobody leads just now
            entry = {"state": ""}
        if entry["state"] == "ended" and not entry.get("next"):
            return entry
        job = entry.get("next") or job
        if deadline_s is not None and time.monotonic() >= deadline_s:
            raise ElasticError(f"{job} is not over after {within_s:g} s; `elastic status` shows what it does")
        time.sleep(END_POLL_S)  # a remote process: there is nothing to wait on
