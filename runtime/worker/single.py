"""A job of one: the session of a script that was started without an agent.

It computes all units of an operation itself and folds them along the canonical tree, so its results have the bits of
every larger world. It has no ledger and no other workers, hence the short bodies at the end.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from elastic.checkpoints.naming import EntryName
from elastic.config import Compression, OuterOption, Reduction
from elastic.protocol.outer_round import Quorum
from elastic.protocol.reduction_tree import next_fold
from runtime.allreduce.reduction.flat_pool import CPU
from runtime.allreduce.reduction.partial_sum import Json, Partial, fold
from runtime.allreduce.reduction.schedule import Cut
from runtime.recovery.state.training_state import Carrier
from runtime.recovery.state.verification import Verification
from runtime.session import HomeRank, JoinMeta, LoopPlace, Op, OpKind, ScriptLoop, StepRecord


class SingleSession:
    """Session (see runtime/session.py) of a world of one. Holds at most log2(units) + 1 partial sums at a time."""

    worker_id = "alone.0.0"
    rank = 0
    world_size = 1
    alone = True
    reduction = Reduction.EXACT
    compression = Compression.NONE
    outer: OuterOption | None = None
    local_rank = 0
    home = HomeRank(0, 0, 1)
    generation = 1
    restarted = False
    because = "a job of one"
    began = ""
    pauses = False
    parting = False
    round_over = False
    due = False
    state_given = False
    may_part = True
    going = None
    verification = Verification()

    def __init__(self, device: torch.device = CPU) -> None:
        """device: the device on which it trains."""
        self.sums_on = device
        self.script = ScriptLoop()
        self._op: Op | None = None
        self._own: Json = None
        self._todo: list[int] = []
        self._held: dict[tuple[int, int], Partial] = {}
        self._place = LoopPlace(self.generation, 0, (self.worker_id,), secrets.token_hex(8))

    def owned(self, units: int) -> tuple[int, ...]:
        return tuple(range(units))

    def place(self) -> LoopPlace:
        return self._place

    def note(self, event: str, **fields: object) -> None:
        """Print events of failures at once; a job of one keeps no journal."""
        if event.endswith("failed"):
            print(f"elastic: {event}: {fields.get('because', '')}", file=sys.stderr, flush=True)

    def point(self, series: str, name: EntryName, answer: Callable[[bool], None]) -> None:
        """Answer at once: no other worker can have a newer checkpoint."""
        answer(True)

    def unreadable(self, entry: EntryName, because: str, *, memory: bool, instead: EntryName | None) -> None:
        """Do nothing: a job of one goes on from nothing."""

    def before_leaving(self, call: Callable[[], None]) -> None:
        """Do nothing: a job of one is never drained."""

    def attach(self, carrier: Carrier) -> None:
        """Do nothing: no worker copies the state of a job of one."""

    def publish(self, meta: JoinMeta | None) -> None:
        """Do nothing: no worker joins a job of one."""

    def _no_newcomer(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("a job of one has no newcomer")

    await_invitation = meta = join = copy_anew = registered_by_members = hold_to_join = _no_newcomer

    def begin(
        self,
        op: Op,
        fingerprint: dict[str, str],
        groups: dict[str, int] | None = None,
        own: Json = None,
        cuts: Sequence[Cut] = (),
    ) -> None:
        if self._op is not None:
            raise RuntimeError(f"{op} began inside {self._op}")
        self._op, self._own = op, own
        self._todo = list(range(op.units))
        self._held = {}

    def send_early(self) -> None:
        """Nothing: a job of one sends nothing."""

    def next_unit(self) -> int | None:
        return self._todo.pop(0) if self._todo else None

    @property
    def units_left(self) -> int:
        return len(self._todo)

    def leave_if_over(self) -> None:
        """Do nothing: nobody ends its part in the job."""

    def advanced(self) -> None:
        """Nobody judges how long it takes."""

    def seek(self, quorum: Quorum) -> None:
        """Do nothing: a job of one waits for nobody."""

    def replica_done(self) -> None:
        """Do nothing: nobody waits for it."""

    def vouch(self, shard: int, digest: str) -> None:
        """Do nothing: there is nobody to compare with."""

    def draws(self, shard: int, samples: Callable[[], str]) -> None:
        """Do nothing: no other worker would compute the unit again."""

    def unit_done(self, leaf: Partial) -> None:
        if self._op is None:
            raise RuntimeError("a unit was delivered outside an operation")
        self._held[leaf.node] = leaf
        while (pair := next_fold(self._held, self._op.units)) is not None:
            left, right, above = pair
            self._held[above] = fold(self._held.pop(left), self._held.pop(right))

    def finish(self) -> Partial | None:
        if self._op is None or self._todo:
            return None
        result = self._held.pop((0, self._op.units))
        result.settle()
        if self._op.kind is OpKind.ALLREDUCE:
            result.note = {self.worker_id: self._own}
        self._op = None
        return result

    def waits(self, what: str) -> None:
        """Do nothing: there are no others."""

    def takes_time(self, what: str) -> None:
        """Do nothing: no leader watches a job of one."""

    def loop_over(self) -> None:
        """Do nothing: no leader watches a job of one."""

    def used(self) -> None:
        """Do nothing: no other worker wants the result."""

    def applied(self, record: StepRecord) -> None:
        """Do nothing: a job of one keeps no ledger."""

    def history(self, first: int, end: int) -> list[StepRecord]:
        """Nothing: a job of one keeps no ledger."""
        return []

    def failed(self, error: BaseException, step: int, shard: int | None) -> None:
        """Do nothing: the traceback is on stderr, and no replacement will come."""

    def close(self, digest: str) -> None:
        """Do nothing: nothing was opened."""
