"""`elastic drain`: a node leaves, a job or a fleet."""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING, Any

from elastic.cli.parsing import waiting
from elastic.cli.where import EXIT_CODES, add_either, client_of
from elastic.errors import ConfigError, ElasticError, ExitCode

if TYPE_CHECKING:
    from elastic.fleet.client import FleetClient

LOOK_S = 0.2

EXAMPLES = """\
examples:
  elastic drain --job-dir elastic-jobs/train-1 --node gpu-7              between two steps; nothing is computed twice
  elastic drain --job-dir elastic-jobs/train-1 --node gpu-7 --cancel     it may work again
  elastic drain --rendezvous 127.0.0.1:7070 --node gpu-7                 of all jobs; it gets no other one
"""


def add(verbs: Any) -> None:
    drain = verbs.add_parser(
        "drain",
        help="take a node out of a job, between two steps",
        description="Ask the job to go on without a node, and wait until no worker is on it.",
        epilog=EXAMPLES + EXIT_CODES,
    )
    add_either(drain, by_default=False)
    drain.add_argument("--node", metavar="N", help="which node (default: the only one of the job)")
    drain.add_argument(
        "--budget",
        type=float,
        default=120.0,
        metavar="S",
        help="seconds until the node may be gone; 5 s before, workers that are still there are ended, unless they hold "
        "the only copy of the state (default 120). With --rendezvous: how long to wait; the agent has its own --grace",
    )
    drain.add_argument("--cancel", action="store_true", help="take it back: the node starts workers again")
    drain.add_argument("--json", action="store_true", help="as one JSON object")
    drain.set_defaults(verb=_drain)


def _drain(options: argparse.Namespace) -> int:
    from elastic import drain

    if not 0 < options.budget < float("inf"):
        raise ConfigError(f"--budget {options.budget:g} must be a positive number of seconds")
    if options.job_dir is None:
        return _drain_fleet(options)
    node = drain.ask(options.job_dir, options.node, options.budget, over=options.cancel)
    with waiting(_leaves(node)):
        said = f"node {node} stays" if options.cancel else drain.wait(options.job_dir, node, options.budget)
    print(json.dumps({"node": node, "drained": not options.cancel}) if options.json else said)
    return ExitCode.DONE


def _drain_fleet(options: argparse.Namespace) -> int:
    """`elastic drain --rendezvous`: no job on that node any more, until it is taken back."""
    client = client_of(options)
    if options.node is None:
        raise ConfigError("say which node with --node; `elastic jobs` shows which there are")
    if options.cancel:
        client.cordon(options.node, "", over=True)
        print(json.dumps({"node": options.node, "drained": False}) if options.json else f"node {options.node} stays")
        return ExitCode.DONE
    client.cordon(options.node, "asked for by `elastic drain`", over=False)
    deadline_s = time.monotonic() + options.budget
    with waiting(_leaves(options.node)):
        while left := _still_on(client, options.node):
            if time.monotonic() >= deadline_s:
                raise ElasticError(f"still on node {options.node} after {options.budget:g} s: {', '.join(left)}")
            time.sleep(LOOK_S)  # a remote process: there is nothing to wait on
    said = f"node {options.node} is empty, and gets no job until `elastic drain --node {options.node} --cancel`"
    print(json.dumps({"node": options.node, "drained": True}) if options.json else said)
    return ExitCode.DONE


def _leaves(node: str) -> str:
    return f"node {node} is being emptied; the same with --cancel takes it back"


def _still_on(client: FleetClient, node: str) -> list[str]:
    """Workers of jobs that are on that node, as far as the jobs' leaders know."""
    from elastic.drain import workers_on

    try:
        overview = client.overview()
        left = [job for known in overview["nodes"] if known["node"] == node for job in known["jobs"]]
        for job in overview["jobs"]:
            if job["state"] in ("placed", "stopping"):
                status = client.status_of(job)
                unknown = status["state"] == "unknown"
                left += [f"perhaps some of {job['job']}, which nobody leads"] if unknown else workers_on(node, status)
    except ConfigError:
        raise
    except ElasticError:
        return ["nobody leads the fleet at the moment"]
    return left
