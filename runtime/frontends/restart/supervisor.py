"""A worker whose script runs in rounds: it is a member of the job, and goes from one exchange with the others to the
next. Each exchange says what the worker's script does, and all decide alike what follows (rounds.py)."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn, cast

from torch._C._distributed_c10d import TCPStore

from elastic.agent.worker import held_signals
from elastic.agent.worker.environment import WorkerEnvironment
from elastic.agent.worker.node_notice import NOTICE_FILE, NoticeFile
from elastic.checkpoints.settings import Settings
from elastic.errors import CheckpointCorrupt, NoMemory
from elastic.protocol.loop_state import (
    AwaitInvitation,
    HandedOut,
    Join,
    JoinOver,
    LoopBegun,
    LoopEntered,
    LoopKind,
    PassBegun,
    Reduced,
    RehearsalOver,
    StartTogether,
    StepLeft,
    StepsBegun,
)
from runtime.allreduce.reduction.flat_pool import CPU
from runtime.allreduce.reduction.partial_sum import Json, Partial
from runtime.allreduce.ring.process_group import store_on
from runtime.allreduce.ring.tls import TlsContexts
from runtime.frontends.restart import rounds
from runtime.frontends.restart.kept_sources import ROOM_BYTES, KeptSources
from runtime.frontends.restart.places import RankPlace, environment, places, share
from runtime.frontends.restart.script_failure import Failure
from runtime.frontends.restart.script_host import HostLost, ScriptHosts
from runtime.frontends.restart.script_timers import ENABLED, TIMER_FILE
from runtime.frontends.restart.script_watch import where
from runtime.frontends.restart.scripts import ScriptEnded, Scripts, too_much
from runtime.frontends.restart.step_records import StepRecords
from runtime.loop.training import empty_leaf
from runtime.recovery.kept.agreed_end import POLL_S, EndOfRound
from runtime.recovery.kept.choice import (
    RoundNumber,
    ThinPart,
    lost_parts,
)
from runtime.recovery.kept.look import KeptHere
from runtime.recovery.kept.place import directory_of
from runtime.recovery.kept.remote import KeptServer, pull
from runtime.recovery.kept.step_log import StepLogs
from runtime.recovery.state.available_memory import available_bytes
from runtime.recovery.state.training_state import Carrier, Values
from runtime.recovery.transfer.connection import CopyFailed
from runtime.script_end import RAISED_AT
from runtime.session import JoinMeta, Op, OpKind
from runtime.worker.worker_session import WorkerSession, connect

EXCHANGE_S, DUE_EXCHANGE_S = 0.2, 0.03
"""Seconds between two exchanges while the scripts run; and while a generation is pending, in which workers come or go.
"""
PLANNED_GRACE_S = 30.0
"""Seconds that a script has to save its state when workers join or leave as planned, as under torchrun."""
LAST_STEPS, LAST_STEP_MIN_S = 6, 2.0
"""How many steps that may take until the last one of the round is kept, by how long one took before, and seconds that
it may take at least."""


class ScriptFailed(Exception):
    """The script of this worker has failed, and no other one before it."""


class ScriptsHang(Exception):
    """No script of the round gets anywhere. One worker fails for all, so that the next round begins."""


def run(script: Callable[[], None]) -> NoReturn:
    """Run rounds until the job is over. script: one run of the user's program, in a process of its own."""
    told = WorkerEnvironment.from_environ(os.environ)
    held_signals.hold()
    hosts = ScriptHosts(script, told.timing.evict_s)
    threading.Thread(target=_say_alive, args=(hosts, told.timing.beat_s), name="alive", daemon=True).start()
    try:
        Supervisor(connect(told.threads, CPU), hosts, told).run()
    except HostLost:  # killed from outside, as by the kernel for want of memory
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(0)


def _say_alive(hosts: ScriptHosts, every_s: float) -> None:
    while True:
        hosts.heard()
        time.sleep(every_s)


