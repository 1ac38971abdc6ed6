"""One exchange over the ring of a generation: the headers, what they have to agree on, and the reduction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import cast

from elastic import position
from elastic.errors import RingBroken
from elastic.tree import leaves
from runtime import guards
from runtime.bulk import exchange_native_over, exchange_over
from runtime.gauge import Gauge
from runtime.newcomer import parse_op
from runtime.partial import Json, Partial, total
from runtime.reduce import exchange, exchange_native
from runtime.rings import Rings
from runtime.session import Op, OpKind
from runtime.standing import Standing


@dataclass(frozen=True, slots=True)
class Task:
    """What `Session.begin` was told of an operation."""

    op: Op
    fingerprint: dict[str, str]
    groups: dict[str, int]
    own: Json


class Turn:
    def __init__(self, standing: Standing, rings: Rings, gauge: Gauge, reduction: str) -> None:
        self._standing = standing
        self._rings = rings
        self._gauge = gauge
        self._reduction = reduction

    def exchange(
        self, task: Task, generation: int, complete: Callable[[position.Event, Partial], bool]
    ) -> Partial | None:
        """The result; None if the ring was lost, if a quiesce came first, or if there is something else to do by now.

        complete: posts what completes the operation, under the lock; False if a quiesce came first.
        Raises LeftAlone, LeaderOnly or Disagree: workers did different things, or drifted apart.
        """
        standing = self._standing
        with standing.changed:
            p = standing.post(position.ReadHeader())
            if not isinstance(position.move(p), position.Exchange) or p.entered != generation:
                return None
            roots, number = standing.roots(), p.reduced
            ring = self._rings.get(generation)
            header: dict[str, Json] = {
                "about": {**asdict(task.op), "kind": str(task.op.kind)},
                "carry": list[Json](p.carry or ()),
                "fingerprint": dict(task.fingerprint),
                "own": task.own,
            }
        if ring is None:
            standing.post(position.RingLost(generation, "the ring is gone"))
            return None
        for root in roots:
            root.settle()
        carried: list[tuple[int, ...]] = []

        def check(headers: dict[str, dict[str, Json]]) -> None:
            _check_agreement(headers, ring.members[0], task.op)
            carried.extend(tuple(cast(list[int], other["carry"])) for other in headers.values())
            standing.post(position.HeadersHeld(generation, number))
            self._gauge.gathered()

        out = standing.result_buffer(task.groups)
        beside = ring.transport if task.groups else None
        try:
            if self._reduction == "allreduce" and task.groups:
                add = exchange_native if beside is None else partial(exchange_native_over, transport=beside)
                _, result = add(
                    ring,
                    op=number,
                    header=header,
                    contribution=total(roots) if roots else None,
                    leaves=leaves([root.node for root in roots]),
                    units=task.op.units,
                    groups=task.groups,
                    check=check,
                    out=out,
                )
            else:
                reduce = exchange if beside is None else partial(exchange_over, transport=beside)
                headers, result = reduce(
                    ring,
                    op=number,
                    header=header,
                    roots=roots,
                    units=task.op.units,
                    groups=task.groups,
                    check=check,
                    out=out,
                )
                if task.op.kind is OpKind.ALLREDUCE:
                    result.note = {worker: other["own"] for worker, other in headers.items()}
        except RingBroken as broken:
            standing.give_back(out)
            standing.post(position.RingLost(generation, str(broken)))
            return None
        self._gauge.reduced(task.op)
        with standing.changed:
            return result if complete(position.Obtained(generation, tuple(carried)), result) else None


def _check_agreement(headers: dict[str, dict[str, Json]], leader: str, op: Op) -> None:
    """Raises LeftAlone, LeaderOnly or Disagree: workers did different things, or drifted apart."""
    ops = {worker: parse_op(header["about"]) for worker, header in headers.items()}
    if len(set(ops.values())) > 1:
        raise guards.disagreement(ops, leader)
    fingerprints = {w: cast(dict[str, str], header["fingerprint"]) for w, header in headers.items()}
    first = fingerprints[leader]
    if any(fingerprint != first for fingerprint in fingerprints.values()):
        raise guards.disagree(fingerprints, op)
