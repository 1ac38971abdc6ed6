"""The node daemon: `python -m elastic.agent --job-dir DIR --node NAME --slots N`.

    rendezvous  <-- words up, orders down -->  agent  <-- unix socket -->  workers
                     (attendance.py)                  (switchboard.py)

It starts workers and replaces them (supervision.py decides), watches their exits and their beats (detector.py
decides), forwards words and orders unchanged, and keeps the ledger of applied steps. It decides nothing about
membership, and it never stops workers because no leader answers. Everything runs on one asyncio thread, the main
one, with which the workers die; no torch is imported here.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import elastic
from elastic import assignment, handover, heirloom, supervision
from elastic.accounts import Accounts
from elastic.assignment import GRACE_S
from elastic.attendance import Attendance, Ended
from elastic.config import JobSpec, RingKind
from elastic.crew import Crew, Employed, own_settings
from elastic.departure import OPERATOR, Departure
from elastic.detector import Detector, Health
from elastic.errors import ElasticError, ExitCode
from elastic.handover import Handed, Place, Trial
from elastic.heirloom import Heirloom
from elastic.joblock import JobLock
from elastic.journal import Journal, journal_path
from elastic.ledger import Ledger
from elastic.messages import (
    Announce,
    Close,
    Failed,
    Fence,
    Finished,
    Invite,
    Kill,
    Order,
    Progress,
    Publish,
    Quiesce,
    Release,
    RingUp,
    SlotGivenUp,
    Word,
    WorkerDead,
    WorkerFrozen,
)
from elastic.mpirun import Mpirun
from elastic.reach import Reach
from elastic.resume import read_settings
from elastic.slots import SlotFile
from elastic.spot.source import Source
from elastic.standing import Standing
from elastic.starter import Starter
from elastic.stdout import Stdout
from elastic.supervision import Slot
from elastic.switchboard import Switchboard

HAND_OVER_S = 5.0
"""For the workers to end their streams. One that is frozen does not."""

SPAWN_PAUSE_S = 0.2
"""A successor starts when the survivors have had this machine's time for their recovery."""


