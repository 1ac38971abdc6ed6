"""`elastic top`: what a fleet, or the jobs of this machine, do: one look, then another, and what lies between."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from elastic.cli.options import EXIT_CODES, add_either, check_seconds, client_of, job_dirs_here
from elastic.errors import ConfigError, ElasticError, ExitCode
from elastic.records.events import problems
from elastic.records.job_directory import read_json
from elastic.rendezvous.job_status import job_status

Document = dict[str, Any]

HERE_WAIT_S = 1.0
"""For the leader of a job of this machine: there is another look."""


def with_members(seen: Document) -> Document:
    """What FleetClient.look() has brought, as `elastic jobs` shows it: the overview, and in the entry of each job its
    generation and "members", by the word of the job's own leader, which is all that `elastic status` knows of them too.
    None: nobody can say now."""
    jobs = []
    for job in seen["jobs"]:
        status = seen["statuses"].get(job["job"], {"members": []})
        unknown = status.get("state") == "unknown"
        members = None if unknown else [member["worker_id"] for member in status["members"]]
        jobs.append({**job, "generation": status.get("generation", job.get("generation", 0)), "members": members})
    return {**{name: told for name, told in seen.items() if name != "statuses"}, "jobs": jobs}


def look_here(job_dirs: Sequence[Path]) -> Document:
    """The same of jobs of this machine, which are called as their directories. Raises ConfigError if one holds none."""
    entries, statuses = [], {}
    for job_dir in job_dirs:
        entry = {"job": job_dir.absolute().name, "workers": (read_json(job_dir / "job.json") or {}).get("workers", 0)}
        try:
            status = job_status(job_dir, HERE_WAIT_S)
        except ConfigError:
            raise
        except ElasticError as error:
            entries.append({**entry, "state": "unknown", "because": str(error)})
            continue
        if status["state"] == "closed":
            entries.append({**status, **entry, "state": "ended"})
        else:
            told = [asdict(trouble) for trouble in problems.of_job(job_dir)]
            entries.append({**entry, "state": status["state"], "because": status["because"], "troubles": told})
            statuses[entry["job"]] = status
    return {"leader": "", "jobs": entries, "nodes": [], "statuses": statuses}


def facts(now: Document, now_s: float, before: Document | None, before_s: float, ended: int) -> Document:
    """What two looks show, taken at now_s and before_s of one clock. ended: how many of the jobs that are over."""
    shown = [job for job in now["jobs"] if job["state"] != "ended"]
    shown += [job for job in now["jobs"] if job["state"] == "ended"][::-1][:ended]
    earlier = before["statuses"] if before is not None else {}
    return {
        "leader": now["leader"],
        "jobs": [
            _job(job, now["statuses"].get(job["job"]), earlier.get(job["job"]), now_s - before_s) for job in shown
        ],
        "nodes": [
            {**{name: node[name] for name in ("node", "up", "slots", "because")}, "taken": sum(node["jobs"].values())}
            for node in now["nodes"]
        ],
        "troubles": _once(trouble for one in (*shown, now) for trouble in one.get("troubles", ())),
    }


def _once(troubles: Iterable[Document]) -> list[Document]:
    """What the fleet says besides each of its jobs."""
    found: list[Document] = []
    for trouble in troubles:
        found += [trouble] if trouble not in found else []
    return found


def _job(entry: Document, status: Document | None, before: Document | None, between_s: float) -> Document:
    told = {
        "job": entry["job"],
        "state": entry["state"],
        "because": entry["because"],
        "exit_code": entry.get("exit_code"),
        "workers": entry["workers"],
        "members": [],
        "generation": entry.get("generation", 0),
        "step": entry.get("applied"),
        "steps_per_s": None,
    }
    if status is None:
        return told
    told |= {
        "state": status["state"],
        "because": status["because"],
        "members": [
            {"worker_id": member["worker_id"], "rank": member["rank"], "step": member["applied"], "at": member["phase"]}
            for member in status["members"]
        ],
        "generation": status.get("generation", 0),
        "step": None if status.get("restart") else status.get("applied"),
    }
    if before is not None and between_s > 0 and status.get("applied") and "applied" in before:
        told["steps_per_s"] = round(max(0, status["applied"] - before["applied"]) / between_s, 2)
    return told


def text(shown: Mapping[str, Any], *, members: bool) -> str:
    """A table of jobs, with their members if they are wanted, and one of nodes."""
    lines = [f"{'JOB':<20} {'STATE':<11} {'MEMBERS':>8} {'GEN':>5} {'STEP':>9} {'STEPS/S':>8}  BECAUSE"]
    for job in shown["jobs"]:
        count = f"{len(job['members'])}/{job['workers']}"
        step = "-" if job["step"] is None else str(job["step"])
        rate = "-" if job["steps_per_s"] is None else f"{job['steps_per_s']:.2f}"
        exited = f"exit {job['exit_code']}: " if job["state"] == "ended" else ""
        because = exited + str(job["because"]).partition("\n")[0]
        row = f"{job['job']:<20} {job['state']:<11} {count:>8} {job['generation']:>5} {step:>9} {rate:>8}  {because}"
        lines.append(row.rstrip())
        for member in job["members"] if members else ():
            lines.append(
                f"  rank {member['rank']:<3} {member['worker_id']:<20} step {member['step']:<8} {member['at']}"
            )
    if not shown["jobs"]:
        lines.append("no jobs")
    if shown["nodes"] or shown["leader"]:
        lines += ["", f"{'NODE':<20} {'SLOTS TAKEN':>11}"]
    for node in shown["nodes"]:
        taken = f"{node['taken']}/{node['slots']}" if node["up"] else "away"
        because = f"  {node['because']}" if node["because"] and node["up"] else ""
        lines.append(f"{node['node']:<20} {taken:>11}{because}")
    lines += [f"trouble: {trouble['because']}; {trouble['advice']}" for trouble in shown["troubles"]]
    return "\n".join(lines)


ENDED_SHOWN = 5

EXAMPLES = """\
examples:
  elastic top                                           the jobs that run in ./elastic-jobs, or the newest there
  elastic top --rendezvous 127.0.0.1:7070               until Ctrl-C
  elastic top --rendezvous 127.0.0.1:7070 --members     a line for each member, too
  elastic top --rendezvous 127.0.0.1:7070 --looks 2 --json | tail -1 | jq '.jobs[].steps_per_s'

