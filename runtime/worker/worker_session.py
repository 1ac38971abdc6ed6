"""A worker under an agent: the session whose operations survive the death of other members.

The user's thread follows worker_state.next_move; orders arrive on the client's thread; beats have a thread of their
own. Nothing is decided here: elastic/protocol/worker_state decides.
"""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace

import torch

from elastic.agent.worker import death_watch, stack_dump
from elastic.agent.worker.client import AgentClient
from elastic.agent.worker.environment import WorkerEnvironment
from elastic.agent.worker.mpi_ranks import Ranks
from elastic.agent.worker.node_notice import NodeNotice
from elastic.checkpoints.naming import EntryName
from elastic.checkpoints.series import newest_in_memory
from elastic.checkpoints.settings import Settings
from elastic.config import RingKind
from elastic.errors import DeviceHung, Disagree, ExitCode, JoinMissed, LeaderOnly, LeftAlone, LinkTooSlow
from elastic.protocol import messages
from elastic.protocol.loop_state import Admitted
from elastic.protocol.recovery_plan import default_units_of
from elastic.protocol.worker_id import node_of
from elastic.protocol.worker_state import Phase
from elastic.records import ledger
from elastic.records.flight_recorder import FlightRecorder
from elastic.records.journal import Journal
from elastic.security.rejection_log import RejectionLog
from runtime.allreduce.reduction.flat_pool import CPU
from runtime.allreduce.reduction.partial_sum import Json
from runtime.allreduce.ring import mpi, nccl
from runtime.allreduce.ring.handshake import Hello
from runtime.allreduce.ring.listener import Listener
from runtime.allreduce.ring.process_group import meeting
from runtime.allreduce.ring.ring_set import Rings
from runtime.allreduce.ring.tls import TlsContexts
from runtime.guards import numerics_fingerprint
from runtime.recovery.kept.remote import CopyDial
from runtime.recovery.state.training_state import Carrier
from runtime.recovery.transfer.client import CopyClient
from runtime.recovery.transfer.connection import CopyConnection, CopyFailed
from runtime.script_end import raised_at
from runtime.session import Copy, HomeRank, JoinMeta, LoopPlace, ScriptLoop, StepRecord
from runtime.worker.donor import CopyServer
from runtime.worker.gpu import is_of_device, uuid_of
from runtime.worker.joining import JoinProtocol
from runtime.worker.leader_orders import LeaderOrders
from runtime.worker.operations import OperationLoop
from runtime.worker.progress_report import FlightNoter, ProgressReporter
from runtime.worker.state_owner import SharedWorkerState


