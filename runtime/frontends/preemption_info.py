"""Notices in the shape of Ray Train's: `elastic.ray.get_preemption_info()`.

Ray's function, `ray.train.get_preemption_info()` of Ray 2.59, answers for all nodes of a run and gives all workers the
same answer, so that they can save together. A notice here is known to the workers of its node alone, and to each of
them at a moment of its own. So the workers tell each other, in an operation of all members.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from elastic.errors import UsageError
from elastic.protocol.worker_id import node_of
from runtime.frontends.ddp.rank_script import RankScript
from runtime.loop import job as jobs
from runtime.loop.training import empty_leaf
from runtime.session import OpKind

LABEL = "get_preemption_info()"


@dataclass(frozen=True)
class PreemptionInfo:
    """Of nodes that have to go."""

    deadline_ms: int | None
    """The earliest of their deadlines, in milliseconds since 1970. A notice always has one."""
    preempted_node_to_ranks: dict[str, list[int]]
    """Name of the node in the job -> ranks of its workers."""

    @property
    def preempted_node_ids(self) -> list[str]:
        """In the order of their names."""
        return sorted(self.preempted_node_to_ranks)

    @property
    def preempted_ranks(self) -> list[int]:
        """Of all these nodes, in their order."""
        return sorted(rank for ranks in self.preempted_node_to_ranks.values() for rank in ranks)


def get_preemption_info() -> PreemptionInfo | None:
    """Which nodes of the job have to go and by when, the same on every worker, or None.

    All workers call it at the same places, where `job.allreduce` may be called. `job.notice` asks nobody. Raises
    UsageError where there is no job of elastic.join().
    """
    job = jobs.current()
    if job is None or RankScript.current() is not None:
        raise UsageError(
            "get_preemption_info() is called by the workers of a job that has called elastic.join(); scripts of "
            "--ranks and --restart call elastic.notice()"
        )
    notice, place = job.notice, job._session.place()
    own: Any = None if notice is None else [place.rank, round(1000 * notice.deadline)]
    said = job._training.calls.collective(OpKind.ALLREDUCE, LABEL, 1, empty_leaf, lambda result: result.note, own)
    return _info(cast(dict[str, Any], said))


def _info(said: Mapping[str, list[int] | None]) -> PreemptionInfo | None:
    """said: worker id -> its rank and deadline, or None for a worker whose node stays."""
    nodes: dict[str, list[int]] = {}
    found = [(node_of(worker), own[0], own[1]) for worker, own in said.items() if own is not None]
    for node, rank, _ in sorted(found):
        nodes.setdefault(node, []).append(rank)
    return PreemptionInfo(min(deadline for _, _, deadline in found), nodes) if found else None