class Supervisor:
    """Used by the worker's main thread only."""

    def __init__(self, session: WorkerSession, hosts: ScriptHosts, told: WorkerEnvironment) -> None:
        self._session = session
        self._scripts = Scripts(hosts, told.timing.stopped_s)
        self._told = told
        self._error_file = told.job_dir / "errors" / f"{told.worker_id}.json"
        self._error_file.parent.mkdir(exist_ok=True)
        self._notice_file = NoticeFile(self._error_file.with_suffix(".notice"))
        self._step = 0
        """The number of the exchange."""
        self._at = rounds.RoundState()
        self._running: list[RankPlace] = []
        """Of this worker's scripts in the newest round that they have begun."""
        self._kept_s, self._step_s = 0.0, 0.0
        """When a newer step was kept, and how long one takes."""
        self._rank_bytes = 0
        """The most memory that a process of the script of its own has had here in an earlier round; 0 without
        --ranks."""
        self._lacking_since_s = math.inf
        """Since when scripts do not start, as a node has no member whose memory is needed, or a memory is full."""
        self._awaited = set[str]()
        """The events of the waits of this round."""
        self._store: TCPStore | None = None
        """The store of the round in progress, if this worker has rank 0 in it."""
        self._settings = Settings.from_environment(os.environ)
        self._kept = KeptHere(self._settings.memory, session)
        self._sources = KeptSources(session, told, self._settings.memory)
        self._at.memory = bool(self._settings.memory)
        self._logs, self._records = StepLogs(self._settings.memory), StepRecords(session.record)
        self._digest = ""
        """Of the last step, when the job is done."""

    def run(self) -> None:
        """To the end of the job. Raises SystemExit if the script of this worker failed first."""
        signal.signal(signal.SIGTERM, self._stopped)
        self._session.answer_others(KeptServer(self._settings.memory).answer)
        self._session.before_leaving(lambda: self._end_script(planned=True))
        self._session.before_exit(self._hurry_script)
        self._session.on_order(self._scripts.wake)
        self._enter()
        while not self._exchange():
            pass
        self._operate(Op(OpKind.LEAVE, 1, 0, self._step))
        self._session.close(self._digest)

    def _enter(self) -> None:
        session, carrier, script = self._session, Carrier(Values()), self._session.script
        begins = script.post(LoopBegun(LoopKind.BARE))
        if isinstance(begins, AwaitInvitation):
            session.await_invitation()
            self._step = session.meta().step
        carrier.freeze()
        session.attach(carrier)
        if isinstance(begins, StartTogether):
            self._operate(Op(OpKind.SYNC, 1))
        script.post(LoopEntered(step=self._step))
        script.post(StepsBegun())

    def _exchange(self) -> bool:
        """One exchange, and what follows from it. Returns whether the job is done."""
        session, script = self._session, self._session.script
        script.post(HandedOut(self._step, 0))
        session.publish(JoinMeta(0, self._step, 0, {}, {}))
        op = Op(OpKind.PASS, 1, 0, self._step)
        result: Partial | None = None
        script.post(PassBegun(self._step, 0))
        if isinstance(script.post(RehearsalOver()), Join):
            op, result = session.join(op, {})
            script.post(JoinOver(op.step, 0, result is not None))
        if result is None:
            self._operate(op, meanwhile=self._watch)
        self._step = op.step
        script.post(Reduced())
        self._follow_generation()
        lacking_s = max(0.0, time.monotonic() - self._lacking_since_s)
        kept = self._look_at_round()
        report = self._at.report(self._address(), self._scripts.idle_s, lacking_s, self._records.recorded)
        session.script_does(report.said(self._told.timing.hang_s, kept, self._ranks()))
        said = self._operate(Op(OpKind.ALLREDUCE, 1, 0, self._step, label="round"), own=report.to_json()).note
        self._step += 1
        script.post(StepLeft())
        reports = {
            worker: rounds.ScriptReport.from_json(one) for worker, one in cast(dict[str, dict[str, Any]], said).items()
        }
        place = session.place()
        self._at.logged, self._at.tells = (), False
        self._records.hear(reports.values())
        if (step := rounds.safe_step(reports, place.members, place.generation)) > 0:
            self._records.keep(self._round, step)
        if rounds.is_settled(reports, place.members, place.generation, self._at.begun):
            self._kept.settle(self._round)
        self._at.learn(reports, place.members, self._round)
        self._kept.remember(self._at.known)
        match self._at.decide(reports, place.members, place.generation, self._told.timing.hang_s):
            case rounds.LookAtKept():
                mine = share(session.worker_id, place.members)
                self._at.tells = rounds.tells_new_ones(session.worker_id, reports, place.members)
                told = self._records.unrecorded() if self._at.tells else ()
                self._at.known = self._at.known or self._kept.remembered()
                self._at.off = max(self._at.off, self._kept.void())
                self._at.memory = self._sources.has_room(place.members)
                self._at.held, self._at.logged = self._kept.check(*mine), (*told, *self._logs.left(*mine))
            case rounds.AwaitNodes(lacking):
                self._await(place.rank, "kept_awaited", step=lacking.step, nodes=list(lacking.nodes))
            case rounds.AwaitRoom(workers):
                because = f"less than {ROOM_BYTES >> 20} MB is free in the memory of {', '.join(workers)}"
                self._await(place.rank, "kept_room_awaited", because=because)
                self._at.memory = self._sources.has_room(place.members)
            case rounds.CopyThin(parts):
                self._copy_thin(parts)
            case rounds.StartScript() as start:
                self._records.begin(self._round, start.source)
                self._kept.settle(self._at.off)
                self._say_source(place.rank, start)
                self._start(place.members, start)
            case rounds.Blame(worker, failure):
                if worker == session.worker_id:
                    self._fail(failure)
                self._end_script(planned=False)
            case rounds.Hang() as hang:
                self._leave_hang(hang)
            case rounds.HashKept() as last:
                self._hash_kept(place.members, last)
            case rounds.AllDone(digest):
                self._digest = digest
                if min(report.kept for report in reports.values()) >= 0:
                    self._records.keep(self._round, self._records.newest(self._round))
                return True
            case rounds.GoOn():
                pass
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
        if place.generation == self._at.generation:
            return
        # With two generations between two exchanges, a loss may have come before what was planned.
        self._end_script(planned=self._session.planned_since(self._at.generation))
        self._at.enter(place.generation, place.world)
        self._store = None
        if place.rank == 0:
            self._store = store_on(self._told.address)

    def _address(self) -> tuple[str, int] | None:
        return None if self._store is None else (self._told.address, self._store.port)

    @property
    def _round(self) -> RoundNumber:
        return RoundNumber(self._settings.interruptions, self._at.generation)

    def _look_at_round(self) -> str:
        """What is kept of the round in progress."""
        me, members = self._session.worker_id, self._session.place().members
        if self._at.script is rounds.ScriptState.WAITING or me not in members:
            return ""
        mine = places(members, self._told.ranks)[me]
        said = [self._kept.follow(self._round, place.rank, place.node) for place in mine]
        if self._kept.is_off(self._round):
            self._at.off = self._round
        # Behind that look: whoever says that a step is kept says what was logged in it, too.
        self._at.logged = tuple(one for place in mine for one in self._logs.news(self._round, place.rank))
        kept, least = min(said, default=(-1, ""))
        # Another process of the machine, as a replica, may have kept what a process of this worker is still to do.
        kept = min([kept, *(self._logs.newest(self._round, place.rank) for place in mine)])
        if kept > self._at.kept:
            now_s, before = time.monotonic(), max(self._at.kept, self._at.begun)
            self._step_s, self._kept_s = (now_s - self._kept_s) / max(1, kept - before), now_s
        self._at.keeps(kept)
        if self._at.script is rounds.ScriptState.DONE:
            last = [self._kept.last(self._round, kept, place.rank, place.node) for place in mine]
            self._at.held = tuple(one for found in last for one in found) if kept > 0 else ()
        return least

    def _ranks(self) -> list[int]:
        """Those of the script that this worker has, with --ranks."""
        me, members = self._session.worker_id, self._session.place().members
        mine = places(members, self._told.ranks)[me] if self._told.ranks and me in members else []
        return [place.rank for place in mine]

    def _copy_thin(self, parts: tuple[ThinPart, ...]) -> None:
        """Copy what too few machines have, if this worker is to."""
        seal = TlsContexts(self._told.certs)
        for part in parts:
            if self._session.worker_id in part.to:
                try:
                    pull(self._session.dial(), part.at, seal, part.held, self._settings.memory)
                    self._at.held = (*(self._at.held or ()), part.held)
                except (CopyFailed, CheckpointCorrupt, OSError, NoMemory, RuntimeError, MemoryError) as error:
                    self._session.note("kept_not_copied", source=part.at, step=part.held.step, because=str(error))
        self._at.copied = True

    def _await(self, rank: int, event: str, **fields: object) -> None:
        """Until the next exchange. A worker of another node begins another round when it joins."""
        if event not in self._awaited:  # each kind of wait has its own time, and begins once
            self._awaited.add(event)
            self._lacking_since_s = time.monotonic()
            if rank == 0:
                self._session.note(event, **fields)
        self._scripts.wait(EXCHANGE_S)

    def _say_source(self, rank: int, start: rounds.StartScript) -> None:
        if rank == 0 and start.source is not None:
            self._session.note("kept_found", step=start.source.step, kept_in=str(start.source.round))
        if rank == 0 and start.thin:
            self._session.note("kept_thin", step=start.thin[0].held.step, parts=len(start.thin))
        if rank == 0 and start.incomplete:
            because = lost_parts(one for held in start.held.values() for one in held)
            self._session.note("kept_incomplete", because=because)

    def _hash_kept(self, members: tuple[str, ...], last: rounds.HashKept) -> None:
        """Digest this worker's share of the last step, if that is the last one that the script has done."""
        self._at.hashed = True
        if last.source is not None and last.source.step == self._records.newest(self._round):
            self._at.digests = self._sources.digests(members, last.source, last.held)

    def _start(self, members: tuple[str, ...], start: rounds.StartScript) -> None:
        self._at.starts(start, self._round)
        self._kept.remember(self._at.known)
        self._lacking_since_s, self._awaited = math.inf, set()
        self._notice_file.keep(self._session.going)
        mine = places(members, self._told.ranks)[self._session.worker_id]
        if because := too_much(len(mine), self._rank_bytes, available_bytes()):
            self._session.note("ranks_memory", ranks=len(mine), because=because)
        try:
            settings = [self._environment(place, members, start) for place in mine]
            pids = self._scripts.start(self._at.generation, settings)
        except OSError as error:
            self._give_up(ScriptFailed(str(error)), "its start")
        self._at.script, self._running, self._kept_s = rounds.ScriptState.RUNNING, mine, time.monotonic()
        for place, pid in zip(mine, pids, strict=True):
            self._session.note("script_started", rank=place.rank, world=place.world, script=pid)
        if not mine:
            self._at.ended(None)

    def _environment(self, place: RankPlace, members: tuple[str, ...], start: rounds.StartScript) -> dict[str, str]:
        """Of one process of the script. Raises OSError."""
        error_file = self._error_file.with_suffix(f".{place.rank}.json")
        settings = environment(place, start.store, self._told.job, self._at.generation - 1, error_file)
        settings[NOTICE_FILE] = str(self._notice_file.path)
        if os.environ.get(ENABLED) == "1":
            settings[TIMER_FILE] = str(error_file.with_suffix(".timer"))
        return settings | self._sources.environment(place.rank, members, start, self._round)

    def _watch(self) -> None:
        """Wait until a script has ended, the leader orders something, or it is time for the next exchange; not at all
        if scripts are to be started, or if the round is over."""
        self._notice_file.keep(self._session.going)
        at_once = self._at.script is rounds.ScriptState.WAITING or self._at.hashed or self._at.over
        self._scripts_end(0.0 if at_once else DUE_EXCHANGE_S if self._session.due else EXCHANGE_S)

    def _scripts_end(self, within_s: float) -> bool:
        """Whether a script ends within that time."""
        found = self._scripts.wait(within_s)
        for ended in found:
            if ended.stopped:
                self._session.note("script_stopped", because="stopped by a signal (state T)")
            self._note_end(ended)
            self._at.ended(ended.failure, last=not self._scripts.running)
        return bool(found)

    def _note_end(self, ended: ScriptEnded) -> None:
        if ended.status is not None:
            self._session.note("script_ended", status=ended.status, script=ended.pid)

    def _end_script(self, *, planned: bool) -> None:
        """End the script if it runs. It has time to save its state, unless a worker was lost or is about to end: then
        it may wait for that worker for ever. planned: neither is so."""
        if not self._scripts.running:
            return
        if self._told.ranks:  # the kernel walks through all of its pages
            self._rank_bytes = max(self._rank_bytes, self._scripts.memory())
        grace_s = self._told.timing.stop_grace_s
        going = self._session.going
        self._notice_file.keep(going)  # a handler of the signal may ask for it
        if going is not None:
            grace_s = max(grace_s, min(PLANNED_GRACE_S, going.until_s - time.monotonic() - grace_s))
        elif planned:
            grace_s = PLANNED_GRACE_S
        # Others wait for this worker meanwhile, and give it up after the hang limit.
        grace_s = min(grace_s, max(self._told.timing.stop_grace_s, self._told.timing.hang_s / 2))
        until_s = time.monotonic() + grace_s
        if planned and self._have_kept():
            self._await_last_step(min(grace_s / 2, max(LAST_STEP_MIN_S, LAST_STEPS * self._step_s)))
        self._stop_script(max(self._told.timing.stop_grace_s, until_s - time.monotonic()))

    def _have_kept(self) -> bool:
        """Whether each of this worker's scripts has kept a step of the round: asked now, as the last look at the round
        may have come before its first step."""
        newest = [self._kept.follow(self._round, place.rank, place.node)[0] for place in self._running]
        return min(newest, default=-1) >= 0

    def _await_last_step(self, within_s: float) -> None:
        """Until the scripts of all workers have kept a last step of the round, on which they agree."""
        until_s = time.monotonic() + within_s
        directory = directory_of(self._settings.memory, self._round)
        try:
            end = EndOfRound(directory, [place.rank for place in self._running])
            end.ask()
            while (last := end.reached()) is None and time.monotonic() < until_s and not self._scripts_end(POLL_S):
                pass
            end.let_go()
            if last is not None:
                self._session.note("kept_agreed", step=last)
        except OSError as error:  # what was kept is gone, and the script will say so
            print(f"elastic: the scripts do not end behind one step: {error}", file=sys.stderr, flush=True)

    def _stop_script(self, grace_s: float) -> None:
        for ended in self._scripts.stop(grace_s):
            self._note_end(ended)
        self._at.script = rounds.ScriptState.WAITING

    def _leave_hang(self, hang: rounds.Hang) -> None:
        """Show where this worker's script is. One worker fails for all; the others end their scripts with the round."""
        if self._at.script is rounds.ScriptState.RUNNING:
            said = f"elastic: {hang.said}; round {self._at.generation} ends, and the script of this worker is here:"
            print(said, file=sys.stderr, flush=True)
            for pid in self._scripts.running:
                print("\n".join(where(pid)), file=sys.stderr, flush=True)  # behind what the script itself writes
        if hang.worker == self._session.worker_id:
            self._session.note("scripts_hang", because=hang.said)
            # The place has the round: the same place twice would prove a mistake of the script.
            self._give_up(
                ScriptsHang(f"{hang.said}; the ends of their logs show where they are"), f"round {self._at.generation}"
            )

    def _fail(self, failure: Failure) -> NoReturn:
        if failure.is_from_outside:
            self._session.note("script_killed", signal=-failure.status)
            signal.signal(-failure.status, signal.SIG_DFL) if -failure.status != signal.SIGKILL else None
            os.kill(os.getpid(), -failure.status)
        self._give_up(ScriptFailed(failure.said), failure.place or f"exit status {failure.status}", failure.status)

    def _give_up(self, error: Exception, place: str, status: int = 1) -> NoReturn:
        error.__dict__[RAISED_AT] = place
        self._session.failed(error, None, None)
        sys.exit(max(1, status))

    def _hurry_script(self) -> None:
        """End the script before the agent ends this worker."""
        if self._scripts.running:
            self._stop_script(0.8 * self._told.timing.stop_grace_s)

    def _stopped(self, number: int, frame: FrameType | None) -> NoReturn:
        """The agent asks this worker to stop."""
        self._hurry_script()
        sys.exit(128 + number)
