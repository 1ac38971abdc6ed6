"""A worker whose script runs in rounds: it is a member of the job, and goes from one exchange with the others to the
next. Each exchange says what the worker's script does, and all decide alike what follows (rounds.py)."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn, cast

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch documents it, and its stubs lack it

from elastic.agent.worker import held_signals
from elastic.agent.worker.environment import WorkerEnvironment
from runtime.job.training import empty_leaf
from runtime.reduction.flat_pool import CPU
from runtime.reduction.partial_sum import Json, Partial
from runtime.restart.rounds import (
    AllDone,
    Blame,
    Failure,
    GoOn,
    ScriptReport,
    ScriptState,
    StartScript,
    decide,
    environment,
)
from runtime.restart.script_host import ScriptHost
from runtime.script_end import RAISED_AT
from runtime.session import JoinMeta, Op, OpKind
from runtime.state.training_state import Carrier, Values
from runtime.worker.worker_session import WorkerSession, connect

EXCHANGE_S = 0.2
"""Seconds between two exchanges while the scripts run."""
PLANNED_GRACE_S = 30.0
"""Seconds that a script has to save its state when workers join or leave as planned, as under torchrun."""


class ScriptFailed(Exception):
    """The script of this worker has failed, and no other one before it."""


def run(script: Callable[[], None]) -> NoReturn:
    """Run rounds until the job is over. script: one run of the user's program, in a process of its own."""
    told = WorkerEnvironment.from_environ(os.environ)
    held_signals.hold()
    host = ScriptHost(script, told.timing.evict_s)
    threading.Thread(target=_say_alive, args=(host, told.timing.beat_s), name="alive", daemon=True).start()
    Supervisor(connect(told.threads, CPU), host, told).run()
    sys.exit(0)


def _say_alive(host: ScriptHost, every_s: float) -> None:
    while True:
        host.heard()
        time.sleep(every_s)


