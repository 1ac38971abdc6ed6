"""What a worker's beats say about its script: where it is and for how long, and how fast it is."""

from __future__ import annotations

import time
from typing import Protocol

from elastic.protocol.messages import Doing, Progress
from elastic.protocol.outer_round import Quorum
from elastic.protocol.worker_state import Phase, WorkerState
from elastic.records.flight_recorder import FlightEvent
from runtime.guards import checks
from runtime.session import Op, OpKind
from runtime.worker.activity import Activity
from runtime.worker.speed import Speed


class FlightNoter(Protocol):
    def __call__(self, event: FlightEvent, text: str = "", unit: int = -1) -> None: ...


class ProgressReporter:
    """Written by the script's thread, read by the beat thread."""

    def __init__(self, *, on_host: bool, note: FlightNoter) -> None:
        """on_host: as in Speed. note: as FlightRecorder.note."""
        self._note = note
        self._activity = Activity()
        self._speed = Speed(on_host=on_host)
        self._shards = 0
        self._quorum: Quorum | None = None
        """Of the rounds of this job; None: there has been none, or none with a quorum."""
        self.in_round, self._replicas = False, 0
        """in_round: whether the operation in progress is a round of replicas with a quorum."""
        self._loop_over = False
        self.script = ""
        """What the script does that this worker runs beside itself; "": the worker is the script."""
        self.at("starting")

    def at(self, what: str) -> None:
        """The script begins a declared task, outside operations."""
        self._note(FlightEvent.DECLARED, what)
        self._activity.enter(what, Doing.DECLARED)

    def begin(self, op: Op) -> None:
        self._note(FlightEvent.BEGUN, checks.describe(op))
        self.in_round, self._replicas = False, 0
        if op.kind is OpKind.PASS:
            self._shards, self._loop_over = op.units, False
            if op.pass_no == 0:
                self._speed.begin_step()

    def handed_out(self, op: Op, unit: int) -> None:
        in_pass = op.kind is OpKind.PASS
        if in_pass:
            self._speed.handed_out(time.monotonic())
        where = f"{'shard' if in_pass else 'part'} {unit} in {checks.describe(op)}"
        self._note(FlightEvent.COMPUTES, where, unit)
        evaluates = op.kind is OpKind.EVALUATE and not self._loop_over
        other = Doing.EVALUATION if evaluates else Doing.DECLARED
        self._activity.enter(where, Doing.SHARD if in_pass else other)

    def seek(self, quorum: Quorum) -> None:
        """The operation that has begun is a round of replicas with this quorum."""
        self._quorum, self.in_round = quorum, True

    def replica_done(self) -> None:
        """A replica has made all inner steps of this round."""
        self._replicas += 1

    def draws(self, op: Op, unit: int, samples: str) -> None:
        """The shard that is to be computed has these samples."""
        self._note(FlightEvent.COMPUTES, f"shard {unit} in {checks.describe(op)}: {samples}", unit)

    def advanced(self) -> None:
        """The unit that was handed out has come on by a part, which counts like a unit of its own."""
        self._activity.again()

    def computed(self, *, counts: bool) -> None:
        """The unit that was handed out is computed. counts: whether as a shard, by which speeds are compared; the
        script may have skipped it, or compute outside of passes."""
        self._note(FlightEvent.COMPUTED)
        if counts:
            self._speed.done(time.monotonic())

    def waits(self, op: Op) -> None:
        """This worker's part is done. At the end of the script the others may take any time."""
        self._note(FlightEvent.WAITS, checks.describe(op))
        waits = Doing.DECLARED if op.kind is OpKind.LEAVE else Doing.WAITING
        self._activity.enter(f"{checks.describe(op)}, waiting for the others", waits)

    def waits_for(self, what: str) -> None:
        """This worker waits for the others, outside of operations."""
        self._activity.enter(f"{what}, waiting for the others", Doing.WAITING)

    def sends_rest(self) -> None:
        """This worker's part is done, and what of it was not sent early is on its way now."""
        self._speed.rest_left(time.monotonic())

    def gathered(self) -> None:
        """All members have come to the end of the operation."""
        self._note(FlightEvent.GATHERED)
        self._speed.gathered(time.monotonic())

    def broken(self, because: str) -> None:
        """The ring was left before the operation was complete."""
        self._note(FlightEvent.BROKEN, because)
        self._speed.broken()

    def reduced(self, op: Op) -> None:
        self._note(FlightEvent.REDUCED)
        if op.kind is OpKind.PASS:
            self._speed.reduced(time.monotonic())

    def after(self, op: Op) -> None:
        self._note(FlightEvent.DONE, checks.describe(op))
        doing = Doing.DECLARED if self._loop_over else Doing.ELSEWHERE
        self._activity.enter(f"after {checks.describe(op)}", doing)

    def loop_over(self) -> None:
        """The loop is over; what a script does after it may take any time, up to the first pass of another loop."""
        self._loop_over = True
        self.at("after its loop")

    def progress(self, p: WorkerState, applied: int, joining: str, over: tuple[str, str]) -> Progress:
        """The word for a beat. joining: how far a newcomer's copy is; "": it has not begun. over: what carries the
        gradients, and why this is not what was asked for."""
        seen = self._activity.see()
        fresh, quorum = p.phase is Phase.FRESH, self._quorum if self.in_round else None
        return Progress(
            p.me,
            p.entered,
            p.reduced,
            applied,
            phase=(fresh and joining) or self.script or seen.what,
            shards=self._shards,
            # Whoever is faster does not get more replicas, and nobody is late for others: speeds are not compared.
            shard_us=self._speed.shard_us if self._quorum is None else 0,
            exchange_us=self._speed.exchange_us,
            doing=Doing.DECLARED if fresh else seen.doing,
            for_ms=int(1000 * seen.for_s),
            usual_ms=int(1000 * seen.usual_s),
            computes=seen.computes,
            over=over[0],
            over_because=over[1],
            min_replicas=quorum.min_replicas if quorum else 0,
            grace_ms=round(1000 * quorum.grace_s) if quorum else 0,
            replicas=self._replicas,
        )
