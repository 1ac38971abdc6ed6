"""One exchange over the ring of a generation: the headers, their agreement, and the reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import cast

from elastic.config import Overlap, Reduction
from elastic.errors import LinkSilent, LinkTooSlow, RingBroken
from elastic.protocol import worker_state
from elastic.protocol.messages import Generation, Kind
from elastic.protocol.reduction_tree import leaves
from elastic.records.journal import Journal
from runtime.allreduce.reduction.early_sums import EarlySums, LastShard
from runtime.allreduce.reduction.headers import Headers
from runtime.allreduce.reduction.over_mesh import ReductionRequest, Sums, exchange
from runtime.allreduce.reduction.over_transport import exchange_over
from runtime.allreduce.reduction.partial_sum import Json, Partial, total
from runtime.allreduce.reduction.schedule import Cut
from runtime.allreduce.ring.ring import PARTS, Ring
from runtime.allreduce.ring.ring_set import Rings
from runtime.guards import checks
from runtime.recovery.state.verification import VOUCHED, Suspect, Verification, suspect, vouched
from runtime.recovery.transfer.client import parse_op
from runtime.session import Op, OpKind
from runtime.worker.overlap import BackwardOverlap
from runtime.worker.progress_report import ProgressReporter
from runtime.worker.state_owner import SharedWorkerState

SILENCES_MAX = 5
"""A worker may give up a link this often in a row, in one operation of the same members, without a new piece of the
sums. More than that shows a link that connects each time but carries next to nothing."""


@dataclass(frozen=True, slots=True)
class OperationSpec:
    """The arguments of `Session.begin` for one operation; and what `Session.vouch` was told of the shard `verified`."""

    op: Op
    fingerprint: dict[str, str]
    groups: dict[str, int]
    own: Json
    cuts: tuple[Cut, ...] = ()
    vouched: tuple[str, ...] = ()
    verified: int = -1


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


@dataclass(frozen=True, slots=True)
class Verifying:
    """`--verify` in the headers of a pass. checksums: of this member's state. tell: called with whoever is wrong."""

    verification: Verification
    checksums: Callable[[], dict[str, str]]
    tell: Callable[[Suspect], None]

    def header(self, task: OperationSpec, carries: bool) -> dict[str, Json]:
        """carries: newcomers may copy the state in this operation, so that the states are compared."""
        if not (task.op.joinable and self.verification.every and (carries or self.verification.due(task.op.step))):
            return {}
        return {VOUCHED: vouched(task.verified, task.vouched, self.checksums())}

    def check(self, headers: Headers, op: Op) -> None:
        """Raise RingBroken if a member is wrong, after it was told; Disagree if nobody can say which."""
        found = suspect(headers) if self.verification.every else None
        if found is None:
            return
        if not found.worker:
            raise checks.corrupted(sorted(headers), found.what, op)
        self.tell(found)
        raise RingBroken(f"{found.worker} is wrong in {checks.describe(op)}: {found.what}")


