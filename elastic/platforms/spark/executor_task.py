"""What runs on an executor: a ticket is used once."""

from __future__ import annotations

from collections.abc import Iterable

from elastic.platforms.common.node_task import TaskOutcome, Ticket, serve


def attend(tickets: Iterable[Ticket]) -> list[TaskOutcome | None]:
    """For mapPartitions. None in the place of an outcome: Spark has started the task again by itself, and the driver
    has to give it another ticket, because no two processes may be the same node."""
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is not None and context.attemptNumber() > 0:
        return [None for _ in tickets]
    return [serve(ticket) for ticket in tickets]
