"""Who may attend a job: the agents of the nodes on which the fleet has placed it, each by a token of its own.

A share of a job on a node comes with a grant of a new token, which the fleet's leader tells the node's daemon alone,
and the daemon the job's agent. The grant outlives the share until the agent has left: one that drains needs its leader
for that. Then it is gone, and with the next share there is another token.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Collection

from elastic.fleet.documents import Grant, Job, Placement


def granted(job: Job, placement: Placement | None, left: Collection[str], new: Callable[[], str]) -> tuple[Grant, ...]:
    """The grants of a job that is to be placed so. left: nodes from which the job's agent has gone. new: makes a
    token."""
    placed = placement.slots if placement is not None else {}
    kept = [grant for grant in job.grants if grant.node in placed or grant.node not in left]
    kept += [Grant(node, new()) for node in sorted(placed.keys() - {grant.node for grant in kept})]
    return tuple(sorted(kept, key=lambda grant: grant.node))


def token_of(job: Job, node: str) -> str:
    """Empty where the job is not placed, and has not been since its agent left."""
    return next((grant.token for grant in job.grants if grant.node == node), "")


def objection(job: Job | None, node: str, token: str) -> str:
    """Why the agent of that node may not attend the job, or nothing."""
    wanted = token_of(job, node) if job is not None else ""
    if not wanted:
        return "the fleet has not placed this job on this node, or not any more"
    if not hmac.compare_digest(wanted.encode(), token.encode()):
        return "the token is not that of this job's place on this node"
    return ""