class Supervisor:
    """Used by the worker's main thread only."""

    def __init__(self, session: WorkerSession, host: ScriptHost, told: WorkerEnvironment) -> None:
        self._session = session
        self._host = host
        self._told = told
        self._error_file = told.job_dir / "errors" / f"{told.worker_id}.json"
        self._step = 0
        """The number of the exchange."""
        self._round = 0
        """The generation whose round this is; 0: none yet."""
        self._state = ScriptState.WAITING
        self._store: TCPStore | None = None
        """Of the round in progress, where this worker has rank 0."""
        self._failure: Failure | None = None
        self._failing = False

    def run(self) -> None:
        """To the end of the job. Raises SystemExit if the script of this worker failed first."""
        signal.signal(signal.SIGTERM, self._stopped)
        self._session.before_leaving(self._end_script)
        self._session.before_exit(self._hurry_script)
        self._enter()
        while not self._exchange():
            pass
        self._operate(Op(OpKind.LEAVE, 1, 0, self._step))
        self._session.close("")

    def _enter(self) -> None:
        session, carrier = self._session, Carrier(Values())
        if session.joining:
            session.await_invitation()
            self._step = session.meta().step
        carrier.freeze()
        session.attach(carrier)
        if not session.joining:
            self._operate(Op(OpKind.SYNC, 1))

    def _exchange(self) -> bool:
        """One exchange, and what follows from it. Returns whether the job is done."""
        session = self._session
        session.publish(JoinMeta(0, self._step, 0, {}, {}))
        op = Op(OpKind.PASS, 1, 0, self._step)
        result: Partial | None = None
        if session.joining or session.behind:
            op, result = session.join(op, {})
        if result is None:
            self._operate(op, meanwhile=self._watch)
        self._step = op.step
        self._follow_generation()
        report = ScriptReport(self._round, self._state, self._address(), self._failure)
        said = self._operate(Op(OpKind.ALLREDUCE, 1, 0, self._step, label="round"), own=report.to_json()).note
        self._step += 1
        reports = {worker: ScriptReport.from_json(one) for worker, one in cast(dict[str, dict[str, Any]], said).items()}
        place = session.place()
        if place.generation != self._round:
            return False
        match decide(reports, place.members, self._round, failing=self._failing):
            case StartScript(store):
                self._start(place.members, store)
            case Blame(worker, failure):
                if worker == session.worker_id:
                    self._fail(failure)
            case AllDone():
                return True
            case GoOn(failing):
                self._failing = failing
        return False

    def _operate(self, op: Op, own: Json = None, meanwhile: Callable[[], None] = lambda: None) -> Partial:
        """An operation of the job. meanwhile: what is done while newcomers may copy what they need to take part."""
        session = self._session
        session.begin(op, {}, own=own)
        meanwhile()
        while True:
            while (unit := session.next_unit()) is not None:
                session.unit_done(empty_leaf(unit))
            if (result := session.finish()) is not None:
                return result

    def _follow_generation(self) -> None:
        """End the script of the round before if the generation has changed, and open a store if this worker has rank 0
        now."""
        place = self._session.place()
        if place.generation == self._round:
            return
        self._end_script()
        self._round, self._state, self._failure, self._failing = place.generation, ScriptState.WAITING, None, False
        self._store = None
        if place.rank == 0:
            listening = socket.create_server((self._told.address, 0))
            port = listening.getsockname()[1]
            self._store = TCPStore(
                self._told.address,
                port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )

    def _address(self) -> tuple[str, int] | None:
        return None if self._store is None else (self._told.address, self._store.port)

    def _start(self, members: tuple[str, ...], store: tuple[str, int]) -> None:
        self._error_file.parent.mkdir(exist_ok=True)
        self._error_file.unlink(missing_ok=True)
        me = self._session.worker_id
        settings = environment(me, members, store, self._told.job, self._round - 1, self._error_file)
        self._session.note("script_started", rank=int(settings["RANK"]), world=len(members))
        self._state = ScriptState.RUNNING
        self._host.start(settings)

    def _watch(self) -> None:
        """Wait until the script has ended, or the next exchange is due; not at all if the script is to be started."""
        if self._state is not ScriptState.RUNNING:
            time.sleep(EXCHANGE_S if self._state is not ScriptState.WAITING else 0.0)
            return
        status = self._host.ended(EXCHANGE_S)
        if status is None:
            return
        self._session.note("script_ended", status=status)
        self._state = ScriptState.FAILED if status else ScriptState.DONE
        if status:
            self._failure = Failure.read(status, time.time(), self._error_file)

    def _end_script(self) -> None:
        """End the script if it runs. It has time to save its state, unless a worker was lost: then it may wait for that
        worker for ever."""
        if self._state is not ScriptState.RUNNING:
            return
        grace_s = self._told.timing.stop_grace_s
        going = self._session.going
        if going is not None:
            grace_s = max(grace_s, min(PLANNED_GRACE_S, going.until_s - time.monotonic() - grace_s))
        elif self._session.planned:
            grace_s = PLANNED_GRACE_S
        self._host.stop(grace_s)
        self._state = ScriptState.WAITING

    def _fail(self, failure: Failure) -> NoReturn:
        if failure.status < 0:
            self._session.note("script_killed", signal=-failure.status)
            signal.signal(-failure.status, signal.SIG_DFL) if -failure.status != signal.SIGKILL else None
            os.kill(os.getpid(), -failure.status)
        error = ScriptFailed(failure.said)
        error.__dict__[RAISED_AT] = failure.place or f"exit status {failure.status}"
        self._session.failed(error, 0, None)
        sys.exit(max(1, failure.status))

    def _hurry_script(self) -> None:
        """End the script before the agent ends this worker."""
        if self._state is ScriptState.RUNNING:
            self._host.stop(0.8 * self._told.timing.stop_grace_s)
            self._state = ScriptState.WAITING

    def _stopped(self, number: int, frame: FrameType | None) -> NoReturn:
        """The agent asks this worker to stop."""
        self._hurry_script()
        sys.exit(128 + number)
