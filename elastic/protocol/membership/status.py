"""What `elastic status` shows of a group."""

from __future__ import annotations

from collections.abc import Sequence

from elastic.protocol.membership.group import Group
from elastic.protocol.membership.hangs import holding_up, standing_still
from elastic.protocol.membership.roster import WorkerView
from elastic.protocol.recovery_plan import default_sizes


def status(group: Group) -> dict[str, object]:
    """What `elastic status` shows of a group, JSON-able."""
    record = group.running
    members = record.members if record else ()
    seen = [group.workers.get(member.worker_id) for member in members]
    shards = default_sizes(record, group.shards) if record and members else ()
    return {
        "job": group.spec.name,
        "level": group.spec.level,
        "restart": group.spec.restart,
        "state": str(group.state),
        "generation": record.number if record else 0,
        "because": group.because,
        "ring": _ring(group, seen),
        "applied": max((worker.applied for worker in seen if worker), default=0),
        "wanted": group.asked_for,
        "members": [
            {
                "worker_id": member.worker_id,
                "node": member.node,
                "pid": worker.pid if worker else 0,
                "rank": rank,
                "applied": worker.applied if worker else 0,
                "phase": worker.said.phase if worker else "",
                "shards": owned,
                "shard_ms": worker.shard_us / 1000 if worker and worker.shard_us else None,
            }
            for rank, (member, worker, owned) in enumerate(zip(members, seen, shards, strict=True))
        ],
        "stragglers": dict(group.stragglers),
        "held_up_by": holding_up(group) or standing_still(group),
        "draining": {worker: group.drains[worker].because for worker in group.alive(group.drains)},
        "waiting": sorted(group.newcomers - group.spares - set(group.dead)),
        "spares": sorted(group.spares - set(group.dead)),
        "in_vain": sorted(group.in_vain),
        "given_up": {slot: because.partition("\n")[0] for slot, because in sorted(group.slots_given_up.items())},
    }


def _ring(group: Group, members: Sequence[WorkerView | None]) -> dict[str, str]:
    """What carries the gradients, by the word of the lowest rank that has a ring; "": no member has a ring."""
    over, because = next(((one.said.over, one.said.over_because) for one in members if one and one.said.over), ("", ""))
    return {"asked": str(group.spec.ring), "over": over, "because": because}