class WorkerSession(OperationLoop):
    """Session (see runtime/session.py) of a worker that an agent started."""

    def __init__(self, environ: Mapping[str, str], threads: int, device: torch.device) -> None:
        """Raises ConfigError for a broken environment, and for a ring that cannot work here. Blocks for MPI only."""
        self._told = told = WorkerEnvironment.from_environ(environ)
        kind = told.ring
        if kind is RingKind.NCCL:
            nccl.check_device(device)
        self.sums_on = device if kind is RingKind.NCCL else CPU
        self._journal = Journal(
            told.job_dir / "journal" / f"{self.worker_id}.jsonl",
            job=told.job,
            who=self.worker_id,
            node=told.node,
            worker_id=self.worker_id,
        )
        seal = TlsContexts.when_valid(
            told.certs, lambda because: self._journal.write("certificate_trouble", because=f"it waits: {because}")
        )
        self._refusals = RejectionLog(self._journal)
        self._listener = Listener(
            told.address,
            job=told.job,
            me=self.worker_id,
            serve_copy=self._serve_copy,
            seal=seal,
            on_refused=lambda because, caller: self._refusals.say(because, at="worker", peer=caller),
        )
        host, port = self._listener.address
        sums = told.reduction.of_integers
        meet = meeting(nccl.make_group, host, device, sums=sums) if kind is RingKind.NCCL else None
        if kind is RingKind.MPI:
            meet = mpi.MpiWorld(Ranks.from_environment(environ), self.worker_id, self._journal).meet
        self._rings = Rings(self._listener, told.job, self.worker_id, told.timing.build_s, kind, meet)
        self._client = AgentClient(told.agent_socket, job=told.job, worker_id=self.worker_id, job_dir=told.job_dir)
        self._shared = SharedWorkerState(self.worker_id, self._rings, self._client.send, self._journal, self.sums_on)
        self._shared.position = replace(self._shared.position, phase=Phase.FRESH)
        self._donor = CopyServer(self._shared, self._journal)
        self._asker = CopyClient(told.job, self.worker_id, seal)
        self._orders = LeaderOrders(self._shared, self._asker, self._client, self._journal)
        self._listener.token_of = self._orders.token_of
        self._rings.on_hung = self._give_way
        self.script = ScriptLoop(newcomer=True)
        self._admission = JoinProtocol(self._shared, self._orders, self._asker, self._journal, self.script)
        self._applied = 0
        self._reporter = ProgressReporter(on_host=self.sums_on.type == "cpu", note=self._flight_note())
        super().__init__()
        self._stopping = threading.Event()
        bits = numerics_fingerprint.fingerprint(threads, device)
        kept = newest_in_memory(Settings.from_environment(environ))
        self._announce = messages.Announce(
            self.worker_id,
            told.node,
            self.local_rank,
            os.getpid(),
            host,
            port,
            bits,
            snapshot=kept,
            device=uuid_of(device),
        )
        self._client.connect(self._orders.deliver, self._on_lost)

    def _flight_note(self) -> FlightNoter:
        try:
            return FlightRecorder(self._told.job_dir, self.worker_id, self._at_operation).note
        except OSError as error:  # a full disk costs the notes and not the worker
            self._journal.write("flight_not_recorded", because=str(error))
            return lambda moment, text="", unit=-1: None

    def _at_operation(self) -> tuple[int, int]:
        p = self._shared.position
        return p.entered, p.reduced

    def enter(self) -> None:
        """Announce this worker and wait until it is a member or knows that it is a newcomer."""
        self._client.send(self._announce)
        threading.Thread(target=self._beat, name="beat", daemon=True).start()
        with self._shared.changed:
            self._shared.changed.wait_for(lambda: self._shared.position.record is not None or self._orders.over)
        self._orders.leave_if_over()
        if self._shared.position.phase is not Phase.FRESH:
            self.script.post(Admitted())

    # ------------------------------------------------------------------------------------------ attributes

    @property
    def local_rank(self) -> int:
        return self._told.slot

    @property
    def restarted(self) -> bool:
        return self._told.restarted

    @property
    def _record(self) -> messages.Generation:
        record = self._shared.position.record
        assert record is not None
        return record

    @property
    def rank(self) -> int:
        return self._rank_in(self._record.ids)

    def _rank_in(self, members: tuple[str, ...]) -> int:
        """len(members): it is none of them."""
        return members.index(self.worker_id) if self.worker_id in members else len(members)

    @property
    def world_size(self) -> int:
        return len(self._record.members)

    @property
    def home(self) -> HomeRank:
        member = self._record.member(self.worker_id)
        rank = self._orders.home if member is None else member.home
        if rank < 0:
            rank = self.local_rank  # an older leader gives no numbers
        node = node_of(self.worker_id)
        lowest = {node: rank}
        for other in self._record.members:
            lowest[other.node] = min(other.home, lowest.get(other.node, other.home))
        return HomeRank(rank, sum(first < lowest[node] for first in lowest.values()), len(lowest))

    def owned(self, units: int) -> tuple[int, ...] | None:
        record = self._record
        return default_units_of(self.worker_id, record, units) if record.member(self.worker_id) else None

    @property
    def because(self) -> str:
        return self._record.because

    @property
    def began(self) -> str:
        return self._record.entry

    @property
    def pauses(self) -> bool:
        return self._record.hold

    def before_exit(self, call: Callable[[], None]) -> None:
        """Call this when the process is about to end because the leader says so."""

        def and_flush() -> None:
            call()
            self._refusals.flush(last=True)

        self._orders.before_exit = and_flush

    def on_order(self, call: Callable[[], None]) -> None:
        """Call this behind each order of the leader, on a thread of the session."""
        self._orders.on_order = call

    def planned_since(self, generation: int) -> bool:
        """Whether nobody was lost since that generation, up to the current one."""
        return self._orders.planned(range(generation + 1, self.generation + 1))

    @property
    def parting(self) -> bool:
        with self._shared.changed:
            pending = self._shared.position.newest_pending
        return pending is not None and not pending.ids

    @property
    def due(self) -> bool:
        with self._shared.changed:
            return bool(self._shared.position.pending)

    @property
    def state_given(self) -> bool:
        with self._shared.changed:
            return self._donor.window.state_given

    def leave_if_over(self) -> None:
        self._orders.leave_if_over()

    @property
    def going(self) -> NodeNotice | None:
        return self._orders.going

    def place(self) -> LoopPlace:
        record = self._record
        # The token itself is a proof, which must not be in a directory's name.
        digits = hashlib.sha256(f"checkpoint {record.token}".encode()).hexdigest()
        return LoopPlace(record.number, self._rank_in(record.ids), record.ids, digits)

    def note(self, event: str, **fields: object) -> None:
        self._journal.write(event, generation=self.generation, **fields)

    def point(self, series: str, name: EntryName, answer: Callable[[bool], None]) -> None:
        word = messages.CheckpointComplete(self.worker_id, series, str(name))
        with self._shared.changed:
            for older in [known for known in self._orders.pointed if known.series == series]:
                del self._orders.pointed[older]  # a leader that was lost has not answered
            self._orders.pointed[word] = answer
        self._client.send(word)

    def unreadable(self, entry: EntryName, because: str, *, memory: bool, instead: EntryName | None) -> None:
        self._client.send(messages.Unreadable(self.worker_id, str(entry), because, memory, str(instead or "")))
        self._orders.give_way(f"{entry} cannot be read: {because}")

    # --------------------------------------------------------------------------------------------- its agent

    def _on_lost(self, because: str) -> None:
        """Journal that the stream to the agent has ended. If the agent is gone, the kernel ends this process too."""
        self._journal.write("agent_lost", because=because)

    def _beat(self) -> None:
        while not self._stopping.wait(self._told.timing.beat_s):
            self._say_progress()

    def _say_progress(self) -> None:
        joining = self._admission.doing if self._orders.ready else ""
        p = self._shared.position
        self._client.send(self._reporter.progress(p, self._applied, joining, self._rings.carries(p.entered)))

    # -------------------------------------------------------------------------------------------- the state

    def attach(self, carrier: Carrier) -> None:
        self._donor.carrier = carrier

    def publish(self, meta: JoinMeta | None) -> None:
        with self._shared.changed:
            self._donor.meta = meta

    def _serve_copy(self, sock: socket.socket, hello: Hello) -> None:
        """Runs on a thread of the listener: the hello's token has proved that the asker knows that generation."""
        self._donor.serve(CopyConnection(sock), hello.worker_id)

    def answer_others(self, answer: Callable[[CopyConnection, dict[str, Json]], bool]) -> None:
        """Have other workers' requests answered that are not about this session. answer: as of CopyServer."""
        self._donor.answer_others = answer

    def call(self, worker_id: str) -> CopyConnection:
        """A connection to a member of this generation, for requests of such kinds. Any thread. Raises CopyFailed."""
        record = self._record
        if (member := record.member(worker_id)) is None:
            raise CopyFailed(f"{worker_id} is no member of generation {record.number}")
        return self._asker.help(member, record)

    def dial(self) -> CopyDial:
        """What a process of this worker needs to ask the members of its generation such things."""
        record = self._record
        peers = {member.worker_id: (member.host, member.port) for member in record.members}
        return CopyDial(self._told.job, self.worker_id, record.number, record.digest(), record.token, peers)

    # --------------------------------------------------------------------------------------------- newcomer

    def await_invitation(self) -> None:
        self._reporter.at("spare")
        self._admission.await_invitation()
        self._reporter.at("newcomer")

    def meta(self, until: Callable[[JoinMeta], bool] = bool) -> JoinMeta:
        return self._admission.meta(until)

    def registered_by_members(self, name: str) -> tuple[dict[str, Json], Sequence[torch.Tensor]]:
        return self._admission.registered_by_members(name)

    def hold_to_join(self) -> None:
        self._orders.hold = True

    def copy_anew(self) -> Copy:
        return self._admission.copy_anew()

    def script_does(self, what: str) -> None:
        """What `elastic status` shows of the script that this worker runs beside itself."""
        self._reporter.script = what

    def waits(self, what: str) -> None:
        self._reporter.waits_for(what)

    def takes_time(self, what: str) -> None:
        self._reporter.at(what)

    def loop_over(self) -> None:
        self._reporter.loop_over()

    # ---------------------------------------------------------------------------------------------- the end

    def applied(self, record: StepRecord) -> None:
        if self.script.at.behind:  # the members have recorded it
            return
        self._applied = record.step + 1
        self.record(record)

    def record(self, record: StepRecord) -> None:
        """Queue the line of a step for the ledger; never waits. The leader does not hear of the step, and so lets new
        workers begin when all are lost, as those of scripts in rounds may."""
        self._client.record({**asdict(record), "lr": list(record.lr)})

    def history(self, first: int, end: int) -> list[StepRecord]:
        try:
            lines = ledger.between(self._told.job_dir / "steps.jsonl", first, end)
        except FileNotFoundError:
            return []
        return [StepRecord.from_line(line) for line in lines]

    def failed(self, error: BaseException, step: int | None, shard: int | None) -> None:
        if isinstance(error, DeviceHung):
            self._give_way(error)
        if isinstance(error, JoinMissed):
            self._orders.give_way(str(error))
        place = f"{type(error).__name__} {raised_at(error)}"
        for name, number in (("step", step), ("shard", shard)):
            place += f" {name} {number}" if number is not None else ""
        code = ExitCode.SCRIPT_FAILED
        if isinstance(error, Disagree | LeftAlone | LeaderOnly):
            code = ExitCode.DISAGREE
        elif isinstance(error, LinkTooSlow):
            code = ExitCode.BELOW_QUORUM
        message = "".join(traceback.format_exception(error))
        of_device, newcomer = is_of_device(error), self._shared.position.newcomer
        samples = self._samples() if shard is not None else ""
        about = (self.worker_id, self.generation, place, message, int(code))
        failed = messages.Failed(*about, of_device, newcomer, samples)
        self._client.send(failed)
        self._journal.write("script_failed", generation=self.generation, place=place)
        self._client.close()

    def close(self, digest: str) -> None:
        """Every member is at the end: stay until the leader has said goodbye, so that no member misses a result."""
        self._client.send(messages.Finished(self.worker_id, self.generation, digest))
        with self._shared.changed:
            self._shared.changed.wait_for(lambda: self._orders.over, self._told.timing.fence_grace_s)
        self._stopping.set()
        self._journal.write("exit", code=0)
        self._client.close()
        self._listener.close()
        self._refusals.flush(last=True)


def connect(threads: int, device: torch.device) -> WorkerSession:
    """The session of this process, by its environment. Blocks until the worker is admitted or known to be a
    newcomer."""
    if path := os.environ.pop(death_watch.DEATH_WATCH_VARIABLE, ""):
        death_watch.hold(path)
    stack_dump.show_when_asked()
    member = WorkerSession(os.environ, threads, device)
    member.enter()
    return member