On a terminal the newest look stays; elsewhere one comes below the other. A rate is that between two looks.
"""


def add(verbs: Any) -> None:
    verb = verbs.add_parser(
        "top",
        help="show live the jobs of a fleet or of this machine, their speed, and the nodes",
        description="Show jobs, their members and steps a second, and the nodes of a fleet, until Ctrl-C.",
        epilog=EXAMPLES + EXIT_CODES,
    )
    add_either(verb)
    verb.add_argument(
        "--every", type=float, default=2.0, metavar="S", help="seconds between looks (default %(default)g)"
    )
    verb.add_argument("--looks", type=int, metavar="N", help="end after N looks (default: go on)")
    verb.add_argument("--members", action="store_true", help="also show the members of each job")
    verb.add_argument("--json", action="store_true", help="as one JSON object a line")
    verb.set_defaults(verb=_top)


def _top(options: argparse.Namespace) -> int:
    check_seconds("--every", options.every)
    if options.looks is not None and options.looks < 1:
        raise ConfigError(f"--looks {options.looks} must be at least 1")
    _looks(options)
    return ExitCode.DONE


def _look_of(options: argparse.Namespace) -> Callable[[], dict[str, Any]]:

    if options.job_dir is not None:
        return lambda: look_here([options.job_dir])
    if not options.rendezvous:
        return lambda: look_here(_dirs_here())
    client = client_of(options)
    return client.look


def _dirs_here() -> list[Path]:
    """The directories of all jobs that run in ./elastic-jobs; if none runs, that of the job which was started last."""
    found, live = job_dirs_here()
    return found[: max(live, 1)]


def _looks(options: argparse.Namespace) -> None:

    look = _look_of(options)
    live = sys.stdout.isatty() and not options.json
    before, before_s = None, 0.0
    for number in itertools.count(1):
        try:
            now, now_s = look(), time.monotonic()
        except ConfigError:
            raise
        except ElasticError as error:
            if number == 1 or options.looks is not None:
                raise
            print(f"elastic: {error}; looking again", file=sys.stderr, flush=True)
        else:
            shown = facts(now, now_s, before, before_s, ENDED_SHOWN)
            before, before_s = now, now_s
            _show(json.dumps(shown) if options.json else text(shown, members=options.members), live=live)
        if number == options.looks:
            return
        time.sleep(options.every)


def _show(text: str, *, live: bool) -> None:
    """live: in place of what the terminal shows."""
    home = "\033[H\033[J" if live else ""
    print(f"{home}{text}" + ("" if live or text.startswith("{") else "\n"), flush=True)
