"""The agent of one job on one node: `python -m elastic.agent --job-dir DIR --node NAME --slots N`. What starts agents
is the daemon of a node, elastic/fleet/node/node_daemon.py.

    rendezvous  <-- words up, orders down -->  agent  <-- unix socket -->  workers
                     (leader_session.py)                   (workers.py)

It starts workers and replaces them, watches their exits and their beats, forwards words and orders unchanged, and keeps
the ledger of applied steps. It decides nothing about membership, and it never stops workers because no leader answers.
Everything runs on one asyncio thread, the main thread, with which the workers die; no torch is imported here.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from functools import partial

from elastic.agent import options
from elastic.agent.context import AgentContext
from elastic.agent.drain import LOSS, OPERATOR, SIGTERM, NodeDrain
from elastic.agent.leader_session import Ended, LeaderSession
from elastic.agent.options import GRACE_S, Assignment
from elastic.agent.process.process_start import ForkServerProcess
from elastic.agent.slot_file import FILE, SlotFile
from elastic.agent.standing_words import StandingWords
from elastic.agent.workers import WorkerManager
from elastic.checkpoints.series import newest_in_memory
from elastic.checkpoints.storage import storage_at
from elastic.errors import CheckpointDirTaken, ElasticError, ExitCode
from elastic.preemption import relay
from elastic.preemption.provider import Unanswered
from elastic.process import log, stop_signals
from elastic.protocol import worker_slot
from elastic.protocol.messages import Close, Fence, Home, Invite, Kill, Order, Publish, Quiesce, Release
from elastic.records.job_directory import JobLock, read_settings
from elastic.records.journal import Journal, journal_path
from elastic.records.ledger import Ledger
from elastic.records.resume import own

_log = logging.getLogger(__name__)


class Agent:
    """Connects the leader to one node's workers. Everything runs on the event loop; between two awaits nothing
    interleaves.

    fork_server: the job's fork server if it was started already. refused: why no worker of the job may be started, or
    "". Raises ConfigError.
    """

    def __init__(
        self,
        given: Assignment,
        journal: Journal,
        ledger: Ledger,
        fork_server: ForkServerProcess | None = None,
        refused: str = "",
    ) -> None:
        spec, job_dir, node, slots = given.spec, given.job_dir, given.node, given.slots
        self._notices = given.notices
        self._grace_s = given.grace_s
        self._job_dir = job_dir
        self._leaves_after_loss = given.leaves_after_loss
        self._beat_s = spec.timing.beat_s
        self._journal = journal
        slot_file = SlotFile(job_dir / f"{node}{FILE}")
        slot_file.end_leftovers()
        self._standing = StandingWords()
        for dead in slot_file.deaths(node, newest_in_memory(read_settings(job_dir))):
            self._standing.heard(dead)
        here = AgentContext(spec, job_dir, node, slots, given.reach, journal)
        self._leader = LeaderSession(here, self, self._standing)
        self._workers = WorkerManager(here, ledger, slot_file, self._standing, self._leader, self, fork_server, refused)
        self._departure = NodeDrain(journal, self._workers, self._leader)
        self._end: Ended | None = None
        self._late_failure = False
        self._stop_status: int | None = None
        self._stops_when_empty = False
        self._all_over = asyncio.Event()

    async def run(self) -> int:
        """Run until the job is over and its workers are gone, or a signal came. Returns the exit code."""
        loop = asyncio.get_running_loop()
        for sent, asked in stop_signals.obeyed().items():
            loop.add_signal_handler(sent, self._on_signal, asked)
        await self._workers.socket.listen()
        self._departure.notices.watch(self._notices)
        stop_signals.begin()
        await self._workers.start()
        attending = asyncio.create_task(self._leader.always())
        watching = asyncio.create_task(self._watch())
        over = asyncio.create_task(self._all_over.wait())
        try:
            for task in asyncio.as_completed((attending, watching, over)):
                await task
                if over.done():
                    break
            await self._leader.part(attending)
            return self._exit_code()
        finally:
            for running in (attending, watching, over):
                running.cancel()
            await asyncio.gather(attending, watching, over, return_exceptions=True)
            self._departure.close()
            await self._workers.end()

    def _exit_code(self) -> int:
        if self._stop_status is not None:
            return self._stop_status
        if self._end is not None and self._end.exit_code:
            return self._end.exit_code
        return ExitCode.SCRIPT_FAILED if self._late_failure else ExitCode.DONE

    def _on_signal(self, number: signal.Signals) -> None:
        """Obey a signal. The first asks the workers to stop; if it is SIGTERM and there is time, to leave in order.
        Another one stops them, and the next one kills them."""
        self._journal.write("agent_signalled", signal=number.name)
        in_order = number == signal.SIGTERM and (self._workers.has_others or self._grace_s is not None)
        if in_order and not self._stops_when_empty and self._stop_status is None:
            self._stops_when_empty = True
            self._departure.asked(self._grace_s or GRACE_S, "it was asked to stop (SIGTERM)", source=SIGTERM)
            self.on_step()  # the workers may have left before
            return
        if self._stop_status is not None:
            self._workers.processes.kill_all()
            return
        self._stop_status = 128 + number
        self._workers.for_all_slots(worker_slot.StopSlot())

    # ------------------------------------------------------------------------------------------ the workers

    def on_announced(self, worker_id: str) -> None:
        self._departure.announced(worker_id)

    def on_exited(self, worker_id: str, status: int) -> None:
        if self._end is not None and not self._end.exit_code and 0 < status != ExitCode.FENCED:
            self._late_failure = True
            because = worker_slot.describe(status)
            _log.error("%s %s after the job was complete", worker_id, because)
        served = any(slot.worker_id == worker_id and slot.served for slot in self._workers.slots)
        lost = self._end is None and is_loss(status, served=served) and not self._departure.is_leaving
        if lost and self._leaves_after_loss and self._workers.has_others:
            because = f"{worker_id} {worker_slot.describe(status)}"
            leave = partial(self._leave_after_loss, worker_id, because)
            asyncio.get_running_loop().call_soon(leave)  # once it is said that this worker has failed

    def _leave_after_loss(self, worker_id: str, because: str) -> None:
        try:
            relay.lose_worker(self._job_dir, worker_id)
        except Unanswered as error:  # nobody would end this node's task, so the slot gets a successor instead
            self._departure.notices.troubled(LOSS, str(error))
            return
        self._departure.asked(self._grace_s or GRACE_S, because, source=LOSS)

    def on_step(self) -> None:
        self._departure.look()
        if self._stops_when_empty and self._departure.is_done and self._stop_status is None:
            self._stop_status = 128 + signal.SIGTERM
        if (self._end or self._stop_status is not None) and self._workers.is_empty:
            self._all_over.set()

    # ------------------------------------------------------------------------------------ the leader speaks

    def on_leader(self) -> None:
        for wish in self._departure.wishes():
            self._standing.heard(wish)

    def on_drain(self, left_s: float, because: str) -> None:
        self._departure.asked(left_s, because)

    def on_drain_over(self) -> None:
        self._departure.notices.heard(OPERATOR, None)

    def on_worker_signal(self, worker_id: str, *, kill: bool) -> None:
        if kill:
            self._workers.kill_worker(worker_id)
        else:
            self._workers.show_stacks(worker_id)

    def on_order(self, to: list[str], order: Order) -> None:
        if isinstance(order, Publish):
            self._standing.published(order.generation)
        for worker_id in to:
            match order:
                case Kill():
                    self._workers.end_worker(worker_id)
                    continue
                case Release():
                    self._workers.supervise_worker(worker_id, worker_slot.WorkerReleased())
                case Invite():
                    self._standing.invited(worker_id)
                case Home():
                    self._standing.at_home(worker_id, order.home)
                case Close():
                    self._workers.supervise_worker(worker_id, worker_slot.JobOver(complete=order.exit_code == 0))
            if isinstance(order, Fence):
                self._workers.show_stacks(worker_id)
            if isinstance(order, Fence | Release | Close):
                because = getattr(order, "because", "released")
                self._journal.write("ordered", worker_id=worker_id, order=type(order).__name__, because=because)
            self._workers.socket.order(worker_id, order)

    def on_orphaned(self, term: int) -> None:
        """Order all rings to stop; workers keep their state. The next leader hears of it and rebuilds."""
        self._workers.socket.order_all(Quiesce(term, 0, self._standing.newest))

    def on_end(self, ended: Ended) -> None:
        self._end = ended
        self._workers.for_all_slots(worker_slot.JobOver(complete=ended.exit_code == 0))
        # A worker that was cut off, or expelled, has not heard of the end, and would wait in its ring for ever.
        self._workers.socket.order_all(Close(self._leader.term, ended.because, ended.exit_code))

    async def _watch(self) -> None:
        """Look at silent workers, and send a beat upstream, every beat_s."""
        while True:
            await asyncio.sleep(self._beat_s)
            self._leader.beat()
            self._workers.look()


def is_loss(status: int, *, served: bool) -> bool:
    """Whether the job has lost a worker that has ended in this way. served: whether it was a member. A newcomer that
    comes too late gives way to a new process: nobody is lost."""
    return status not in (ExitCode.DONE, ExitCode.DRAINED) and (served or status != ExitCode.FENCED)


def _refused(given: Assignment) -> str:
    """Make the checkpoint directory the job's. Returns why no worker may be started, which no other try would change;
    or "". Raises ConfigError if the directory cannot be used now."""
    if not given.reach.replicas:
        return ""  # `elastic run` has done this, where its user sees it at once
    settings = read_settings(given.job_dir)
    try:
        own(storage_at(settings.root), settings.job, settings.job_id)
    except CheckpointDirTaken as error:
        return str(error)
    return ""


def main(fork_server: ForkServerProcess | None = None) -> int:
    """Run the agent of the command line; returns its exit code. fork_server: see Agent."""
    log.begin_from(sys.argv[1:])
    try:
        given = options.of_words()
        spec, job_dir, who = given.spec, given.job_dir, f"agent-{given.node}"
        refused = _refused(given)
        stable = spec.reduction.stable and not spec.restart  # scripts in rounds sum by themselves
        with (
            JobLock(job_dir / "lock", "wait until that job is over, or give another --job-dir"),
            Ledger(job_dir / "steps.jsonl", whole=not (given.reach.replicas or spec.restart), stable=stable) as ledger,
            Journal(journal_path(job_dir, who), spec.name, who, given.node, logged=logging.DEBUG) as journal,
        ):

            async def attend() -> int:
                return await Agent(given, journal, ledger, fork_server, refused).run()

            return asyncio.run(attend())
    except ElasticError as error:
        _log.critical("the agent ends: %s", error)
        return ExitCode.BAD_INPUT
