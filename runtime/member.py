"""A worker under an agent: the session whose operations survive the death of other members.

The user's thread walks through `position.move`; orders arrive on the client's thread; beats have a thread of their
own. Nothing here decides anything: elastic/position does.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch

from elastic import ledger, lifeline, position, stacks
from elastic.checkpoints.naming import EntryName
from elastic.client import AgentClient
from elastic.config import RingKind, Timing
from elastic.errors import Disagree, ExitCode, JoinMissed, LeaderOnly, LeftAlone, RingBroken, StateLost
from elastic.journal import Journal
from elastic.messages import (
    Announce,
    CheckpointComplete,
    Failed,
    Finished,
    Generation,
    Ready,
    Word,
)
from elastic.plan import default_units_of
from elastic.position import Phase
from elastic.ranks import Ranks
from elastic.tree import leaves
from runtime import guards, mpi, nccl, numerics
from runtime.admission import Admission
from runtime.bulk import exchange_native_over, exchange_over
from runtime.copy import CopyConnection, CopyFailed
from runtime.donor import Donor
from runtime.flats import CPU
from runtime.gauge import Gauge
from runtime.hello import Hello
from runtime.listener import Listener
from runtime.newcomer import Asker, parse_op
from runtime.orders import Orders
from runtime.pace import Pace
from runtime.partial import Json, Partial, total
from runtime.process_group import meeting
from runtime.reduce import exchange, exchange_native
from runtime.rings import Rings
from runtime.session import Going, JoinMeta, Op, OpKind, Place, StepRecord
from runtime.standing import Standing
from runtime.state import Carrier


class Member:
    """Session (see session.py) of a worker that an agent started."""

    local_rank: int
    reduction: str

    def __init__(self, environment: dict[str, str], threads: int, device: torch.device) -> None:
        """Raises ConfigError for a broken environment, and for a ring that it cannot have. Blocks for MPI only."""
        kind = RingKind(environment.get("ELASTIC_RING", "tcp"))
        if kind is RingKind.NCCL:
            nccl.check_device(device)
        self.sums_on = device if kind is RingKind.NCCL else CPU
        self.worker_id = environment["ELASTIC_WORKER_ID"]
        self.job = environment["ELASTIC_JOB"]
        self.local_rank = int(environment["ELASTIC_SLOT"])
        self.reduction = environment.get("ELASTIC_REDUCTION", "exact")
        self._retains = environment.get("ELASTIC_RETAIN_RESULTS", "1") == "1"
        self.restarted = environment.get("ELASTIC_RESTARTED") == "1"
        self._node = environment["ELASTIC_NODE"]
        self._job_dir = Path(environment["ELASTIC_JOB_DIR"])
        self._timing = Timing(**json.loads(environment.get("ELASTIC_TIMING", "{}")))
        self._journal = Journal(
            self._job_dir / "journal" / f"{self.worker_id}.jsonl",
            job=self.job,
            who=self.worker_id,
            node=self._node,
            worker_id=self.worker_id,
        )
        self._listener = Listener(
            environment.get("ELASTIC_HOST", "127.0.0.1"),
            job=self.job,
            me=self.worker_id,
            token_of=self._token_of,
            serve_copy=self._serve_copy,
        )
        host, port = self._listener.address
        meet = meeting(nccl.make_group, host, device) if kind is RingKind.NCCL else None
        if kind is RingKind.MPI:
            meet = mpi.World(Ranks.from_environment(environment), self.worker_id, self._journal).meet
        self._rings = Rings(self._listener, self.job, self.worker_id, self._timing.build_s, meet)
        self._standing = Standing(self.worker_id, self._rings, self._send, self._journal, self.sums_on)
        self._standing.position = replace(self._standing.position, phase=Phase.FRESH)
        self._donor = Donor(self._standing, self._journal)
        self._asker = Asker(self.job, self.worker_id)
        self._orders = Orders(self._standing, self._asker, self._send, self._journal)
        self._admission = Admission(self._standing, self._orders, self._asker, self._journal)
        self._op = Op(OpKind.SYNC, 0)
        self._fingerprint: dict[str, str] = {}
        self._groups: dict[str, int] = {}
        self._own: Json = None
        self._applied = 0
        self._pace = Pace()
        self._gauge = Gauge(on_host=self.sums_on.type == "cpu")
        self._fresh_generation = 0
        self.may_part = True
        self._stopping = threading.Event()
        self._before_leaving: Callable[[], None] = lambda: None
        bits = numerics.fingerprint(threads, device)
        self._announce = Announce(self.worker_id, self._node, self.local_rank, os.getpid(), host, port, bits)
        self._client = AgentClient(environment["ELASTIC_AGENT_SOCKET"], self._orders.deliver, self._on_lost)
        self._orders.close_client = self._client.close

    def enter(self) -> None:
        """Announce this worker and wait until it is a member or knows that it is a newcomer."""
        self._client.send(self._announce)
        threading.Thread(target=self._beat, name="beat", daemon=True).start()
        with self._standing.changed:
            self._standing.changed.wait_for(lambda: self._standing.position.record is not None or self._orders.over)
        self._orders.leave_if_over()

    # ------------------------------------------------------------------------------------------ attributes

    @property
    def _record(self) -> Generation:
        record = self._standing.position.record
        assert record is not None
        return record

    @property
    def joining(self) -> bool:
        return self._standing.position.phase is Phase.FRESH and not self._admission.behind

    @property
    def behind(self) -> bool:
        return self._standing.position.phase is Phase.FRESH and self._admission.behind

    @property
    def rank(self) -> int:
        ids = self._record.ids
        return ids.index(self.worker_id) if self.worker_id in ids else len(ids)

    @property
    def world_size(self) -> int:
        return len(self._record.members)

    @property
    def generation(self) -> int:
        return self._standing.position.entered

    def owned(self, units: int) -> tuple[int, ...] | None:
        record = self._record
        return default_units_of(self.worker_id, record, units) if record.member(self.worker_id) else None

    @property
    def because(self) -> str:
        return self._record.because

    @property
    def pauses(self) -> bool:
        return self._record.hold

    @property
    def parting(self) -> bool:
        with self._standing.changed:
            pending = self._standing.position.newest_pending
        return pending is not None and not pending.ids

    @property
    def going(self) -> Going | None:
        return self._orders.going

    def before_leaving(self, call: Callable[[], None]) -> None:
        self._before_leaving = call

    def place(self) -> Place:
        record = self._standing.position.record
        assert record is not None
        ids = record.ids
        rank = ids.index(self.worker_id) if self.worker_id in ids else len(ids)
        # The token itself is a proof that must not lie in a directory's name.
        digits = hashlib.sha256(f"checkpoint {record.token}".encode()).hexdigest()
        return Place(record.number, rank, ids, digits)

    def note(self, event: str, **fields: object) -> None:
        self._journal.write(event, generation=self.generation, **fields)

    def point(self, series: str, name: EntryName, answer: Callable[[bool], None]) -> None:
        with self._standing.changed:
            for known in [key for key in self._orders.pointed if key[0] == series]:
                del self._orders.pointed[known]  # a leader that was lost has not answered, and will not
            self._orders.pointed[series, str(name)] = answer
        self._client.send(CheckpointComplete(self.worker_id, series, str(name)))

    # --------------------------------------------------------------------------------------------- its agent

    def _send(self, word: Word) -> None:
        self._client.send(word)

    def _on_lost(self, because: str) -> None:
        """The agent is gone; the kernel ends this process with it, unless it was only the stream."""
        self._journal.write("agent_lost", because=because)

    def _beat(self) -> None:
        while not self._stopping.wait(self._timing.beat_s):
            self._say_progress()

    def _say_progress(self) -> None:
        joining = self._admission.doing if self._orders.ready else ""
        self._client.send(self._gauge.progress(self._standing.position, self._applied, joining))

    # -------------------------------------------------------------------------------------------- the state

    def attach(self, carrier: Carrier) -> None:
        self._donor.carrier = carrier

    def publish(self, meta: JoinMeta) -> None:
        with self._standing.changed:
            self._donor.meta = meta

    def _token_of(self, generation: int) -> str | None:
        return self._orders.token_of(generation)

    def _serve_copy(self, sock: socket.socket, hello: Hello) -> None:
        """A thread of the listener: the hello's token proved that the asker was told of that generation."""
        self._donor.serve(CopyConnection(sock), hello.worker_id)

    # --------------------------------------------------------------------------------------------- newcomer

    def await_invitation(self) -> None:
        self._gauge.at("spare")
        self._admission.await_invitation()
        self._gauge.at("newcomer")

    def meta(self) -> JoinMeta:
        return self._admission.meta()

    def join(self, here: Op, fingerprint: dict[str, str]) -> tuple[Op, Partial | None]:
        assert self._donor.carrier is not None
        if not self.behind:
            with self._standing.changed:
                self._orders.ready = True
                self._client.send(Ready(self.worker_id, self._orders.newest.number))
        self._op, result = self._admission.join(here, fingerprint, self._donor.carrier)
        if self.behind:
            return self._op, result
        if result is not None:
            self._fresh_generation = self.generation
        self._say_progress()
        return self._op, result

    # ------------------------------------------------------------------------------------------- operations

    def begin(
        self, op: Op, fingerprint: dict[str, str], groups: dict[str, int] | None = None, own: Json = None
    ) -> None:
        self._op, self._fingerprint, self._groups, self._own = op, fingerprint, groups or {}, own
        joinable = op.kind is OpKind.PASS and op.pass_no == 0
        if joinable:
            self._pace.begin(time.monotonic())
        self._gauge.begin(op)
        if self.behind:
            return
        self._leave_unless_leaving()
        with self._standing.changed:
            self._standing.post(position.Begin(op.units, joinable, self.may_part))
            if joinable:
                self._donor.open_window(op, self._pace.step_s + self._grace_s)

    def _leave_unless_leaving(self) -> None:
        """Close is what a worker in its LEAVE operation waits for; everywhere else it ends the process."""
        if not (self._op.kind is OpKind.LEAVE and self._orders.complete):
            self._orders.leave_if_over()

    def next_unit(self) -> int | None:
        self._leave_unless_leaving()
        with self._standing.changed:
            match position.move(self._standing.position):
                case position.Compute(unit):
                    self._standing.post(position.Started(unit))
                    self._gauge.handed_out(self._op, unit)
                    return unit
                case _:
                    return None

    def unit_done(self, leaf: Partial) -> None:
        self._gauge.computed()
        if self._op.kind is OpKind.SYNC:
            assert self._donor.carrier is not None
            leaf.note = self._donor.carrier.digest()
        self._standing.unit_done(leaf)

    def finish(self) -> Partial | None:
        if self.behind:
            return self._admission.take_over(self._op, self._fingerprint)
        self._gauge.waits(self._op)
        result = self._finish()
        if result is None:
            return None
        self._gauge.after(self._op)
        self._donor.close_window()
        if self._standing.position.leaving:
            self._depart()
        if self.generation != self._fresh_generation:
            self._fresh_generation = self.generation
            self._journal.write("op_complete", generation=self.generation, op=self._standing.position.reduced - 1)
            self._say_progress()
        if self._op.kind is OpKind.SYNC and self._op.pass_no == 0:
            self._start_alike(result)
        return result

    def used(self) -> None:
        if not self._retains and not self.behind:
            with self._standing.changed:
                self._standing.post(position.Used(self._standing.position.reduced - 1))

    def _finish(self) -> Partial | None:
        while True:
            if self._op.kind is OpKind.LEAVE and self._orders.complete:
                return Partial(0, self._op.units)
            self._orders.leave_if_over()
            self._rings.check()
            with self._standing.changed:
                move = position.move(self._standing.position)
            match move:
                case position.Compute():
                    return None
                case position.Exchange(generation):
                    if (result := self._exchange(generation)) is not None:
                        return result
                case position.CopyResult(source, op):
                    if (result := self._fetch(source, op)) is not None:
                        return result
                case position.Deliver():
                    (result,) = self._standing.roots()
                    result.settle()
                    if self._op.kind is OpKind.ALLREDUCE:  # whoever else had a value has gone with the result
                        result.note = {self.worker_id: self._own}
                    with self._standing.changed:
                        if self._complete(position.Fetched(self._standing.position.reduced), result):
                            return result
                case position.Linger(newcomers):
                    self._linger(newcomers)
                case position.Wait() | position.Released() | position.Stop():
                    self._wait()

    def _depart(self) -> None:
        """Drained: a planned generation without this worker took effect. Stay a holder of state until every member
        has the last result; a loss meanwhile may yet take this worker back in."""
        while True:
            self._orders.leave_if_over()
            with self._standing.changed:
                p = self._standing.position
                if not p.leaving and not p.quiesced:
                    return
            self._wait()

    def _wait(self) -> None:
        with self._standing.changed:
            acknowledgements, self._standing.acknowledgements = self._standing.acknowledgements, None
        if acknowledgements is not None:
            self._await_acknowledgements(acknowledgements)
            return
        with self._standing.changed:
            p = self._standing.position
            if (isinstance(position.move(p), position.Wait) or p.quiesced) and not self._orders.over:
                self._standing.changed.wait()

    def _await_acknowledgements(self, action: position.AwaitAcknowledgements) -> None:
        ring = self._rings.get(action.generation)
        try:
            if ring is None:
                raise RingBroken("the ring was left")
            ring.await_acknowledgements(action.op, [worker for worker in action.of if worker in ring.members])
        except RingBroken as broken:
            self._standing.post(position.RingLost(action.generation, str(broken)))
        else:
            self._before_leaving()
            self._standing.post(position.Acknowledged())

    def _linger(self, newcomers: tuple[str, ...]) -> None:
        begun_s = time.monotonic()
        deadline = begun_s + self._grace_s
        with self._standing.changed:
            while isinstance(position.move(self._standing.position), position.Linger):
                left = deadline - time.monotonic()
                if left <= 0:
                    self._standing.post(position.GraceOver())
                else:
                    self._standing.changed.wait(left)
        self._pace.waited(time.monotonic() - begun_s)

    @property
    def _grace_s(self) -> float:
        """How long the end of a copy is waited for."""
        return max(self._timing.join_grace_s, self._pace.step_s / 4)

    def _complete(self, event: position.Event, result: Partial) -> bool:
        """Post what completes the operation; False if a quiesce came first. Called under the lock."""
        before = self._standing.position.reduced
        if self._standing.post(event).reduced == before:
            return False
        self._donor.keep(before, self._op, self._fingerprint, result)
        return True

    def _exchange(self, generation: int) -> Partial | None:
        standing = self._standing
        with standing.changed:
            p = standing.post(position.ReadHeader())
            if not isinstance(position.move(p), position.Exchange) or p.entered != generation:
                return None
            roots, number = standing.roots(), p.reduced
            ring = self._rings.get(generation)
            header: dict[str, Json] = {
                "about": {**asdict(self._op), "kind": str(self._op.kind)},
                "carry": list[Json](p.carry or ()),
                "fingerprint": dict(self._fingerprint),
                "own": self._own,
            }
        if ring is None:
            standing.post(position.RingLost(generation, "the ring is gone"))
            return None
        for root in roots:
            root.settle()
        carried: list[tuple[int, ...]] = []

        def check(headers: dict[str, dict[str, Json]]) -> None:
            self._check_agreement(headers, ring.members[0])
            carried.extend(tuple(cast(list[int], other["carry"])) for other in headers.values())
            standing.post(position.HeadersHeld(generation, number))
            self._gauge.gathered()

        out = standing.result_buffer(self._groups)
        beside = ring.transport if self._groups else None
        try:
            if self.reduction == "allreduce" and self._groups:
                add = exchange_native if beside is None else partial(exchange_native_over, transport=beside)
                _, result = add(
                    ring,
                    op=number,
                    header=header,
                    contribution=total(roots) if roots else None,
                    leaves=leaves([root.node for root in roots]),
                    units=self._op.units,
                    groups=self._groups,
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
                    units=self._op.units,
                    groups=self._groups,
                    check=check,
                    out=out,
                )
                if self._op.kind is OpKind.ALLREDUCE:
                    result.note = {worker: other["own"] for worker, other in headers.items()}
        except RingBroken as broken:
            standing.give_back(out)
            standing.post(position.RingLost(generation, str(broken)))
            return None
        self._gauge.reduced(self._op)
        with standing.changed:
            return result if self._complete(position.Obtained(generation, tuple(carried)), result) else None

    def _check_agreement(self, headers: dict[str, dict[str, Json]], leader: str) -> None:
        """Raises LeftAlone, LeaderOnly or Disagree: workers did different things, or drifted apart."""
        ops = {worker: parse_op(header["about"]) for worker, header in headers.items()}
        if len(set(ops.values())) > 1:
            raise guards.disagreement(ops, leader)
        fingerprints = {w: cast(dict[str, str], header["fingerprint"]) for w, header in headers.items()}
        first = fingerprints[leader]
        if any(fingerprint != first for fingerprint in fingerprints.values()):
            raise guards.disagree(fingerprints, self._op)

    def _fetch(self, source: str, op: int) -> Partial | None:
        with self._standing.changed:
            record = self._record
        member = record.member(source)
        try:
            if member is None:
                raise CopyFailed(f"{source} is not in generation {record.number}")
            result = self._asker.result(member, record, op)
        except CopyFailed as failed:
            self._journal.write("copy_failed", generation=record.number, because=str(failed))
            self._standing.post(position.FetchFailed(op))
            return None
        self._journal.write("result_copied", generation=record.number, op=op, source=source)
        with self._standing.changed:
            return result if self._complete(position.Fetched(op), result) else None

    def _start_alike(self, first: Partial) -> None:
        """Members whose initial state differs from rank 0's copy it; a second operation keeps all here meanwhile."""
        carrier = self._donor.carrier
        assert carrier is not None and isinstance(first.note, str)
        if carrier.digest() != first.note:
            with self._standing.changed:
                record = self._record
            source = self._asker.initial(record, first.note, carrier)
            if source is None:
                raise StateLost(f"the initial state of {self.worker_id} differs, and nobody can send rank 0's any more")
            self._journal.write("initial_state_copied", generation=record.number, source=source)
        op = Op(OpKind.SYNC, 1, pass_no=1)
        self.begin(op, {})
        while True:
            while (unit := self.next_unit()) is not None:
                self._standing.unit_done(Partial(unit, unit + 1))
            if self.finish() is not None:
                return

    # ---------------------------------------------------------------------------------------------- the end

    def applied(self, record: StepRecord) -> None:
        if self.behind:  # the members have told it
            return
        self._applied = record.step + 1
        self._client.record({**asdict(record), "lr": list(record.lr)})

    def history(self, first: int, end: int) -> list[StepRecord]:
        try:
            lines = ledger.between(self._job_dir / "steps.jsonl", first, end)
        except FileNotFoundError:
            return []
        return [
            StepRecord(
                **{
                    **line,
                    "lr": tuple(map(float, line["lr"])),
                    "scalars": {name: float(value) for name, value in line["scalars"].items()},
                }
            )
            for line in lines
        ]

    def failed(self, error: BaseException, step: int, shard: int | None) -> None:
        if isinstance(error, JoinMissed):
            print(f"elastic: {self.worker_id} gives way to a new process: {error}", file=sys.stderr)
            self._orders.exit(ExitCode.FENCED)
        frames = traceback.extract_tb(error.__traceback__)
        own = str(Path(__file__).parent)
        outside = [frame for frame in frames if not frame.filename.startswith(own)] or list(frames)
        where = f"{outside[-1].filename}:{outside[-1].lineno}" if outside else "unknown"
        place = f"{type(error).__name__} {where} step {step}" + (f" shard {shard}" if shard is not None else "")
        code = ExitCode.DISAGREE if isinstance(error, Disagree | LeftAlone | LeaderOnly) else ExitCode.SCRIPT_FAILED
        message = "".join(traceback.format_exception(error))
        self._client.send(Failed(self.worker_id, self.generation, place, message, int(code)))
        self._journal.write("script_failed", generation=self.generation, place=place)
        self._client.close()

    def close(self, digest: str) -> None:
        """Every member is at the end; stay until the leader has said goodbye, so that nobody misses a result."""
        self._client.send(Finished(self.worker_id, self.generation, digest))
        with self._standing.changed:
            self._standing.changed.wait_for(lambda: self._orders.over, self._timing.fence_grace_s)
        self._stopping.set()
        self._journal.write("exit", code=0)
        self._client.close()
        self._listener.close()


def connect(threads: int, device: torch.device) -> Member:
    """The session of this process; the agent has put everything into the environment. Blocks until admitted or known
    to be a newcomer."""
    if path := os.environ.pop(lifeline.VARIABLE, ""):
        lifeline.hold(path)
    stacks.show_when_asked()
    member = Member(dict(os.environ), threads, device)
    member.enter()
    return member
