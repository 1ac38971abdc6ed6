"""One exchange over the ring of a generation: the headers, their agreement, and the reduction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import cast

from elastic.errors import LinkSilent, LinkTooSlow, RingBroken
from elastic.protocol import worker_state
from elastic.protocol.messages import Kind
from elastic.protocol.reduction_tree import leaves
from runtime.guards import checks
from runtime.reduction.over_mesh import Sums, exchange
from runtime.reduction.over_transport import exchange_over
from runtime.reduction.partial_sum import Json, Partial, total
from runtime.ring.ring_set import Rings
from runtime.session import Op, OpKind
from runtime.transfer.client import parse_op
from runtime.worker.progress_report import ProgressReporter
from runtime.worker.state_owner import SharedWorkerState

SILENCES_MAX = 5
"""A worker may give up a link this often in a row, in one operation of the same members, without a new piece of the
sums. More than that shows a link that connects each time but carries next to nothing."""


@dataclass(frozen=True, slots=True)
class OperationSpec:
    """The arguments of `Session.begin` for one operation."""

    op: Op
    fingerprint: dict[str, str]
    groups: dict[str, int]
    own: Json


@dataclass(slots=True)
class _Attempts:
    """The attempts at one operation by the same members. silences: how often this worker has given up a link since it
    last got a piece of the sums. pieces: how many pieces it had then."""

    number: int
    members: tuple[str, ...]
    task: OperationSpec
    sums: Sums
    silences: int = 0
    pieces: int = 0

    def broken(self, why: RingBroken) -> None:
        """Note a broken attempt. Raises LinkTooSlow if another attempt is of no use."""
        if (held := sum(self.sums.held.values())) > self.pieces:
            self.silences, self.pieces = 0, held
        self.silences += isinstance(why, LinkSilent)
        if self.silences >= SILENCES_MAX:
            raise LinkTooSlow(
                f"operation {self.number} was begun {SILENCES_MAX} times in vain over a link that connects: {why}"
            )


class RingExchange:
    def __init__(self, standing: SharedWorkerState, rings: Rings, gauge: ProgressReporter, reduction: str) -> None:
        self._standing = standing
        self._rings = rings
        self._gauge = gauge
        self._reduction = reduction
        self._attempts: _Attempts | None = None
        """The attempts at the operation that was last broken off."""

    def exchange(
        self, task: OperationSpec, generation: int, complete: Callable[[worker_state.Event, Partial], bool]
    ) -> Partial | None:
        """The result; None if the ring was lost, a quiesce came first, or the next move is another one by now.

        complete: posts the event that completes the operation, under the lock; False if a quiesce came first. Raises
        LeftAlone, LeaderOnly or Disagree: workers did different things, or drifted apart; LinkTooSlow.
        """
        standing = self._standing
        with standing.changed:
            p = standing.post(worker_state.ReadHeader())
            if not isinstance(worker_state.next_move(p), worker_state.Exchange) or p.entered != generation:
                return None
            roots, number = standing.roots(), p.reduced
            ring, record = self._rings.get(generation), p.record
            again = record is not None and record.kind is Kind.LOSS and record.plan.op == number
            header: dict[str, Json] = {"carry": list[Json](p.carry or ()), "own": task.own}
            agreed: dict[str, Json] = {
                "about": {**asdict(task.op), "kind": str(task.op.kind)},
                "fingerprint": dict(task.fingerprint),
            }
        if ring is None:
            standing.post(worker_state.RingLost(generation, "the ring is gone"))
            return None
        for root in roots:
            root.settle()
        carried: list[tuple[int, ...]] = []

        def check(headers: dict[str, dict[str, Json]]) -> None:
            _check_agreement(headers, ring.members[0], task.op)
            carried.extend(tuple(cast(list[int], other["carry"])) for other in headers.values())
            standing.post(worker_state.HeadersHeld(generation, number))
            self._gauge.gathered()

        beside = ring.transport if task.groups else None
        native = self._reduction == "allreduce" and bool(task.groups)
        attempts = self._begin(task, number, ring.members)
        sums = attempts.sums
        try:
            if beside is None:
                reduce = partial(exchange, sums=sums, again=again)
            else:
                reduce = partial(exchange_over, transport=beside, out=sums.out)
            headers, result = reduce(
                ring,
                op=number,
                header=header,
                agreed=agreed,
                roots=[total(roots)] if native and roots else roots,
                leaves=leaves([root.node for root in roots]) if native else None,
                units=task.op.units,
                groups=task.groups,
                check=check,
            )
            if task.op.kind is OpKind.ALLREDUCE:
                result.note = {worker: other["own"] for worker, other in headers.items()}
        except RingBroken as broken:
            self._gauge.broken(str(broken))
            self._attempts = attempts
            standing.post(worker_state.RingLost(generation, str(broken)))
            attempts.broken(broken)
            return None
        self._gauge.reduced(task.op)
        with standing.changed:
            if complete(worker_state.Obtained(generation, tuple(carried)), result):
                return result
        self._attempts = attempts
        return None

    def _begin(self, task: OperationSpec, number: int, members: tuple[str, ...]) -> _Attempts:
        """The attempts at this operation: the last ones if they fit, else new ones; other sums are freed."""
        last, self._attempts = self._attempts, None
        if last is not None and (last.number, last.members, last.task) == (number, members, task):
            return last
        if last is not None:
            self._standing.give_back(last.sums.out)
        return _Attempts(number, members, task, Sums(self._standing.result_buffer(task.groups)))


def _check_agreement(headers: dict[str, dict[str, Json]], leader: str, op: Op) -> None:
    """Raise LeftAlone, LeaderOnly or Disagree if workers did different things, or drifted apart."""
    about = headers[leader]["about"]
    if any(header["about"] != about for header in headers.values()):
        ops = {worker: parse_op(header["about"]) for worker, header in headers.items()}
        raise checks.disagreement(ops, leader)
    fingerprints = {w: cast(dict[str, str], header["fingerprint"]) for w, header in headers.items()}
    first = fingerprints[leader]
    if any(fingerprint != first for fingerprint in fingerprints.values()):
        raise checks.disagree(fingerprints, op)
