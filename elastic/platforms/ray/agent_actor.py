"""The actor of one node of a job: it starts the agent as its child, and tells it that Ray drains the node."""

from __future__ import annotations

import time

from elastic.platforms.common.node_task import TaskOutcome, Ticket, serve
from elastic.preemption.notice import Notice, NoticeKind

NO_DEADLINE_S = 120.0
"""Left to a node for whose drain Ray has given no deadline."""


class ElasticAgent:
    """An actor. `serve` ends with the job, or when the job has left the node."""

    def serve(self, ticket: Ticket) -> TaskOutcome:
        """As node_task.serve."""
        return serve(ticket, _drained)


def _drained() -> Notice | None:
    """Whether Ray drains this node: `ray drain-node`, its autoscaler, a preemption that Ray has heard of."""
    import ray
    from ray._private.state import state  # Ray says it nowhere else

    node = ray.get_runtime_context().get_node_id()
    draining = state.get_draining_nodes()
    return notice_of(draining[node], time.time()) if node in draining else None


def notice_of(deadline_ms: int, now_s: float) -> Notice:
    """deadline_ms: by the clock of all, as Ray has it; 0: none."""
    left_s = max(0.0, deadline_ms / 1000 - now_s) if deadline_ms else NO_DEADLINE_S
    return Notice(NoticeKind.RECLAIM, left_s, "Ray drains this node", "Ray")
