"""How a newcomer becomes a member: learn where the loop stands, rehearse, copy the state, take over one result."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from typing import cast

from elastic import position
from elastic.errors import JoinMissed
from elastic.journal import Journal
from elastic.position import AskOutcome, CopyState, Phase, Position
from runtime.copy import CopyConnection, CopyFailed
from runtime.newcomer import Asker, parse_op, parse_result
from runtime.orders import Orders
from runtime.partial import Json, Partial
from runtime.session import JoinMeta, Op
from runtime.standing import Standing
from runtime.state import Carrier

RETRY_S = 0.05
"""Pause before a question that nobody could answer is asked again."""

ANSWER_S = 20.0
"""A member that answers nothing at all for so long is not asked any further; it answers "later" much earlier."""


class Admission:
    """Used by the user's thread of a newcomer."""

    def __init__(self, standing: Standing, orders: Orders, asker: Asker, journal: Journal) -> None:
        self._standing = standing
        self._orders = orders
        self._asker = asker
        self._journal = journal
        self._epoch = 0
        self._copied: Op | None = None
        self._turn = 0
        """Whom to ask: it goes on when one could not say."""

    @property
    def doing(self) -> str:
        """Changes with every byte: a newcomer that gets on is left alone, however slow it is."""
        return f"joining, {self._asker.received:,} bytes received"

    def await_invitation(self) -> None:
        """Session.await_invitation."""
        with self._standing.changed:
            self._standing.changed.wait_for(lambda: self._orders.invited or self._orders.over)
        self._orders.leave_if_over()

    def meta(self) -> JoinMeta:
        """Where the members' loop stands; asks until one can say."""
        while True:
            self._orders.leave_if_over()
            meta = self._asker.meta(self._orders.newest)
            if meta is not None:
                self._epoch = meta.epoch
                return meta
            self._pause()

    def join(self, carrier: Carrier) -> tuple[Op, Partial | None]:
        """Session.join."""
        while True:
            step = self._next()
            if step is None:
                assert self._copied is not None
                return self._copied, None
            p, todo = step
            try:
                match todo:
                    case CopyState(of):
                        answered = self._copy_state(p, of, carrier)
                    case AskOutcome(op, of):
                        answered, result = self._ask_outcome(p, op, of)
                        if result is not None:
                            assert self._copied is not None
                            return self._copied, result
            except CopyFailed as failed:
                self._journal.write("copy_failed", generation=p.entered, because=str(failed))
                answered = False
            if not answered:
                self._turn += 1
                self._pause()

    def _pause(self) -> None:
        with self._standing.changed:
            self._standing.changed.wait(RETRY_S)

    def _next(self) -> tuple[Position, CopyState | AskOutcome] | None:
        """What position.seek asks for; None if the copy held has become the state, all members lost."""
        while True:
            self._orders.leave_if_over()
            with self._standing.changed:
                p = self._standing.position
                if p.phase is not Phase.FRESH:
                    return None
                todo = position.seek(p)
                if not isinstance(todo, position.Wait):
                    return p, todo
                if not self._orders.over:
                    self._standing.changed.wait()

    def _call(self, p: Position, of: Sequence[str]) -> AbstractContextManager[CopyConnection]:
        """Another one of those each time that the one before did not know. Raises CopyFailed."""
        if not of:
            raise CopyFailed("nobody is known who could be asked")
        member, record = p.known(of[self._turn % len(of)]), p.newest_pending or p.record
        assert member is not None and record is not None
        return closing(self._asker.connect(member, record))

    def _copy_state(self, p: Position, of: Sequence[str], carrier: Carrier) -> bool:
        """Copy inside the donor's window. False: not now, or not from this one. Raises CopyFailed."""
        with self._call(p, of) as connection:
            connection.send({"want": "state"})
            answer, blobs = connection.receive(within_s=ANSWER_S)
            if "op" not in answer:
                return False
            number, op = cast(int, answer["op"]), parse_op(answer["about"])
            if op.epoch != self._epoch:
                raise JoinMissed(f"epoch {self._epoch} ended before this newcomer had copied the state")
            if self._standing.post(position.Copied(-1)).copied != -1:
                return False  # a report has promised the copy that this one would overwrite
            carrier.load(cast(dict[str, Json], answer["state"]), blobs)
            self._copied = op
            if self._standing.post(position.Copied(number)).copied != number:
                return False
            self._journal.write("state_copied", generation=p.entered, op=number)
            connection.send({"complete": number})
            return True

    def _ask_outcome(self, p: Position, op: int, of: Sequence[str]) -> tuple[bool, Partial | None]:
        """What became of the operation whose state is held here: whether somebody knew, and, if a generation with
        this worker took effect after it, its result. Raises CopyFailed.

        A copy is given up only on a definite answer: if that generation is in effect, its ring waits for this worker.
        So it counts that a member sends the result, and not what was pending when the question was asked.
        """
        with self._call(p, of) as connection:
            connection.send({"want": "outcome", "op": op})
            answer, blobs = connection.receive(within_s=ANSWER_S)
        if "outcome" not in answer:
            return False, None
        number = cast(int, answer["outcome"])
        if "result" not in answer:
            self._standing.post(position.Copied(-1))
            return True, None
        result = parse_result(answer, blobs)
        with self._standing.changed:
            if self._standing.post(position.Joined(number, op)).entered != number:
                return False, None  # its plan is still on its way to this worker, or a loss came first
            self._standing.keep(result)
        self._journal.write("joined", generation=number, op=op)
        return True, result