class RingExchange:
    def __init__(
        self,
        shared: SharedWorkerState,
        rings: Rings,
        reporter: ProgressReporter,
        journal: Journal,
        reduction: Reduction,
        overlap: Overlap,
        verifying: Verifying,
    ) -> None:
        self._verifying = verifying
        self._shared = shared
        self._rings = rings
        self._reporter = reporter
        self._reduction = reduction
        self._overlap = BackwardOverlap(shared.sums_on, journal, reduction, overlap)
        self._attempts: _Attempts | None = None
        """The attempts at the operation that was last broken off, or has begun early."""

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
            roots, ring, again = shared.roots(), self._rings.get(generation), is_again(p.record, p.reduced)
        self._overlap.leave_others(generation, p.reduced)
        if ring is None:
            shared.post(worker_state.RingLost(generation, "the ring is gone"))
            return None
        for root in roots:
            root.settle()
        carried: list[tuple[int, ...]] = []

        def check(headers: Headers) -> None:
            self._verifying.check(headers, task.op)
            _check_agreement(headers, ring.members[0], task.op)
            carried.extend(tuple(cast(list[int], other["carry"])) for other in headers.values())
            shared.post(worker_state.HeadersHeld(generation, p.reduced))
            self._reporter.gathered()

        request = self._request(task, p, sorted(roots, key=lambda root: root.node), check)
        attempts = self._begin(task, p.reduced, ring.members)
        try:
            headers, result = self._reduce(ring, request, task, attempts.sums, again)
        except RingBroken as broken:
            self._reporter.broken(str(broken))
            self._attempts = attempts
            shared.post(worker_state.RingLost(generation, str(broken)))
            attempts.broken(broken)
            return None
        if task.op.kind is OpKind.ALLREDUCE:
            result.note = {worker: other["own"] for worker, other in headers.items()}
        self._reporter.reduced(task.op)
        if complete(worker_state.Obtained(generation, tuple(carried)), result):
            return result
        self._attempts = attempts
        return None

    def _request(
        self,
        task: OperationSpec,
        p: worker_state.WorkerState,
        roots: Sequence[Partial],
        check: Callable[[Headers], None],
    ) -> ReductionRequest:
        native = self._reduction is Reduction.ALLREDUCE and bool(task.groups)
        return ReductionRequest(
            op=PARTS * p.reduced + PARTS - 1,
            units=task.op.units,
            groups=task.groups,
            roots=[total(roots)] if native and roots else roots,
            header={"carry": list[Json](p.carry or ()), "own": task.own, **self._verifying.header(task, bool(p.carry))},
            agreed={"about": {**asdict(task.op), "kind": str(task.op.kind)}, "fingerprint": dict(task.fingerprint)},
            check=check,
            leaves=leaves([root.node for root in roots]) if native else None,
            merged=[total(roots).flats for _ in roots[:1]] if self._merges(task) else None,
        )

    def _reduce(
        self, ring: Ring, request: ReductionRequest, task: OperationSpec, sums: Sums, again: bool
    ) -> tuple[Headers, Partial]:
        if self._overlap.applies(ring, task.cuts, again):
            self._reporter.sends_rest()
            if (found := self._overlap.finish(ring, request, task.cuts, sums.out)) is not None:
                return found
            request = request.said()
        if ring.transport is not None and request.groups:
            return exchange_over(ring, request, transport=ring.transport, out=sums.out)
        return exchange(ring, request, sums=sums, again=again)

    def send_early(self, task: OperationSpec) -> EarlySums | None:
        """See Session."""
        shared = self._shared
        with shared.changed:
            p = shared.position
            ring, unit, again = self._rings.get(p.entered), p.running, is_again(p.record, p.reduced)
            if (
                p.quiesced
                or p.todo
                or unit is None
                or ring is None
                or not self._overlap.applies(ring, task.cuts, again)
            ):
                return None
            held = shared.roots()
        self._overlap.leave_others(ring.generation, p.reduced)
        for root in held:
            root.settle()
        self._attempts = attempts = self._begin(task, p.reduced, ring.members)
        last = LastShard(unit, task.op.units, held, self._merges(task))
        return self._overlap.begin(ring, p.reduced, task.cuts, last, attempts.sums.out)

    def _merges(self, task: OperationSpec) -> bool:
        """Whether a member brings the sum of its roots, in place of each."""
        return self._reduction.of_integers and bool(task.groups)

    def _begin(self, task: OperationSpec, number: int, members: tuple[str, ...]) -> _Attempts:
        """The attempts at this operation: the last ones if they fit, else new ones; other sums are freed."""
        last, self._attempts = self._attempts, None
        if last is not None and (last.number, last.members, last.task) == (number, members, task):
            return last
        if last is not None:
            self._shared.give_back(last.sums.out)
        return _Attempts(number, members, task, Sums(self._shared.result_buffer(task.groups)))


def is_again(record: Generation | None, number: int) -> bool:
    """Whether the operation is the one that a loss has interrupted: some members may have begun it before."""
    return record is not None and record.kind is Kind.LOSS and record.plan.op == number


def _check_agreement(headers: Headers, leader: str, op: Op) -> None:
    """Raise LeftAlone, LeaderOnly or Disagree if workers did different things, or drifted apart."""
    about = headers[leader]["about"]
    if any(header["about"] != about for header in headers.values()):
        ops = {worker: parse_op(header["about"]) for worker, header in headers.items()}
        raise checks.disagreement(ops, leader)
    fingerprints = {w: cast(dict[str, str], header["fingerprint"]) for w, header in headers.items()}
    first = fingerprints[leader]
    if any(fingerprint != first for fingerprint in fingerprints.values()):
        raise checks.disagree(fingerprints, op)
