"""A node's workers: their slots, processes, words and beats.

slots      worker_slot.py decides about each; this module brings it events and deadlines
processes  worker_processes.py, and mpirun.py if the ring is MPI's
words      worker_socket.py: up to the leader, orders down
beats      failure_detector.py decides which worker is alive
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Protocol

from elastic.agent.context import AgentContext
from elastic.agent.leader_session import LeaderSession
from elastic.agent.ledger_writer import LedgerWriter
from elastic.agent.process.launcher import Launcher
from elastic.agent.process.mpirun import Mpirun
from elastic.agent.process.process_start import ForkServerProcess
from elastic.agent.process.stdout_pump import Stdout
from elastic.agent.process.worker_processes import WorkerProcesses
from elastic.agent.slot_file import SlotFile
from elastic.agent.standing_words import StandingWords
from elastic.agent.worker.environment import WorkerEnvironment
from elastic.agent.worker.nccl_environment import nccl_variables
from elastic.agent.worker_socket import WorkerSocket
from elastic.checkpoints.series import newest_in_memory
from elastic.config import Reduction, RingKind
from elastic.protocol import messages, worker_slot
from elastic.protocol.failure_detector import Detector, Health
from elastic.protocol.shard_advice import Worlds
from elastic.records import flight_recorder, last_notes
from elastic.records.job_directory import read_settings
from elastic.records.ledger import Ledger
from elastic.rendezvous.endpoint import is_loopback

_log = logging.getLogger(__name__)

SPAWN_PAUSE_S = 0.2
"""Seconds before a successor starts, so that the survivors have the machine's processors for their recovery. With
--restart it starts at once: there the survivors copy and compute nothing anew."""


class WorkerEvents(Protocol):
    """The agent's side: what becomes of the workers."""

    def on_announced(self, worker_id: str) -> None:
        """The leader has been told that the worker has announced itself."""

    def on_exited(self, worker_id: str, status: int) -> None:
        """A worker's process has ended with this status."""

    def on_step(self) -> None:
        """A slot has taken an event, and all its actions are done."""


