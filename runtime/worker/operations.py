"""A member's way through its operations: it does what worker_state.next_move says, until there is a result."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn

from elastic.agent.worker.client import AgentClient
from elastic.agent.worker.environment import WorkerEnvironment
from elastic.config import Compression, OuterOption, Reduction
from elastic.errors import ConfigError, DeviceHung, RingBroken, StateLost
from elastic.protocol import worker_state
from elastic.protocol.messages import Corrupted
from elastic.protocol.outer_round import Quorum
from elastic.records.journal import Journal
from runtime.allreduce.reduction.early_sums import EarlySums
from runtime.allreduce.reduction.partial_sum import Json, Partial
from runtime.allreduce.reduction.schedule import Cut
from runtime.allreduce.ring.handshake import HelloRefused
from runtime.allreduce.ring.ring_set import Rings
from runtime.recovery.state.verification import Suspect, Verification
from runtime.recovery.transfer.client import CopyClient
from runtime.recovery.transfer.connection import CopyFailed
from runtime.session import Op, OpKind, ScriptLoop
from runtime.worker.donor import CopyServer
from runtime.worker.exchange import OperationSpec, RingExchange, Verifying, is_again
from runtime.worker.joining import JoinProtocol
from runtime.worker.leader_orders import LeaderOrders
from runtime.worker.progress_report import ProgressReporter
from runtime.worker.speed import ShardPace
from runtime.worker.state_owner import SharedWorkerState

UNHEARD_S = 1.0
"""Seconds for which a source that refuses is asked again: it may not have heard of this generation yet."""
RETRY_S = 0.02
"""Seconds between two such questions."""
MISSED_S = 1.0
"""Seconds between two tries to copy the result of a round that cannot be computed again."""


class OperationLoop:
    """The part of a worker's session that the user's thread calls while it trains. WorkerSession, the subclass, makes
    the parts. Methods with names of Session are described there."""

    alone = False
    script: ScriptLoop
    _told: WorkerEnvironment
    _shared: SharedWorkerState
    _rings: Rings
    _orders: LeaderOrders
    _donor: CopyServer
    _asker: CopyClient
    _admission: JoinProtocol
    _client: AgentClient
    _reporter: ProgressReporter
    _journal: Journal

    def __init__(self) -> None:
        """To be called when the subclass has made the parts."""
        reduction, overlap = self._told.reduction, self._told.overlap
        self._verification = Verification.from_environ(os.environ)
        if self._verification.every and not reduction.stable:
            raise ConfigError(
                f"--verify with --reduction {reduction}: workers may have other bits; say --reduction exact or fixed"
            )
        verifying = Verifying(self._verification, self._checksums, self._suspect)
        parts = (self._shared, self._rings, self._reporter, self._journal, reduction, overlap)
        self._turn = RingExchange(*parts, verifying)
        self._task = OperationSpec(Op(OpKind.SYNC, 0), {}, {}, None)
        self._pace = ShardPace()
        self._fresh_generation = 0
        self._missed = (0, math.inf)
        """In which generation a member has not been able to copy the result of a round, and when it gives way."""
        self._samples: Callable[[], str] = str
        """The samples of the shard that was computed last, in words."""
        self._before_leaving: Callable[[], None] = lambda: None
        self.may_part = True

    def _checksums(self) -> dict[str, str]:
        assert self._donor.carrier is not None
        return self._donor.carrier.checksums()

    def _suspect(self, found: Suspect) -> None:
        self._client.send(Corrupted(self.worker_id, self.generation, found.worker, found.what))

    def _say_progress(self) -> None:
        raise NotImplementedError

    @property
    def worker_id(self) -> str:
        return self._told.worker_id

    @property
    def reduction(self) -> Reduction:
        return self._told.reduction

    @property
    def compression(self) -> Compression:
        return self._told.compression

    @property
    def outer(self) -> OuterOption | None:
        return OuterOption.parse(self._told.outer)

    @property
    def generation(self) -> int:
        return self._shared.position.entered

    def before_leaving(self, call: Callable[[], None]) -> None:
        self._before_leaving = call

    def join(self, here: Op, fingerprint: dict[str, str]) -> tuple[Op, Partial | None]:
        if not self.script.at.behind:
            self._orders.say_ready()
        carrier = self._donor.carrier
        assert carrier is not None
        op, result = self._admission.join(here, fingerprint, carrier)
        self._task = OperationSpec(op, fingerprint, {}, None)
        if not self.script.at.behind:
            if result is not None:
                self._fresh_generation = self.generation
            self._say_progress()
        return op, result

    def begin(
        self,
        op: Op,
        fingerprint: dict[str, str],
        groups: dict[str, int] | None = None,
        own: Json = None,
        cuts: Sequence[Cut] = (),
    ) -> None:
        self._task = OperationSpec(op, fingerprint, groups or {}, own, tuple(cuts))
        if op.joinable:
            self._pace.begin(time.monotonic())
        self._reporter.begin(op)
        self._missed = (0, math.inf)
        if self.script.at.behind:
            return
        self._leave_unless_leaving()
        with self._shared.changed:
            self._shared.post(worker_state.Begin(op.units, op.joinable, self.may_part))
            if op.joinable:
                self._donor.open_window(op, self._pace.step_s + self._grace_s)
            elif op.kind is OpKind.SYNC:
                self._donor.stand_still()

    def _leave_unless_leaving(self) -> None:
        """End the process if its part is over. In a LEAVE operation the order Close completes the operation instead."""
        if not (self._task.op.kind is OpKind.LEAVE and self._orders.complete):
            self._orders.leave_if_over()

    def send_early(self) -> EarlySums | None:
        with self._or_gives_way():
            return self._turn.send_early(self._task)

    def next_unit(self) -> int | None:
        self._leave_unless_leaving()
        self._check_alone()
        with self._shared.changed:
            match worker_state.next_move(self._shared.position):
                case worker_state.Compute(unit):
                    self._shared.post(worker_state.Started(unit))
                    self._reporter.handed_out(self._task.op, unit)
                    return unit
                case _:
                    return None

    @property
    def units_left(self) -> int:
        return len(self._shared.position.todo)

    def advanced(self) -> None:
        self._reporter.advanced()

    def seek(self, quorum: Quorum) -> None:
        self._reporter.seek(quorum)

    def replica_done(self) -> None:
        self._reporter.replica_done()

    @property
    def round_over(self) -> bool:
        position = self._shared.position
        return self._orders.ended_round == (position.entered, position.reduced)

    @property
    def verification(self) -> Verification:
        return self._verification

    def vouch(self, shard: int, digest: str) -> None:
        self._task = replace(self._task, vouched=(*self._task.vouched, digest), verified=shard)

    def draws(self, shard: int, samples: Callable[[], str]) -> None:
        self._samples = samples
        position = self._shared.position
        if is_again(position.record, position.reduced):  # the worker before may have died of them
            self._reporter.draws(self._task.op, shard, samples())

    def unit_done(self, leaf: Partial) -> None:
        self._reporter.computed(counts=leaf.weight > 0)
        if self._task.op.kind is OpKind.SYNC:
            assert self._donor.carrier is not None
            leaf.note = self._donor.carrier.digest()
        self._shared.unit_done(leaf)

    def _check_alone(self) -> None:
        """End the process if it is to compute alone what the others have had from a round with a quorum: that depends
        on who was late, so it would have other weights than they. Its successor copies theirs."""
        if self._reporter.in_round and self._shared.position.laggard == "":
            self._orders.give_way("the others have the result of a round that no worker can compute again")

    def finish(self) -> Partial | None:
        if self.script.at.behind:
            return self._admission.take_over(self._task.op, self._task.fingerprint)
        self._reporter.waits(self._task.op)
        with self._or_gives_way():
            result = self._finish()
        if result is None:
            return None
        self._reporter.after(self._task.op)
        self._donor.window.close()
        if self._shared.position.leaving:
            self._depart()
        if self.generation != self._fresh_generation:
            self._fresh_generation = self.generation
            op = self._shared.position.reduced - 1
            self._journal.write("op_complete", generation=self.generation, op=op)
            self._say_progress()
        if self._task.op.kind is OpKind.SYNC and self._task.op.pass_no == 0:
            self._start_alike(result)
        return result

    @contextmanager
    def _or_gives_way(self) -> Iterator[None]:
        """End the process if its device hangs. No code of the script runs after that: it could wait for the device."""
        try:
            yield
        except DeviceHung as hung:
            self._give_way(hung)

    def _give_way(self, hung: DeviceHung) -> NoReturn:
        """Any thread."""
        self._journal.write("device_hung", generation=self.generation, because=str(hung))
        self._orders.give_way(str(hung))

    def used(self) -> None:
        # A round with a quorum cannot be computed again, so its result is kept in any case.
        if not (self._told.retain_results or self.script.at.behind or self._reporter.in_round):
            with self._shared.changed:
                self._shared.post(worker_state.Used(self._shared.position.reduced - 1))

    def _finish(self) -> Partial | None:
        while True:
            if self._task.op.kind is OpKind.LEAVE and self._orders.complete:
                return Partial(0, self._task.op.units)
            self._orders.leave_if_over()
            self._rings.check()
            self._check_alone()
            with self._shared.changed:
                move = worker_state.next_move(self._shared.position)
            match move:
                case worker_state.Compute():
                    return None
                case worker_state.Exchange(generation):
                    if (result := self._turn.exchange(self._task, generation, self._complete)) is not None:
                        return result
                case worker_state.CopyResult(source, op):
                    if (result := self._fetch(source, op)) is not None:
                        return result
                case worker_state.Deliver():
                    (result,) = self._shared.roots()
                    result.settle()
                    if self._task.op.kind is OpKind.ALLREDUCE:  # the other members' values have gone with the result
                        result.note = {self.worker_id: self._task.own}
                    if self._complete(worker_state.Fetched(self._shared.position.reduced), result):
                        return result
                case worker_state.Linger():
                    self._linger()
                case worker_state.Wait() | worker_state.Released() | worker_state.Stop():
                    self._wait()

    def _depart(self) -> None:
        """Leave as drained: a planned generation without this worker took effect. Stay a holder of the state until
        every member has the last result; a loss meanwhile may take this worker back in."""
        while True:
            self._orders.leave_if_over()
            with self._shared.changed:
                p = self._shared.position
                if not p.leaving and not p.quiesced:
                    return
            self._wait()

    def _wait(self) -> None:
        with self._shared.changed:
            acknowledgements, self._shared.acknowledgements = self._shared.acknowledgements, None
        if acknowledgements is not None:
            self._await_acknowledgements(acknowledgements)
            return
        with self._shared.changed:
            p = self._shared.position
            if (isinstance(worker_state.next_move(p), worker_state.Wait) or p.quiesced) and not self._orders.over:
                self._shared.changed.wait()

    def _await_acknowledgements(self, action: worker_state.AwaitAcknowledgements) -> None:
        ring = self._rings.get(action.generation)
        try:
            if ring is None:
                raise RingBroken("the ring was left")
            ring.await_acknowledgements(action.op, [worker for worker in action.of if worker in ring.members])
        except RingBroken as broken:
            self._shared.post(worker_state.RingLost(action.generation, str(broken)))
        else:
            self._before_leaving()
            self._shared.post(worker_state.Acknowledged())

    def _linger(self) -> None:
        begun_s = time.monotonic()
        deadline = begun_s + self._grace_s
        with self._shared.changed:
            while isinstance(worker_state.next_move(self._shared.position), worker_state.Linger):
                left = deadline - time.monotonic()
                if left <= 0:
                    self._shared.post(worker_state.GraceOver())
                else:
                    self._shared.changed.wait(left)
        self._pace.waited(time.monotonic() - begun_s)

    @property
    def _grace_s(self) -> float:
        """Seconds for which the end of a copy is waited for."""
        return max(self._told.timing.join_grace_s, self._pace.step_s / 4)

    def _complete(self, event: worker_state.Event, result: Partial) -> bool:
        """Post the event that completes the operation; False if a quiesce came first."""
        logged = self._donor.loggable(result)
        with self._shared.changed:
            before = self._shared.position.reduced
            if self._shared.post(event).reduced == before:
                return False
            self._donor.keep(before, self._task.op, self._task.fingerprint, result, logged)
            return True

    def _fetch(self, source: str, op: int) -> Partial | None:
        with self._shared.changed:
            record = self._shared.position.record
            assert record is not None
        member, until_s = record.member(source), time.monotonic() + UNHEARD_S
        while True:
            try:
                if member is None:
                    raise CopyFailed(f"{source} is not in generation {record.number}")
                result = self._asker.result(member, record, op)
                break
            except CopyFailed as failed:
                self._journal.write("copy_failed", generation=record.number, because=str(failed))
                if not (isinstance(failed.__cause__, HelloRefused) and time.monotonic() < until_s):
                    if self._reporter.in_round:
                        self._await_another_source(record.number, str(failed))
                    else:
                        self._shared.post(worker_state.FetchFailed(op))
                    return None
            with self._shared.changed:
                self._shared.changed.wait(RETRY_S)
                if self._shared.position.record is not record:
                    return None
        self._journal.write("result_copied", generation=record.number, op=op, source=source)
        return result if self._complete(worker_state.Fetched(op), result) else None

    def _await_another_source(self, generation: int, because: str) -> None:
        """A result cannot be copied, and not be computed again (see _check_alone): it is tried once more. If the source
        has died, another generation says what follows. If none does within the time in which members report, this
        worker gives way: others have the result, so nothing is lost with it."""
        now_s = time.monotonic()
        if self._missed[0] != generation:
            self._missed = generation, now_s + 2 * self._told.timing.progress_s
        if now_s >= self._missed[1]:
            self._orders.give_way(f"the result of a round cannot be copied: {because}")
        with self._shared.changed:
            self._shared.changed.wait(MISSED_S)

    def _start_alike(self, first: Partial) -> None:
        """Copy rank 0's initial state if this one differs; a second operation keeps all members here meanwhile."""
        carrier = self._donor.carrier
        assert carrier is not None and isinstance(first.note, str)
        if carrier.digest() != first.note:
            with self._shared.changed:
                record = self._shared.position.record
            assert record is not None
            source = self._asker.initial(record, first.note, carrier)
            if source is None:
                raise StateLost(f"the initial state of {self.worker_id} differs, and nobody can send rank 0's any more")
            self._journal.write("initial_state_copied", generation=record.number, source=source)
        op = Op(OpKind.SYNC, 1, pass_no=1)
        self.begin(op, {})
        while True:
            while (unit := self.next_unit()) is not None:
                self._shared.unit_done(Partial(unit, unit + 1))
            if self.finish() is not None:
                return
