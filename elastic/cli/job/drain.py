"""`elastic drain`: a node leaves a job or a fleet.

The command asks the leader, which tells the node's agent, and waits until the node is empty.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic.cli.options import EXIT_CODES, add_answer, add_either, answer, check_seconds, client_of, waiting
from elastic.errors import ConfigError, ElasticError, ExitCode
from elastic.protocol.worker_id import node_of
from elastic.records.job_directory import read_json
from elastic.rendezvous.job_status import job_status

if TYPE_CHECKING:
    from elastic.fleet.client import FleetClient


DRAIN_POLL_S = 0.1

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
    add_answer(drain, _drain)


def _drain(options: argparse.Namespace) -> int:
    check_seconds("--budget", options.budget)
    if options.job_dir is None:
        return _drain_fleet(options)
    node = ask(options.job_dir, options.node, options.budget, over=options.cancel)
    with waiting(_leaves(node)):
        said = f"node {node} stays" if options.cancel else wait(options.job_dir, node, options.budget)
    return answer(options, {"node": node, "drained": not options.cancel}, said)


def _drain_fleet(options: argparse.Namespace) -> int:
    """`elastic drain --rendezvous`: no job on that node any more, until it is taken back."""
    client = client_of(options)
    if options.node is None:
        raise ConfigError("name the node with --node; `elastic jobs` lists the nodes")
    if options.cancel:
        client.cordon(options.node, "", over=True)
        return answer(options, {"node": options.node, "drained": False}, f"node {options.node} stays")
    client.cordon(options.node, "asked for by `elastic drain`", over=False)
    deadline_s = time.monotonic() + options.budget
    with waiting(_leaves(options.node)):
        while left := _still_on(client, options.node):
            if time.monotonic() >= deadline_s:
                raise ElasticError(f"still on node {options.node} after {options.budget:g} s: {', '.join(left)}")
            time.sleep(DRAIN_POLL_S)  # a remote process: there is nothing to wait on
    said = f"node {options.node} is empty, and gets no job until `elastic drain --node {options.node} --cancel`"
    return answer(options, {"node": options.node, "drained": True}, said)


def _leaves(node: str) -> str:
    return f"node {node} is being emptied; the same with --cancel takes it back"


def _still_on(client: FleetClient, node: str) -> list[str]:
    """Jobs and workers that are on that node, as far as the jobs' leaders know."""
    from elastic.fleet.rolling_upgrade import FleetView

    try:
        seen = client.look()
    except ConfigError:
        raise
    except ElasticError:
        return ["nobody leads the fleet at the moment"]
    return FleetView.of(seen, seen["statuses"]).left_on(node)


TIMEOUT_S = 5.0
SLACK_S = 10.0
"""Beyond the budget, for processes to end."""

BECAUSE = "asked for by `elastic drain`"


def ask(job_dir: Path, node: str | None, budget_s: float, *, over: bool) -> str:
    """Have it told to the node's agent. node None: the only one. Returns the node.

    Raises ConfigError if there is no such job or node, ElasticError if nobody leads the job.
    """
    from elastic.rendezvous.operator_client import ask_to_drain

    status = job_status(job_dir)
    if status["state"] == "closed":
        raise ConfigError(f"the job in {job_dir} is over: {status['because']}")
    address = (read_json(job_dir / "rendezvous.json", "address") or {})["address"]
    left_ms = round(1000 * budget_s)
    if node is None:
        nodes = ask_to_drain(address, "", 0, "", over=True, timeout_s=TIMEOUT_S)
        if len(nodes) != 1:
            raise ConfigError(f"name the node with --node; there are {_named(nodes)}")
        node = nodes[0]
    nodes = ask_to_drain(address, node, left_ms, BECAUSE, over=over, timeout_s=TIMEOUT_S)
    if node not in nodes:
        raise ConfigError(f"no agent of a node {node!r} takes part in the job; there are {_named(nodes)}")
    return node


def wait(job_dir: Path, node: str, budget_s: float) -> str:
    """Until no worker of the job is on the node. Returns a sentence.

    Raises ElasticError if that does not happen within the budget, or if the job ends in another way.
    """
    deadline_s = time.monotonic() + budget_s + SLACK_S
    while True:
        try:
            status = job_status(job_dir)
        except ElasticError:  # nobody leads just now; the agent repeats its wish to the next leader
            status = None
        if status is not None and status["state"] == "closed":
            if status["exit_code"] in (ExitCode.DONE, ExitCode.DRAINED):
                return f"the job is over: {status['because']}"
            raise ElasticError(f"the job has failed meanwhile: {status['because']}")
        if status is not None and status["members"] and not workers_on(node, status):
            others = sorted({member["node"] for member in status["members"]})
            count = len(status["members"])
            return f"node {node} is empty; the job goes on with {count} worker{'s' * (count > 1)}, on {_named(others)}"
        if time.monotonic() >= deadline_s:
            raise ElasticError(
                f"workers are still on node {node} after {budget_s:g} s, because they hold the only copy of the state; "
                f"`elastic status --job-dir {job_dir}` shows them"
            )
        time.sleep(DRAIN_POLL_S)  # a remote process: there is nothing to wait on


def workers_on(node: str, status: dict[str, Any]) -> list[str]:
    """All workers that are on that node, as a job's status tells."""
    from elastic.fleet.rolling_upgrade import workers_of

    return [worker for worker in workers_of(status) if node_of(worker) == node]


def _named(nodes: list[str]) -> str:
    return ", ".join(nodes) or "none"