class Agent:
    """One node's workers. Everything below runs on the event loop; nothing between two awaits can interleave.

    slots: how many workers this node brings. Its spares are started besides, and nothing here tells them from the
    rest: the leader gives places to whoever is there, and who gets none is a spare.
    grace_s: from SIGTERM until this process may be killed: time for leaving in order. None: GRACE_S where others go on,
    and where they do not, SIGTERM stops the workers at once.
    handed: by the program before this one in the same process, with its workers. Raises what heirloom.read does.
    """

    def __init__(
        self,
        spec: JobSpec,
        job_dir: Path,
        node: str,
        slots: int,
        grace_s: float | None,
        journal: Journal,
        ledger: Ledger,
        reach: Reach,
        handed: Handed | None = None,
    ) -> None:
        self._grace_s = grace_s
        self._reach = reach
        self._spec = spec
        self._job_dir = job_dir
        self._node = node
        self._journal = journal
        self._accounts = Accounts(ledger, job_dir, journal, self.say)
        self._checkpoints = read_settings(job_dir)
        self._slot_file = SlotFile(job_dir / f"{node}.slots.json")
        self._slots_refused = False
        self._handed = handed
        self._heirloom = heirloom.read(handed.state) if handed is not None else self._begin(slots + spec.spares)
        old = self._heirloom
        self._slots = list(old.slots)
        self._standing = old.standing
        self._place = Place(job_dir, node)
        self._hands_over = False
        self._deferred: list[int] = []
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._frozen = set(old.frozen)
        self._detector = Detector(spec.timing, time.monotonic())
        self._stdout = Stdout()
        starter = Starter(spec, job_dir / "logs", node, journal, first=handed is None)
        self._crew = Crew(starter, job_dir / "logs", journal, self)
        self._mpirun = Mpirun(job_dir / "logs" / "mpirun.log", journal, self._on_rank_lost)
        self._attendance = Attendance(spec, job_dir, node, slots, journal, self, reach, old.term)
        self._switchboard = Switchboard(spec.name, job_dir, node, journal, self, old.orders, old.socket)
        self._departure = Departure(journal, self)
        self._end: Ended | None = None
        self._late_failure = False
        self._stop_status: int | None = None
        self._stops_when_empty = False
        self._all_over = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def _begin(self, slots: int) -> Heirloom:
        """Of an agent that finds nothing but what a killed one may have left. Raises ConfigError."""
        self._slot_file.end_leftovers()
        before, standing = self._slot_file.incarnations, Standing()
        for slot, newest in before.items():
            for incarnation in range(max(0, newest - 63), newest + 1):
                standing.heard(WorkerDead(f"{self._node}.{slot}.{incarnation}", "its agent ended"))
        new = (supervision.new(self._node, n, self._spec, before.get(n, -1) + 1) for n in range(slots))
        return Heirloom(tuple(new), (), {}, standing, frozenset(), 0)

    async def run(self, notices: Sequence[Source]) -> int:
        """Until the job is over and its workers are gone, or a signal came. Returns the exit code."""
        loop = asyncio.get_running_loop()
        for sent in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sent, self._on_signal, sent)
        loop.add_signal_handler(handover.SIGNAL, self._asked_to_hand_over)
        self._crew.take_over(self._heirloom.workers)
        for worker in self._heirloom.workers:
            if worker.announced:
                self._detector.watch(worker.worker_id, time.monotonic())
        await self._switchboard.listen()
        self._departure.watch(notices)
        if self._handed is not None:
            self._journal.write("agent_took_over", version=elastic.__version__, workers=len(self._heirloom.workers))
        handover.begin(self._place, self._journal, self._handed)
        if self._spec.ring is RingKind.MPI:
            await self._mpirun.start([slot.worker_id for slot in self._slots])
        for number in range(len(self._slots)):
            self._arm(number)
        attending = asyncio.create_task(self._attendance.always())
        watching = asyncio.create_task(self._watch())
        over = asyncio.create_task(self._all_over.wait())
        try:
            for task in asyncio.as_completed((attending, watching, over)):
                await task
                if over.done():
                    break
            await self._attendance.part(attending)
            return self._exit_code()
        finally:
            for running in (attending, watching, over):
                running.cancel()
            await asyncio.gather(attending, watching, over, return_exceptions=True)
            self._departure.close()
            self.for_all_slots(supervision.Stop())
            await self._crew.end()  # nothing survives this agent, whatever ended it
            await self._mpirun.close()
            await self._switchboard.close()
            self._place.end()
            if dropped := self._stdout.close(wait_s=1.0):
                print(f"elastic: {dropped} lines of output are in the logs only", file=sys.stderr)

    def _exit_code(self) -> int:
        if self._stop_status is not None:
            return self._stop_status
        if self._end is not None and self._end.exit_code:
            return self._end.exit_code
        return ExitCode.SCRIPT_FAILED if self._late_failure else ExitCode.DONE

    def _on_signal(self, number: signal.Signals) -> None:
        """The first asks the workers to stop, or, of SIGTERM where there is time, to leave in order; another one stops
        and then kills them."""
        if self._hands_over:
            self._deferred.append(number)
            return
        self._journal.write("agent_signalled", signal=signal.Signals(number).name)
        in_order = number == signal.SIGTERM and (self.has_others or self._grace_s is not None)
        if in_order and not self._stops_when_empty and self._stop_status is None:
            self._stops_when_empty = True
            self._departure.asked(self._grace_s or GRACE_S, "it was asked to stop (SIGTERM)", source="SIGTERM")
            return
        if self._stop_status is not None:
            self._crew.kill_all()
            return
        self._stop_status = 128 + number
        self.for_all_slots(supervision.Stop())

    # ------------------------------------------------------------------------------- another program's turn

    def _asked_to_hand_over(self) -> None:
        task = asyncio.get_running_loop().create_task(self._hand_over())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _hand_over(self) -> None:
        """Become another program, if somebody asks for it and nothing is in the way. The workers notice nothing but a
        stream that ends and is opened again; the leader, that this agent attends anew."""
        if self._hands_over:
            return
        request = await handover.prepared(
            self._place,
            self._journal,
            Trial(assignment.TRIAL, sys.argv[1:]),
            lambda: self._state([]),
            lambda: self._in_the_way,
        )
        if request is None or self._hands_over:
            return
        self._hands_over = True
        try:
            await self._switchboard.hand_over(HAND_OVER_S)
            await self._switchboard.close()
            await self._crew.end_starting()
            self._stdout.close(wait_s=1.0)
            state = self._state(self._crew.hand_over())
            handover.go(request, ["elastic.agent", *sys.argv[1:]], state, self._deferred)
        except Exception as error:  # this program has given up its workers: with it they end, and are started again
            print(f"elastic: the agent can neither hand over nor go on: {error!r}", file=sys.stderr, flush=True)
            os._exit(ExitCode.BAD_INPUT)

    @property
    def _in_the_way(self) -> str:
        """Why no other program can take over now, or nothing."""
        if self._end is not None or self._stop_status is not None:
            return "the job ends here"
        if self._stops_when_empty or not self._departure.stays:
            return "the node leaves the job"
        if self._spec.ring is RingKind.MPI:
            return "mpirun holds the ranks of its workers; the job has to end first"
        if any(slot.phase is supervision.Phase.STARTING for slot in self._slots):
            return "a worker is just being started"
        if not self._accounts.settled:
            return "the disk is full, and lines of steps.jsonl are in memory only"
        return ""

    def _state(self, workers: Sequence[Employed]) -> dict[str, Any]:
        orders, term, socket = self._switchboard.kept, self._attendance.term, self._switchboard.path
        return heirloom.write(self._slots, workers, orders, self._standing, self._frozen, term, socket)

    # ------------------------------------------------------------------------------------------- slots

    @property
    def slots(self) -> Sequence[Slot]:
        return self._slots

    @property
    def term(self) -> int:
        return self._attendance.term

    @property
    def has_others(self) -> bool:
        return self._standing.has_others(self._node)

    def order(self, worker_id: str, order: Order) -> None:
        self._switchboard.order(worker_id, order)

    def for_all_slots(self, event: supervision.Event) -> None:
        for number in range(len(self._slots)):
            self._supervise(number, event)

    def supervise_worker(self, worker_id: str, event: supervision.Event) -> None:
        """An event about a worker; dropped if its slot has gone on without it."""
        for number, slot in enumerate(self._slots):
            if slot.worker_id == worker_id and slot.lives:
                self._supervise(number, event)

    def _supervise(self, number: int, event: supervision.Event) -> None:
        self._slots[number], actions = supervision.step(self._slots[number], event, time.monotonic())
        for action in actions:
            match action:
                case supervision.Say(word):
                    self.say(word)
                case supervision.Signal(sent):
                    self._signal(self._slots[number], sent)
                case supervision.Spawn(worker_id, restarted):
                    self._spawn(number, worker_id, restarted)
        self._arm(number)
        self._departure.look()
        if self._stops_when_empty and self._departure.is_done and self._stop_status is None:
            self._stop_status = 128 + signal.SIGTERM
        if (self._end or self._stop_status is not None) and not any(s.lives or _waits(s) for s in self._slots):
            self._all_over.set()

    def _arm(self, number: int) -> None:
        if (timer := self._timers.pop(number, None)) is not None:
            timer.cancel()
        slot = self._slots[number]
        if slot.deadline_s < math.inf and not self._hands_over:
            first = slot.deadline_s == -math.inf
            wait_s = 0.0 if first else max(SPAWN_PAUSE_S, slot.deadline_s - time.monotonic())
            self._timers[number] = asyncio.get_running_loop().call_later(
                wait_s, self._supervise, number, supervision.Due()
            )

    def _spawn(self, number: int, worker_id: str, restarted: bool) -> None:
        settings = {
            **own_settings(self._spec, self._job_dir, worker_id, number, restarted=restarted),
            "ELASTIC_AGENT_SOCKET": self._switchboard.path,
            **self._reach.settings(),
            **self._checkpoints.to_environment(),
            **self._mpirun.settings(worker_id),
        }
        self._crew.start(number, worker_id, settings, restarted=restarted)

    def on_started(self, number: int, worker_id: str, pid: int) -> None:
        self._slot_file.spawned(number, self._slots[number].incarnation, pid)
        self._supervise(number, supervision.Spawned(pid))

    def on_not_started(self, number: int, because: str) -> None:
        self._supervise(number, supervision.SpawnFailed(because))

    def _served(self, worker_id: str) -> None:
        if any(slot.worker_id == worker_id and not slot.served for slot in self._slots):
            self.supervise_worker(worker_id, supervision.Served())

    def _signal(self, slot: Slot, number: signal.Signals) -> None:
        self._journal.write("worker_signalled", worker_id=slot.worker_id, signal=number.name)
        self._crew.signal(slot.worker_id, number)

    def on_line(self, worker_id: str, line: bytes) -> None:
        if worker_id == self._standing.leader:
            self._stdout.put(line)

    def on_dying(self, worker_id: str, status: int) -> None:
        self._say_how_far(worker_id)
        self.supervise_worker(worker_id, supervision.Dying(status))

    def _on_rank_lost(self, worker_id: str) -> None:
        self._crew.signal(worker_id, signal.SIGKILL)

    def _say_how_far(self, worker_id: str) -> None:
        """Its last beat may be old, and nobody else may be left to say how far the job had come."""
        self.say(Progress(worker_id, 0, 0, self._accounts.next_step, "gone"))

    def on_exit(self, number: int, worker_id: str, status: int, last_words: Callable[[], str]) -> None:
        because = supervision.describe(status)
        if self._mpirun.left(worker_id):
            status = -signal.SIGKILL  # its own words are those of the MPI library, about what somebody else did
        self._switchboard.forget(worker_id)
        self._detector.forget(worker_id)
        self._frozen.discard(worker_id)
        self._accounts.keep_left_behind(worker_id)
        self._say_how_far(worker_id)
        if self._end is not None and not self._end.exit_code and 0 < status != ExitCode.FENCED:
            self._late_failure = True
            print(f"elastic: {worker_id} {because} after the job was complete", file=sys.stderr)
        self._supervise(number, supervision.Exited(status, last_words() if status else ""))

    # ----------------------------------------------------------------------------------- the workers speak

    def employs(self, worker_id: str) -> bool:
        return worker_id in self._crew

    def on_word(self, worker_id: str, word: Word) -> None:
        match word:
            case Announce():
                self._detector.watch(worker_id, time.monotonic())
                self.supervise_worker(worker_id, supervision.Joined())
                self._crew.announced(worker_id, word.pid)
            case RingUp() | Progress() if word.generation:
                self._served(worker_id)
            case Failed():
                self.supervise_worker(worker_id, supervision.Raised(word.place, word.message, word.exit_code))
            case Finished():
                self.supervise_worker(worker_id, supervision.MayLeave())
        self._detector.beat(worker_id, time.monotonic())
        self.say(word)
        if isinstance(word, Announce):
            self._departure.announced(worker_id)

    def on_record(self, worker_id: str, line: str) -> None:
        self._accounts.keep(worker_id, line)

    def on_goodbye(self, worker_id: str) -> None:
        self._detector.forget(worker_id)

    # ------------------------------------------------------------------------------------ the leader speaks

    def say(self, word: Word) -> None:
        """To this leader now, and to every later one as far as it stays true."""
        self._standing.heard(word)
        if isinstance(word, SlotGivenUp):
            self._journal.write("slot_given_up", slot=word.slot, because=word.because)
        self._attendance.say(word)

    def standing_words(self) -> tuple[Word, ...]:
        for wish in self._departure.wishes():
            self._standing.heard(wish)
        return self._standing.words()

    def on_drain(self, left_s: float, because: str) -> None:
        self._departure.asked(left_s, because)

    def on_drain_over(self) -> None:
        self._departure.heard(OPERATOR, None)

    def on_order(self, to: list[str], order: Order) -> None:
        if isinstance(order, Publish):
            self._standing.published(order.generation)
        for worker_id in to:
            match order:
                case Kill():
                    self.supervise_worker(worker_id, supervision.KillOrdered())
                    continue
                case Release():
                    self.supervise_worker(worker_id, supervision.Released())
                case Invite():
                    self._standing.invited(worker_id)
                case Close():
                    self.supervise_worker(worker_id, supervision.JobOver(complete=order.exit_code == 0))
            if isinstance(order, Fence) and worker_id not in self._frozen:
                self._crew.show_stacks(worker_id)
            if isinstance(order, Fence | Release | Close):
                because = getattr(order, "because", "released")
                self._journal.write("ordered", worker_id=worker_id, order=type(order).__name__, because=because)
            self._switchboard.order(worker_id, order)

    def on_orphaned(self, term: int) -> None:
        """Workers keep their state; the next leader hears that the ring is aborted, and rebuilds it."""
        self._switchboard.order_all(Quiesce(term, 0, self._standing.newest))

    def on_end(self, ended: Ended) -> None:
        self._end = ended
        self.for_all_slots(supervision.JobOver(complete=ended.exit_code == 0))
        # One that was cut off, or expelled, has not heard of it, and would wait in its ring for ever.
        self._switchboard.order_all(Close(self.term, ended.because, ended.exit_code))

    def _settle_slots(self) -> None:
        """Said once: an agent that replaces this one could give a worker's id again."""
        self._slot_file.settle()
        refused = self._slot_file.refused
        if refused is not None and not self._slots_refused:
            self._journal.write("slots_not_written", because=str(refused))
        self._slots_refused = refused is not None

    # ----------------------------------------------------------------------------------------- liveness

    async def _watch(self) -> None:
        """Look at silent workers, and send a beat upstream, every beat_s."""
        while True:
            await asyncio.sleep(self._spec.timing.beat_s)
            self._attendance.beat()
            self._accounts.settle()
            self._settle_slots()
            now_s = time.monotonic()
            for worker_id in self._detector.suspects(now_s):
                if (seen := self._crew.facts(worker_id)) is not None:
                    self._detector.look(worker_id, seen)
            for worker_id, verdict in self._detector.judge(now_s).items():
                if verdict.health is Health.FROZEN and worker_id not in self._frozen:
                    self._frozen.add(worker_id)
                    self._journal.write("worker_frozen", worker_id=worker_id, because=verdict.because)
                    self._crew.show_stacks(worker_id)
                    self.supervise_worker(worker_id, supervision.FoundFrozen())
                    self.say(WorkerFrozen(worker_id, verdict.because))
                elif verdict.health is Health.ALIVE and worker_id in self._frozen:
                    self._frozen.discard(worker_id)
                    self._journal.write("worker_thawed", worker_id=worker_id)
                    self.supervise_worker(worker_id, supervision.FoundAlive())
                    self._standing.thawed(worker_id)


def _waits(slot: Slot) -> bool:
    """Whether a worker of this slot may still start."""
    return slot.phase in (supervision.Phase.WAITING, supervision.Phase.STARTING)


def main(argv: list[str] | None = None) -> int:
    try:
        given = assignment.of_words(argv)
        handed = Handed.read(given.handed) if given.handed is not None else None
        spec, job_dir, who = given.spec, given.job_dir, f"agent-{given.node}"
        with (
            JobLock(job_dir / "lock"),
            Ledger(job_dir / "steps.jsonl", whole=not given.reach.replicas) as ledger,
            Journal(journal_path(job_dir, who), spec.name, who, given.node) as journal,
        ):

            async def attend() -> int:
                agent = Agent(
                    spec,
                    job_dir,
                    given.node,
                    given.slots,
                    given.grace_s,
                    journal,
                    ledger,
                    given.reach,
                    handed,
                )
                return await agent.run(given.notices)

            return asyncio.run(attend())
    except ElasticError as error:
        print(f"elastic: {error}", file=sys.stderr)
        return ExitCode.BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