class WorkerManager:
    """Used on the event loop, by the main thread. Nothing between two awaits can interleave."""

    def __init__(
        self,
        here: AgentContext,
        ledger: Ledger,
        slot_file: SlotFile,
        standing: StandingWords,
        leader: LeaderSession,
        events: WorkerEvents,
        fork_server: ForkServerProcess | None = None,
        refused: str = "",
    ) -> None:
        """fork_server: see Launcher. refused: why no worker may be started, or ""."""
        spec, job_dir, journal = here.spec, here.job_dir, here.journal
        self._here = here
        self._leader = leader
        self._events = events
        before = slot_file.incarnations
        self.slots = [
            worker_slot.Slot(here.node, number, spec, before.get(number, -1) + 1)
            for number in range(here.slots + spec.spares)
        ]
        self._standing = standing
        self._frozen: set[str] = set()
        """Workers that were found frozen."""
        self._slot_file = slot_file
        self._slots_refused = False
        self._ledger = LedgerWriter(ledger, job_dir, journal, leader.say)
        self._begun_with = self._ledger.next_step
        """Steps on file before this agent had workers."""
        self._checkpoints = read_settings(job_dir)
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._detector = Detector(spec.timing, time.monotonic())
        self._stdout = Stdout()
        starter = Launcher(spec, job_dir / "logs", here.node, journal, fork_server)
        self.processes = WorkerProcesses(starter, job_dir / "logs", journal, self)
        kill = partial(self.processes.signal, number=signal.SIGKILL)
        self._mpirun = Mpirun(job_dir / "logs" / "mpirun.log", journal, kill)
        self.socket = WorkerSocket(spec.name, job_dir, here.node, journal, self, self._ledger.keep)
        self._refused = refused

    async def start(self) -> None:
        """Start the workers of all slots."""
        if self._here.spec.ring is RingKind.MPI:
            await self._mpirun.start([slot.worker_id for slot in self.slots])
        for number in range(len(self.slots)):
            self._arm(number)

    async def end(self) -> None:
        """Start no worker any more, and end all of them, whatever has ended the agent."""
        self.for_all_slots(worker_slot.StopSlot())
        await self.processes.end()
        await self._mpirun.close()
        await self.socket.close()
        if dropped := self._stdout.close(wait_s=1.0):
            _log.warning("%d lines of output are in the logs of the workers only", dropped)

    # ------------------------------------------------------------------------------------------- slots

    @property
    def has_others(self) -> bool:
        """Whether the job has members on other nodes, which go on without this node."""
        return self._standing.has_others(self._here.node)

    @property
    def is_empty(self) -> bool:
        """Whether no worker is left and none may still start."""
        waiting = (worker_slot.SlotPhase.WAITING, worker_slot.SlotPhase.STARTING)
        return not any(slot.lives or slot.phase in waiting for slot in self.slots)

    def for_all_slots(self, event: worker_slot.Event) -> None:
        for number in range(len(self.slots)):
            self._supervise(number, event)

    def supervise_worker(self, worker_id: str, event: worker_slot.Event) -> None:
        """Bring an event about a worker to its slot; dropped if the slot has gone on without the worker."""
        for number, slot in enumerate(self.slots):
            if slot.worker_id == worker_id and slot.lives:
                self._supervise(number, event)

    def kill_worker(self, worker_id: str) -> None:
        """Kill a worker for an operator who wants to see the job survive it: what follows is what follows any death."""
        self._signal(worker_id, signal.SIGKILL)

    def _supervise(self, number: int, event: worker_slot.Event) -> None:
        self.slots[number], actions = worker_slot.step(self.slots[number], event, time.monotonic())
        for action in actions:
            match action:
                case worker_slot.SayTo(messages.WorkerDead() as dead):
                    where = self._last_shard(dead.worker_id) if dead.failure else ""
                    self._leader.say(replace(dead, snapshot=newest_in_memory(self._checkpoints), where=where))
                case worker_slot.SayTo(word):
                    if isinstance(word, messages.SlotGivenUp):
                        self._here.journal.write("slot_given_up", slot=word.slot, because=word.because)
                    self._leader.say(word)
                case worker_slot.Signal(sent):
                    self._signal(self.slots[number].worker_id, sent)
                case worker_slot.TellLeader():
                    self._here.journal.write("worker_failed", **asdict(action))
                case worker_slot.Spawn():
                    self._spawn(number, action)
        self._arm(number)
        self._events.on_step()

    def _arm(self, number: int) -> None:
        if (timer := self._timers.pop(number, None)) is not None:
            timer.cancel()
        slot = self.slots[number]
        if slot.deadline_s < math.inf:
            first = slot.deadline_s == -math.inf
            pause_s = 0.0 if first or self._here.spec.restart else SPAWN_PAUSE_S
            wait_s = max(pause_s, slot.deadline_s - time.monotonic())
            self._timers[number] = asyncio.get_running_loop().call_later(
                wait_s, self._supervise, number, worker_slot.Due()
            )

    def _worlds(self) -> Worlds | None:
        """Those in which it matters how many shards there are: none on one machine, or without an order of the sum."""
        spec = self._here.spec
        if is_loopback(self._here.reach.address) or spec.reduction is not Reduction.EXACT:
            return None
        return Worlds(spec.min_workers, spec.workers_limit, max(1, len(self.slots) - spec.spares))

    def _spawn(self, number: int, wanted: worker_slot.Spawn) -> None:
        if self._refused:
            asyncio.get_running_loop().call_soon(self.on_not_started, number, self._refused)
            return
        spec, reach = self._here.spec, self._here.reach
        told = WorkerEnvironment.of_job(
            spec,
            self._here.job_dir,
            number,
            wanted,
            agent_socket=self.socket.path,
            address=reach.address,
            certs=reach.certs,
            worlds=self._worlds(),
        )
        nccl = spec.ring is RingKind.NCCL and not spec.restart  # there scripts have groups of their own
        settings = {
            **(nccl_variables({**os.environ, **spec.environment}, spec.workers_limit) if nccl else {}),
            **told.to_environ(),
            **self._checkpoints.to_environment(),
            **self._mpirun.settings(wanted.worker_id),
        }
        self.processes.start(number, wanted.worker_id, settings, restarted=wanted.restarted)

    def _signal(self, worker_id: str, number: signal.Signals) -> None:
        self._here.journal.write("worker_signalled", worker_id=worker_id, signal=number.name)
        self.processes.signal(worker_id, number)

    # --------------------------------------------------------------------------------------- processes

    def on_started(self, number: int, worker_id: str, pid: int) -> None:
        self._slot_file.spawned(number, self.slots[number].incarnation, pid)
        self._supervise(number, worker_slot.Spawned(pid))

    def on_not_started(self, number: int, because: str) -> None:
        self._supervise(number, worker_slot.SpawnFailed(because))

    def on_line(self, worker_id: str, line: bytes) -> None:
        if worker_id == self._standing.leader:
            self._stdout.put(line)

    def on_dying(self, worker_id: str, status: int, starved: str) -> None:
        self._say_how_far(worker_id)
        self.supervise_worker(worker_id, worker_slot.Dying(status, self._mpirun.why_lost(worker_id), starved))

    def _say_how_far(self, worker_id: str) -> None:
        """Say how many steps are on file: the worker's last beat may be old, and no other worker may be left."""
        steps = (
            self._ledger.next_step if not self._here.spec.restart else 0
        )  # there new workers go on from what is kept
        self._leader.say(messages.Progress(worker_id, 0, 0, steps if steps > self._begun_with else 0, "gone"))

    def on_exit(self, number: int, worker_id: str, status: int, last_words: Callable[[], str], starved: str) -> None:
        if cause := self._mpirun.left(worker_id):
            status = -signal.SIGKILL  # the last words are those of the MPI library, about another process
        self._detector.forget(worker_id)
        self._frozen.discard(worker_id)
        self._ledger.keep_left_behind(worker_id)
        self._say_how_far(worker_id)
        self._events.on_exited(worker_id, status)
        self._supervise(number, worker_slot.Exited(status, last_words() if status else "", cause, starved))

    # ------------------------------------------------------------------------------------------- words

    def employs(self, worker_id: str) -> bool:
        return worker_id in self.processes

    def on_word(self, worker_id: str, word: messages.Word) -> None:
        match word:
            case messages.Announce():
                self._detector.watch(worker_id, time.monotonic())
                self.supervise_worker(worker_id, worker_slot.WorkerJoined(word.device))
                self.processes.announced(worker_id, word.pid)
            case messages.RingUp() | messages.Progress() if word.generation:
                self._served(worker_id)
            case messages.Failed():
                raised = worker_slot.Raised(word.place, word.message, word.exit_code, word.of_device, word.newcomer)
                self.supervise_worker(worker_id, raised)
            case messages.Finished():
                self.supervise_worker(worker_id, worker_slot.MayLeave())
        self._detector.beat(worker_id, time.monotonic())
        self._leader.say(word)
        if isinstance(word, messages.Announce):
            self._events.on_announced(worker_id)

    def _served(self, worker_id: str) -> None:
        if any(slot.worker_id == worker_id and not slot.served for slot in self.slots):
            self.supervise_worker(worker_id, worker_slot.Served())

    def on_goodbye(self, worker_id: str) -> None:
        self._detector.forget(worker_id)

    def show_stacks(self, worker_id: str, then: Callable[[], None] = lambda: None) -> None:
        """Have a given-up worker write its stacks; a frozen one has done so before. then: called afterwards."""
        if worker_id in self._frozen:
            then()
        else:
            self.processes.show_stacks(worker_id, then)

    def end_worker(self, worker_id: str) -> None:
        """End a worker by order of the leader, after it has written its stacks."""
        self.show_stacks(worker_id, lambda: self.supervise_worker(worker_id, worker_slot.KillOrdered()))

    # ------------------------------------------------------------------------------------------- beats

    def look(self) -> None:
        """To be called every beat_s: write what waits for a disk, and examine silent workers."""
        self._ledger.settle()
        self._settle_slots()
        now_s = time.monotonic()
        for worker_id in self._detector.suspects(now_s):
            if (seen := self.processes.facts(worker_id)) is not None:
                self._detector.look(worker_id, seen, now_s)
        for worker_id, verdict in self._detector.judge(now_s).items():
            if verdict.health is Health.FROZEN and worker_id not in self._frozen:
                self._frozen.add(worker_id)
                because = f"{verdict.because}{self._last_note(worker_id)}"
                self._here.journal.write("worker_frozen", worker_id=worker_id, because=because)
                self.processes.show_stacks(worker_id)
                self.supervise_worker(worker_id, worker_slot.FoundFrozen())
                self._leader.say(messages.WorkerFrozen(worker_id, because))
            elif verdict.health is Health.ALIVE and worker_id in self._frozen:
                self._frozen.discard(worker_id)
                self._here.journal.write("worker_thawed", worker_id=worker_id)
                self.supervise_worker(worker_id, worker_slot.FoundAlive())
                self._standing.thawed(worker_id)

    def _last_note(self, worker_id: str) -> str:
        """What the worker did last, to be put behind a sentence; "" if that is not known."""
        last = flight_recorder.last(self._here.job_dir, worker_id)
        return f"; in operation {last.operation} it {last_notes.said(last)}" if last is not None else ""

    def _last_shard(self, worker_id: str) -> str:
        """The shard that the worker computed last, in words; "": it did something else."""
        last = flight_recorder.last(self._here.job_dir, worker_id)
        computes = last is not None and last.event is flight_recorder.FlightEvent.COMPUTES
        return last.text if last is not None and computes and last.text.startswith("shard ") else ""

    def _settle_slots(self) -> None:
        """Write the slot file. Journal once if that fails: a later agent knows workers by their logs only."""
        self._slot_file.settle()
        refused = self._slot_file.refused
        if refused is not None and not self._slots_refused:
            self._here.journal.write("slots_not_written", because=str(refused))
        self._slots_refused = refused is not None
