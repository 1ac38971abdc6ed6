"""Operations that reduce no gradients: calls that all workers make between passes, and values that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import NamedTuple, TypeVar

import torch

from elastic.errors import Disagree
from elastic.protocol.loop_state import (
    AskEarly,
    AskShared,
    Called,
    LoopState,
    Mistake,
    RecallEarly,
    RecallReply,
    RunTogether,
    SharedCalled,
)
from runtime.allreduce.reduction.partial_sum import Json, Partial
from runtime.guards import checks
from runtime.guards.refusals import post, refusal
from runtime.loop.call_replies import CallReplies
from runtime.loop.control_scalars import ControlScalars
from runtime.loop.training.agreement import Agreement
from runtime.loop.training.newcomer import Newcomer
from runtime.loop.training.registered import Registered
from runtime.recovery.checkpoint.coordinator import Taking
from runtime.session import Op, OpKind, Session

T = TypeVar("T")


class CallResult(NamedTuple):
    """The result of an operation: the values of its scalars, and its tensors by group."""

    scalars: dict[str, float]
    flats: dict[str, torch.Tensor]


class Calls:
    """Used by the user's thread only."""

    def __init__(
        self,
        session: Session,
        registered: Registered,
        agreement: Agreement,
        riders: ControlScalars,
        replies: CallReplies,
        newcomer: Newcomer,
        checkpoints: Taking,
    ) -> None:
        self._session = session
        self._registered = registered
        self._agreement = agreement
        self._riders = riders
        self._replies = replies
        self._newcomer = newcomer
        self._checkpoints = checkpoints
        self.running: int | None = None
        """The shard or part that the script computes now; None: none."""
        self.leaders: str | None = None
        """The call in progress whose code only the leader runs; None: none."""
        self.unwaiting = False
        """Whether the script is where workers do not wait for each other."""
        self._unfinished: Op | None = None
        """The operation in which the script's own function has raised; None: none."""
        self._called = False
        """Whether the workers have made a collective call between passes."""

    @property
    def _at(self) -> LoopState:
        return self._session.script.at

    @property
    def idle(self) -> bool:
        """Whether the workers have done nothing together: no step in this run or an earlier one, no call, no stop()."""
        return self._at.step == 0 and not self._called and self._riders.stopped is None

    def may_be_all(self) -> None:
        """The script has no loop, and is not idle for that."""
        self._called = True

    def run(
        self,
        op: Op,
        fingerprint: dict[str, str],
        compute: Callable[[int], Partial],
        own: Json = None,
        groups: dict[str, int] | None = None,
    ) -> Partial:
        """Run a whole operation, of scalars if there are no groups. groups, own: see Session.begin."""
        self.check_finished()
        self._session.begin(op, fingerprint, groups, own=own)
        while True:
            while (unit := self._session.next_unit()) is not None:
                self.running = unit
                try:
                    leaf = compute(unit)
                except Exception:
                    self._unfinished = op
                    raise
                leaf.scalars = self._riders.travel(leaf.scalars)
                self._session.unit_done(leaf)
                self.running = None
            if (result := self._session.finish()) is not None:
                self._riders.arrive(result.scalars)
                return result

    def in_turns(
        self, op: Op, leaf: Callable[[int], Partial], results: list[CallResult], groups: dict[str, int] | None = None
    ) -> Iterator[int]:
        """As `run`, but the caller computes each unit that it gets before it asks for the next one.

        leaf: returns the leaf of the unit, which is computed. results: gets the result.
        """
        self._session.begin(op, self._agreement.fingerprint(), groups)
        while True:
            while (unit := self._session.next_unit()) is not None:
                self.running = unit
                yield unit
                part = leaf(unit)
                part.scalars = self._riders.travel(part.scalars)
                self._session.unit_done(part)
                self.running = None
            if (result := self._session.finish()) is not None:
                scalars = self._riders.arrive(result.scalars)
                results.append(CallResult(scalars, {group: flat.clone() for group, flat in result.flats.items()}))
                self._session.used()
                return

    def collective(
        self,
        kind: OpKind,
        label: str,
        units: int,
        compute: Callable[[int], Partial],
        reply: Callable[[Partial], Json],
        own: Json = None,
    ) -> Json:
        """Run a call of all workers between passes; its reply is kept for newcomers of this epoch."""
        self.check_leaders(label)
        move = post(self._session.script, Called(), label)
        at = self._at
        key = self._replies.next_key(label, at.early_calls if at.early else None)
        match move:
            case AskEarly():
                return self._newcomer.ask_early(key)
            case RecallEarly():
                return self._newcomer.recall_early(key)
            case RecallReply():
                return self._replies.told(key, at.epoch)
        assert isinstance(move, RunTogether)
        op = Op(kind, units, at.epoch, at.step, label=label, early=move.early)
        self.leaders = "job.once()" if kind is OpKind.ONCE else None
        try:
            with self._registered.left_alone():
                value = reply(self.run(op, self._agreement.fingerprint(), compute, own))
        finally:
            self.leaders = None
        self._called = True
        if move.early:
            self._newcomer.called_early(key, at.step, value)
        elif move.keep:
            self._replies.keep(key, value)
        return value

    def vectors(
        self,
        kind: OpKind,
        label: str,
        units: int,
        compute: Callable[[int], Partial],
        groups: dict[str, int],
        reply: Callable[[dict[str, torch.Tensor]], T],
    ) -> T:
        """Sums of tensors of any size: in a step behind its first pass, or behind the loop, where no newcomer has to be
        told them. groups: see Session.begin. reply: makes of group -> sum what is returned; the sums are lent to it."""
        self.check_leaders(label)
        move = post(self._session.script, Called(), label)
        assert isinstance(move, RunTogether) and not (move.early or move.keep)
        at = self._at
        op = Op(kind, units, at.epoch, at.step, label=label)
        with self._registered.left_alone():
            flats = self.run(op, self._agreement.fingerprint(), compute, groups=groups).flats
        found = reply(flats)
        self._session.used()
        return found

    def shared(
        self,
        name: str,
        compute: Callable[[int], Partial],
        reply: Callable[[Partial], Json],
        kind: OpKind = OpKind.ONCE,
        own: Json = None,
    ) -> Json:
        """A value that all workers share from before the loop; a newcomer gets it from a member, and a resumed run from
        the checkpoint. kind, own: as in `collective`."""
        label = f"shared({name})"
        shared = self._replies.shared
        if name in shared:
            return deepcopy(shared[name])
        self.check_leaders(label)
        if isinstance(post(self._session.script, SharedCalled(), label), AskShared):
            shared = self._replies.shared = dict(self._session.meta().shared)
            if name not in shared:
                raise Disagree(
                    f"this newcomer called job.{label}, and the others have {sorted(shared)}. Make such calls "
                    "the same in every process: not under `if job.restarted` or `if job.is_leader`."
                )
        elif (found := self._checkpoints.found) is not None and name in found.moment.shared:
            shared[name] = found.moment.shared[name]
        else:
            self.leaders = "job.shared()"
            shared[name] = reply(self.run(Op(kind, 1, label=label), {}, compute, own))
            self.leaders = None
        return deepcopy(shared[name])

    def check_leaders(self, call: str) -> None:
        """Raise UsageError in code that only the leader runs, or that each worker runs at its own speed."""
        if self.unwaiting:
            raise checks.inside_unwaiting(call)
        if self.leaders is not None:
            raise checks.inside_leaders(call, self.leaders)

    def check_finished(self) -> None:
        """Raise UsageError if the script has caught an error of its own function in a call of all workers."""
        if self._unfinished is not None:
            raise checks.unfinished(self._unfinished)

    def check_outside_pass(self, call: str) -> None:
        """Raise UsageError inside a pass, where workers run different code at different times."""
        if self._at.in_pass:
            raise refusal(Mistake.IN_PASS, self._at, call)


def empty_leaf(unit: int) -> Partial:
    """A leaf without content: it only says that the worker takes part."""
    return Partial(unit, unit + 1)
