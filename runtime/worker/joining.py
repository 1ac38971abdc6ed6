"""How a newcomer becomes a member: learn where the loop stands, rehearse, copy the state, take over results.

A copy made inside the donor's window needs one more result, that of its own operation. A held copy is older: the later
results are taken over one by one, each through the script's own code, without computing a shard, until this worker has
reached the operation in progress. Then it counts as a holder of its state, as after a copy in the window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import NoReturn

import torch

from elastic.errors import JoinMissed
from elastic.protocol import worker_state
from elastic.protocol.loop_state import (
    Admitted,
    CopiedAnew,
    CopyArrived,
    CopyOffered,
    GoAstray,
    MembersLost,
    ResultTaken,
    Standing,
    WentAstray,
)
from elastic.protocol.messages import Generation, Member
from elastic.protocol.worker_state import AskOutcome, CopyState, Phase, WorkerState
from elastic.records.journal import Journal
from runtime.allreduce.reduction.partial_sum import Json, Partial
from runtime.guards import checks
from runtime.recovery.state.training_state import Carrier
from runtime.recovery.transfer.client import ANSWER_S, CopyClient, parse_result, parse_results, parse_state
from runtime.recovery.transfer.connection import CopyConnection, CopyFailed
from runtime.recovery.transfer.multi_source import MultiSourceCopy, Open
from runtime.recovery.transfer.result_log import LoggedResult
from runtime.session import Copy, JoinMeta, Op, OpKind, ScriptLoop
from runtime.worker.leader_orders import LeaderOrders
from runtime.worker.state_owner import SharedWorkerState

RETRY_S = 0.05
"""Seconds before an unanswered question is asked again; the pause doubles until there is news or an answer."""
RETRY_MAX_S = 1.0

MEMBERS = "the members"


class JoinProtocol:
    """Used by the user's thread of a newcomer."""

    def __init__(
        self, shared: SharedWorkerState, orders: LeaderOrders, asker: CopyClient, journal: Journal, script: ScriptLoop
    ) -> None:
        self._script = script
        self._shared = shared
        self._orders = orders
        self._asker = asker
        self._journal = journal
        self._number = -1
        """The operation whose state the carrier holds, or will hold while the script applies a result; -1: none."""
        self._op = Op(OpKind.SYNC, 0)
        """That operation; between two `join`s only its number is known."""
        self._counted_in: Generation | None = None
        """The generation in which the donor of that operation counts this worker as a holder of its state, or may do so
        because its answer was lost: then this worker may be a member after it. A loss voids that."""
        self._copied_here = False
        """Whether the state was copied in this `join`: then the script's earlier fingerprint is void."""
        self._results: deque[LoggedResult] = deque()
        self._pause_s = RETRY_S
        self._turn = 0
        """Index of the worker to ask; it moves on when a worker had no answer."""
        self._follows = False
        """Whether the donor of the last copy keeps the results from there on."""
        self._waited_for = False
        """Whether the operation of the last copy waits for this worker."""
        self._behind = 0
        """How many operations this newcomer was behind the members when it was last sent results after its copy; 0: it
        was sent none."""
        self._gathering: MultiSourceCopy | None = None
        """A copy whose donor was lost before it was complete."""

    @property
    def doing(self) -> str:
        """A phase that changes with every byte: a newcomer that makes progress is left alone, however slow it is."""
        return f"joining, {self._asker.received:,} bytes received"

    @property
    def _astray(self) -> bool:
        return self._script.at.standing is Standing.ASTRAY

    def await_invitation(self) -> None:
        """Session.await_invitation."""
        with self._shared.changed:
            self._shared.changed.wait_for(lambda: self._orders.invited or self._orders.over)
        self._orders.leave_if_over()

    def meta(self, until: Callable[[JoinMeta], bool]) -> JoinMeta:
        """Session.meta."""
        while True:
            self._orders.leave_if_over()
            meta = self._asker.meta(self._orders.newest)
            if meta is not None and until(meta):
                return meta
            self._pause()

    def registered_by_members(self, name: str) -> tuple[dict[str, Json], Sequence[torch.Tensor]]:
        """Session.registered_by_members."""
        while True:
            self._orders.leave_if_over()
            if (found := self._asker.registered(self._orders.newest, name)) is not None:
                return found
            self._pause()

    def join(self, here: Op, fingerprint: dict[str, str], carrier: Carrier) -> tuple[Op, Partial | None]:
        """Session.join."""
        self._op, self._copied_here = here, False
        while True:
            step = self._next()
            if step is None:
                self._caught_up()
                return self._op, None
            p, todo = step
            counted = self._counted_in is p.record
            result: Partial | None = None
            try:
                match todo:
                    case CopyState(of):
                        answered = self._copy_state(p, of, carrier)
                    case AskOutcome(op, of) if counted:
                        answered, result = self._ask_outcome(p, op, of)
                    case AskOutcome(_, of):
                        answered, result = self._go_on(p, of, fingerprint)
            except CopyFailed as failed:
                self._journal.write("copy_failed", generation=p.entered, because=str(failed))
                if not counted:
                    self._asker.unfollow()
                answered = False
            if self._astray:
                return self._op, self.take_over(self._op, {})
            if result is not None:
                return self._op, result
            self._answered(answered)

    def copy_anew(self) -> Copy:
        """Session.copy_anew. The donor keeps the results from that pass on."""
        self._results.clear()
        self._number = -1
        self._asker.unfollow()
        while True:
            step = self._next()
            if step is None:
                self._script.post(MembersLost())
                raise AssertionError("a newcomer without a copy goes on without members")
            try:
                copy = self._fetch_state(step[0], step[1].of, follow=True)
                if copy is not None:
                    self._say_complete(-1, 0)
                    self._script.post(CopiedAnew(copy.op.step))
                    return copy
            except CopyFailed as failed:
                self._journal.write("copy_failed", generation=step[0].entered, because=str(failed))
                self._number = -1
                self._asker.unfollow()
            self._answered(False)

    def _answered(self, answered: bool) -> None:
        """After an answer, reset the pause; else choose another worker to ask, and pause."""
        if answered:
            self._pause_s = RETRY_S
        else:
            self._turn += 1
            self._pause()

    def take_over(self, here: Op, fingerprint: dict[str, str]) -> Partial:
        """The result of an operation that the members have completed, while behind; maybe from another donor.

        Raises JoinMissed if no member has it any more: between two passes there is no way back to a copy.
        """
        if here.kind is OpKind.LEAVE:
            self._await_end()
        while True:
            self._orders.leave_if_over()
            p = self._shared.position
            try:
                if self._results or self._fetch_results(p):
                    self._pause_s = RETRY_S
                    return self._take(here, fingerprint)
            except CopyFailed as failed:
                self._journal.write("copy_failed", generation=p.entered, because=str(failed))
                self._leave_donor()
            self._pause()

    def _leave_donor(self) -> None:
        self._asker.unfollow()
        self._turn += 1

    def _await_end(self) -> NoReturn:
        """Wait for the end: the members are about to leave, and this worker, which is none, is then told to go."""
        with self._shared.changed:
            self._shared.changed.wait_for(lambda: self._orders.over)
        self._orders.leave_if_over()
        raise AssertionError("a worker without a part in the job goes on")

    def _pause(self) -> None:
        with self._shared.changed:
            news = self._shared.changed.wait(self._pause_s)
        self._pause_s = RETRY_S if news else min(2 * self._pause_s, RETRY_MAX_S)

    def _next(self) -> tuple[WorkerState, CopyState | AskOutcome] | None:
        """The answer of worker_state.seek; None if all members were lost and the copy here is the state now."""
        while True:
            self._orders.leave_if_over()
            with self._shared.changed:
                p = self._shared.position
                if p.phase is not Phase.FRESH:
                    return None
                if p.copied != self._number:
                    copied = worker_state.Copied(self._number, self._op.step)
                    p = self._shared.post(copied)  # refused while quiesced
                todo = worker_state.seek(p)
                if not isinstance(todo, worker_state.Wait):
                    return p, todo
                if not self._orders.over:
                    self._shared.changed.wait()

    def _whom(self, p: WorkerState, of: Sequence[str]) -> tuple[Member, Generation]:
        """One of these workers, another one after each that did not know. Raises CopyFailed."""
        if not of:
            raise CopyFailed("nobody is known who could be asked")
        member, record = p.known(of[self._turn % len(of)]), p.newest_pending or p.record
        assert member is not None and record is not None
        return member, record

    def _follow(self, p: WorkerState, of: Sequence[str]) -> CopyConnection:
        """The lasting connection to the donor, or a new one to a worker that may be it. Raises CopyFailed."""
        return self._asker.following or self._asker.follow(*self._whom(p, of))

    def _copy_state(self, p: WorkerState, of: Sequence[str], carrier: Carrier) -> bool:
        """Copy the state, in the donor's window or from a held copy. False: not now or here. Raises CopyFailed."""
        copy = self._fetch_state(p, of, carrier, follow=self._script.at.bound)
        if copy is None:
            return False
        carrier.load(copy.header, copy.blobs)
        self._copied_here = True
        arrived = CopyArrived(copy.op.step, bool(copy.early), self._waited_for)
        if isinstance(self._script.post(arrived), GoAstray):
            try:
                self._say_complete(-1, 0)
            except CopyFailed:  # the donor does not keep the results either
                self._number = -1
                raise
            self._script.post(WentAstray())
            return True
        p = self._shared.post(worker_state.Copied(self._number, self._op.step))
        promised = not self._follows and p.copied == self._number
        self._say_complete(self._number if promised else -1, _base(p))
        self._counted_in = p.record if promised else None
        return True

    def _fetch_state(
        self, p: WorkerState, of: Sequence[str], carrier: Carrier | None = None, *, follow: bool
    ) -> Copy | None:
        """The state of an operation that is in progress or, if its results follow, was. The caller has to answer it
        with `_say_complete`. carrier: the state has to fit into this. follow: the donor is to keep the results from
        there on. None: not now, or not from this worker. Raises CopyFailed, and ConfigError before any of the state has
        come."""
        connection = self._follow(p, of)
        connection.send({"want": "state", "follow": follow})
        answer, _ = connection.receive(within_s=ANSWER_S)
        if "op" not in answer:
            self._asker.unfollow()
            return None
        number, copy = parse_state(answer)
        self._script.post(CopyOffered(copy.op.epoch))
        if carrier is not None:
            carrier.check(copy.header)
        self._follows, self._waited_for = answer.get("follows") is True, answer.get("waits") is True
        blobs = self._gathered(number, copy.header).run(connection, self._helpers(p, of))
        self._gathering = None
        self._number, self._op, self._behind = number, copy.op, 0
        self._script.stop = copy.stop
        self._journal.write("state_copied", generation=p.entered, op=number, held=self._follows)
        return replace(copy, blobs=blobs)

    def _say_complete(self, number: int, base: int) -> None:
        """Tell the donor that the copy is complete. number -1: do not count as a holder. Raises CopyFailed."""
        assert self._asker.following is not None
        self._asker.following.send({"complete": number, "base": base})

    def _gathered(self, number: int, header: dict[str, Json]) -> MultiSourceCopy:
        """The parts of this state that are here already, if any. Raises CopyFailed."""
        if self._gathering is not None and self._gathering.is_of(number, header):
            self._journal.write("copy_goes_on", op=number, bytes=self._gathering.gathered)
            return self._gathering
        self._gathering = None  # frees its memory before another one is made
        self._gathering = MultiSourceCopy(number, header)
        return self._gathering

    def _helpers(self, p: WorkerState, of: Sequence[str]) -> list[Open]:
        """One member of each host but the donor's; a second one of a host would gain nothing."""
        donor, record = p.known(self._asker.donor), p.newest_pending or p.record
        assert record is not None
        hosts = {donor.host if donor else ""}
        helpers: list[Open] = []
        for member in filter(None, map(p.known, of)):
            if member.host not in hosts:
                hosts.add(member.host)
                helpers.append(partial(self._asker.help, member, record))
        return helpers

    def _go_on(self, p: WorkerState, of: Sequence[str], fingerprint: dict[str, str]) -> tuple[bool, Partial | None]:
        """Get the result of the operation whose state is held here; if it is not over, count as a holder of its state.

        Returns what _ask_outcome does. Raises CopyFailed, and what disagreeing members raise.
        """
        if not self._results:
            connection = self._follow(p, of)
            self._send_next(connection, _base(p), join=True)
            self._counted_in = p.record
            answer, blobs = connection.receive(within_s=ANSWER_S)
            if answer.get("now") == self._number:
                return True, None
            self._counted_in = None
            if "refused" in answer:
                self._journal.write("copy_outdated", generation=p.entered, op=self._number, because=answer["refused"])
                self._orders.too_slow()
                self._number = -1
                return True, None
            if "results" not in answer:
                self._asker.unfollow()
                return False, None
            self._receive_results(answer, blobs, join=True)
        p = self._shared.post(worker_state.Copied(-1))
        if p.copied != -1 or p.phase is not Phase.FRESH:
            return False, None  # a report has promised this state, or it is the job's: keep it
        return True, self._take(self._op, None if self._copied_here else fingerprint)

    def _send_next(self, connection: CopyConnection, base: int, *, join: bool) -> None:
        connection.send({"want": "next", "op": self._number, "join": join, "base": base})

    def _fetch_results(self, p: WorkerState) -> bool:
        """Whether there are results now. Raises CopyFailed and JoinMissed."""
        connection = self._follow(p, p.acquaintances)
        self._send_next(connection, 0, join=False)
        answer, blobs = connection.receive(within_s=ANSWER_S)
        if "refused" in answer:
            raise JoinMissed(f"the results that this newcomer was taking over ended: {answer['refused']}")
        if "results" in answer:
            self._receive_results(answer, blobs, join=False)
        elif not answer.get("donor"):
            self._leave_donor()
        return bool(self._results)

    def _receive_results(self, answer: dict[str, Json], blobs: Sequence[torch.Tensor], *, join: bool) -> None:
        """join: of an operation in which this newcomer could have become a member. Raises CopyFailed."""
        self._results.extend(parse_results(self._number, answer, blobs))
        newest = answer.get("newest", self._number)  # a donor of an earlier version does not say it
        if type(newest) is not int:
            raise CopyFailed("malformed answer with results")
        before, self._behind = self._behind, newest - self._number
        # Where it could not become a member, the least that it can be behind is 1. A step that waits for a worker which
        # is bound to another step would wait for ever.
        if 0 < before <= self._behind and (join or self._behind > 1) and not self._astray:
            self._journal.write("newcomer_no_nearer", op=self._number, behind=self._behind)
            self._orders.too_slow()

    def _take(self, here: Op, fingerprint: dict[str, str] | None) -> Partial:
        """The next result, for the script, which is at this operation with this fingerprint, if it is known.

        Raises what disagreeing members raise: this worker came to another place than the members, or drifted apart.
        """
        entry, me = self._results.popleft(), self._asker.worker_id
        if self._astray:
            if entry.op != here:
                raise JoinMissed(
                    f"what this newcomer drew for another step led it to {here}, the members to {entry.op}"
                )
            fingerprint = None
        if entry.op != here:
            raise checks.disagreement({MEMBERS: entry.op, me: here}, MEMBERS)
        if fingerprint not in (None, entry.fingerprint):
            raise checks.disagree({MEMBERS: entry.fingerprint, me: fingerprint}, here)
        self._script.post(ResultTaken())
        self._number, self._counted_in = entry.number + 1, None
        return entry.result

    def _caught_up(self) -> None:
        self._script.post(Admitted())
        self._results.clear()
        self._asker.unfollow()

    def _ask_outcome(self, p: WorkerState, op: int, of: Sequence[str]) -> tuple[bool, Partial | None]:
        """What became of the operation whose state is held here: (whether a worker knew, the result if a generation
        with this worker took effect after it). Raises CopyFailed.

        A copy is given up only on a definite answer: if that generation is in effect, its ring waits for this worker.
        So the result that a member sends counts, and not what was pending when the question was asked.
        """
        with closing(self._asker.connect(*self._whom(p, of))) as connection:
            connection.send({"want": "outcome", "op": op, "base": _base(p)})
            answer, blobs = connection.receive(within_s=ANSWER_S)
        if "outcome" not in answer:
            return False, None
        if type(number := answer["outcome"]) is not int:
            raise CopyFailed("malformed answer about an outcome")
        if "result" not in answer:
            self._counted_in = None
            return True, None
        result = parse_result(answer, blobs)
        with self._shared.changed:
            if self._shared.post(worker_state.Joined(number, op)).entered != number:
                return False, None  # the generation has not reached this worker yet, or a loss came first
            self._shared.keep(result)
        self._caught_up()
        self._journal.write("joined", generation=number, op=op)
        return True, result


def _base(p: WorkerState) -> int:
    """The last loss generation that this worker knows of. A donor that counts it as a holder must know of the same one,
    or one of the two would rely on a promise that the loss has voided."""
    return p.record.base if p.record is not None else 0
