"""What `elastic drain` does: ask the leader, which tells the node's agent, and wait until the node is empty."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from elastic.asking import ask_to_drain
from elastic.errors import ConfigError, ElasticError, ExitCode
from elastic.ids import node_of
from elastic.jobdir import read_json
from elastic.status import job_status

TIMEOUT_S = 5.0
LOOK_S = 0.1
SLACK_S = 10.0
"""Beyond the budget, for processes to end."""

BECAUSE = "asked for by `elastic drain`"


def ask(job_dir: Path, node: str | None, budget_s: float, *, over: bool) -> str:
    """Have it told to the node's agent. node None: the only one. Returns the node.

    Raises ConfigError if there is no such job or node, ElasticError if nobody leads the job.
    """
    status = job_status(job_dir)
    if status["state"] == "closed":
        raise ConfigError(f"the job in {job_dir} is over: {status['because']}")
    address = (read_json(job_dir / "rendezvous.json") or {})["address"]
    left_ms = round(1000 * budget_s)
    if node is None:
        nodes = ask_to_drain(address, "", 0, "", over=True, timeout_s=TIMEOUT_S)
        if len(nodes) != 1:
            raise ConfigError(f"say which node with --node; there are {_named(nodes)}")
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
        except ElasticError:  # nobody leads just now; the agent says its wish again to whoever does next
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
        time.sleep(LOOK_S)  # a remote process: there is nothing to wait on


def workers_on(node: str, status: dict[str, Any]) -> list[str]:
    """All workers that are on that node, as a job's status tells."""
    members = [member["worker_id"] for member in status["members"]]
    known = [*members, *(worker for kind in ("draining", "waiting", "spares") for worker in status.get(kind, ()))]
    return [worker for worker in known if node_of(worker) == node]


def _named(nodes: list[str]) -> str:
    return ", ".join(nodes) or "none"
