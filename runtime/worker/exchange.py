"""One exchange over the ring of a generation: the headers, their agreement, and the reduction.

Where the reduction overlaps with backward (early_sums.py), an operation is several ones of the ring: the tensors, then
the headers, and, if a member has sent early what its gradient is not, all tensors again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from elastic.config import Overlap, Reduction
from elastic.errors import LinkSilent, LinkTooSlow, RingBroken
from elastic.protocol import worker_state
from elastic.protocol.messages import Generation, Kind
from elastic.protocol.reduction_tree import leaves
from elastic.records.journal import Journal
from runtime.allreduce.reduction.early_sums import EarlySums
from runtime.allreduce.reduction.headers import Headers
from runtime.allreduce.reduction.over_mesh import Sums, exchange
from runtime.allreduce.reduction.over_transport import exchange_over
from runtime.allreduce.reduction.partial_sum import Json, Partial, total
from runtime.allreduce.reduction.schedule import Cut
from runtime.allreduce.ring.ring import PARTS, Ring
from runtime.allreduce.ring.ring_set import Rings
from runtime.guards import checks
from runtime.recovery.transfer.client import parse_op
from runtime.session import Op, OpKind
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
    cuts: tuple[Cut, ...] = ()


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
    def __init__(
        self,
        shared: SharedWorkerState,
        rings: Rings,
        reporter: ProgressReporter,
        journal: Journal,
        reduction: Reduction,
        overlap: Overlap,
    ) -> None:
        self._shared = shared
        self._rings = rings
        self._reporter = reporter
        self._journal = journal
        self._reduction = reduction
        self._overlap = overlap
        self._early: EarlySums | None = None
        self._early_of: tuple[int, int] | None = None
        """The generation and the number of the operation whose early sums there are."""
        self._wrong_in = -1
        """The last generation in which a member has sent early what its gradient was not: its script will do so again.
        The others know it too, so nobody sends anything early until the next generation."""
        self._room: dict[str, Tensor] = {}
        self._attempts: _Attempts | None = None
        """The attempts at the operation that was last broken off."""

    def exchange(
        self, task: OperationSpec, generation: int, complete: Callable[[worker_state.Event, Partial], bool]
    ) -> Partial | None:
        """The result; None if the ring was lost, a quiesce came first, or the next move is another one by now.

        complete: posts the event that completes the operation; False if a quiesce came first. Raises
        LeftAlone, LeaderOnly or Disagree: workers did different things, or drifted apart; LinkTooSlow.
        """
        shared = self._shared
        with shared.changed:
            p = shared.post(worker_state.ReadHeader())
            if not isinstance(worker_state.next_move(p), worker_state.Exchange) or p.entered != generation:
                return None
            roots, number = shared.roots(), p.reduced
            ring, record = self._rings.get(generation), p.record
            again = _again(record, number)
            header: dict[str, Json] = {"carry": list[Json](p.carry or ()), "own": task.own}
            agreed: dict[str, Json] = {
                "about": {**asdict(task.op), "kind": str(task.op.kind)},
                "fingerprint": dict(task.fingerprint),
            }
        self._leave_early(generation, number)
        if ring is None:
            shared.post(worker_state.RingLost(generation, "the ring is gone"))
            return None
        roots = sorted(roots, key=lambda root: root.node)
        for root in roots:
            root.settle()
        carried: list[tuple[int, ...]] = []

        def check(headers: dict[str, dict[str, Json]]) -> None:
            _check_agreement(headers, ring.members[0], task.op)
            carried.extend(tuple(cast(list[int], other["carry"])) for other in headers.values())
            shared.post(worker_state.HeadersHeld(generation, number))
            self._reporter.gathered()

        native = self._reduction is Reduction.ALLREDUCE and bool(task.groups)
        merged = [total(roots).flats for _ in roots[:1]] if self._merges(task) else None
        attempts = self._begin(task, number, ring.members)
        try:
            found = None
            if self._overlaps(ring, task, again):
                terms = [root.flats for root in roots] if merged is None else merged
                found = self._reduce_early(ring, number, task, attempts, roots, terms, header, agreed, check)
                header, agreed, check = {}, {}, lambda headers: None
            reduce = partial(exchange, sums=attempts.sums, again=again)
            if ring.transport is not None and task.groups:
                reduce = partial(exchange_over, transport=ring.transport, out=attempts.sums.out)
            headers, result = found or reduce(
                ring,
                op=PARTS * number + PARTS - 1,
                header=header,
                agreed=agreed,
                roots=[total(roots)] if native and roots else roots,
                leaves=leaves([root.node for root in roots]) if native else None,
                merged=merged,
                units=task.op.units,
                groups=task.groups,
                check=check,
            )
            if task.op.kind is OpKind.ALLREDUCE:
                result.note = {worker: other["own"] for worker, other in headers.items()}
        except RingBroken as broken:
            self._reporter.broken(str(broken))
            self._attempts = attempts
            shared.post(worker_state.RingLost(generation, str(broken)))
            attempts.broken(broken)
            return None
        self._reporter.reduced(task.op)
        if complete(worker_state.Obtained(generation, tuple(carried)), result):
            return result
        self._attempts = attempts
        return None

    def _merges(self, task: OperationSpec) -> bool:
        """Whether a member brings the sum of its roots, in place of each."""
        return self._reduction.of_integers and bool(task.groups)

    # ------------------------------------------------------------------------------------ overlap with backward

    def _overlaps(self, ring: Ring, task: OperationSpec, again: bool) -> bool:
        """Whether the operation is summed part by part; all members find the same. AUTO leaves it out on GPUs, where
        nobody has measured it."""
        gains = len(set(ring.hosts)) > 1 and self._shared.sums_on.type == "cpu"
        wanted = self._overlap is Overlap.ON or (self._overlap is Overlap.AUTO and gains)
        fits = self._reduction.stable and not again and ring.generation != self._wrong_in
        return wanted and fits and bool(task.cuts) and ring.world_size > 1

    def send_early(self, task: OperationSpec) -> EarlySums | None:
        """See Session."""
        shared = self._shared
        with shared.changed:
            p = shared.position
            ring, number, unit = self._rings.get(p.entered), p.reduced, p.running
            again = _again(p.record, number)
            if p.quiesced or p.todo or unit is None or ring is None or not self._overlaps(ring, task, again):
                return None
            held = shared.roots()
        self._leave_early(ring.generation, number)
        for root in held:
            root.settle()
        self._attempts = attempts = self._begin(task, number, ring.members)
        return self._begin_early(ring, number, task, attempts, held, unit)

    def _begin_early(
        self,
        ring: Ring,
        number: int,
        task: OperationSpec,
        attempts: _Attempts,
        held: Sequence[Partial],
        unit: int | None,
    ) -> EarlySums:
        def sum_up(sums: EarlySums) -> None:
            flats = [{} for _ in sums.nodes] if sums.merged else sums.terms
            arguments: dict[str, Any] = {
                "op": PARTS * number,
                "header": {},
                "roots": [Partial(*node, flat) for node, flat in zip(sums.nodes, flats, strict=True)],
                "merged": sums.terms if sums.merged else None,
                "units": task.op.units,
                "groups": task.groups,
                "check": lambda headers: None,
                "cuts": sums.cuts,
            }
            if ring.transport is None:
                exchange(ring, sums=Sums(sums.out), ready=sums.ready, **arguments)
            else:
                exchange_over(ring, transport=ring.transport, out=sums.out, wait_for=sums.wait_for, **arguments)

        if {group: flat.numel() for group, flat in self._room.items()} != task.groups:
            self._room = {group: torch.empty_like(flat) for group, flat in attempts.sums.out.items()}
        self._early_of = (ring.generation, number)
        self._early = EarlySums(
            task.cuts,
            held,
            unit,
            task.op.units,
            attempts.sums.out,
            self._room,
            sum_up,
            ring.wake,
            merged=self._merges(task),
        )
        return self._early

    def _reduce_early(
        self,
        ring: Ring,
        number: int,
        task: OperationSpec,
        attempts: _Attempts,
        roots: Sequence[Partial],
        terms: Sequence[dict[str, Tensor]],
        header: dict[str, Json],
        agreed: dict[str, Json],
        check: Callable[[Headers], None],
    ) -> tuple[Headers, Partial] | None:
        """The headers and the result; None if a member has sent early what its gradient is not: then all tensors must
        be sent again."""
        self._reporter.sends_rest()
        early = self._early
        if early is None:
            early = self._begin_early(ring, number, task, attempts, roots, None)
        right: bool | None = early.flush(terms)
        self._early = None
        if not right and any(root.nonfinite for root in roots):
            right = None  # zeros are in the place of what was sent early, and the next gradients will be finite
        headers, result = exchange(
            ring,
            op=PARTS * number + 1,
            header={**header, "early": right},
            agreed=agreed,
            roots=[replace(root, flats={}) for root in roots],
            units=task.op.units,
            groups={},
            check=check,
        )
        if all(other["early"] is True for other in headers.values()):
            return headers, replace(result, flats=early.out)
        if wrong := sorted(worker for worker, other in headers.items() if other["early"] is False):
            self._wrong_in = ring.generation
            self._journal.write("overlap_given_up", generation=ring.generation, op=number, because=", ".join(wrong))
        return None

    def _leave_early(self, generation: int, number: int) -> None:
        """End early sums of another operation or generation, whose ring has been aborted."""
        if self._early is not None and self._early_of != (generation, number):
            self._early.discard()
            self._early = None

    def _begin(self, task: OperationSpec, number: int, members: tuple[str, ...]) -> _Attempts:
        """The attempts at this operation: the last ones if they fit, else new ones; other sums are freed."""
        last, self._attempts = self._attempts, None
        if last is not None and (last.number, last.members, last.task) == (number, members, task):
            return last
        if last is not None:
            self._shared.give_back(last.sums.out)
        return _Attempts(number, members, task, Sums(self._shared.result_buffer(task.groups)))


def _again(record: Generation | None, number: int) -> bool:
    """Whether the operation is the one that a loss has interrupted: some members may have begun it before."""
    return record is not None and record.kind is Kind.LOSS and record.plan.op == number


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
