"""Jobs whose gradients go over a process group, broken in the middle of an exchange.

Patches for their processes (see tests/mutants) say who carries the gradients, and where a worker can be held.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.live.jobs import Job


def kill_and_freeze(job: Job) -> None:
    """Kill a member in the middle of an exchange, and then freeze one, in a world of three; each is replaced, the job
    goes on to its end, and nobody else is touched."""
    from chaos_tests.nemesis import signals  # not in the processes of jobs, which run this file at their start

    members = job.await_world(3)
    victims = []
    for sent in (signal.SIGKILL, signal.SIGSTOP):
        victim = members[1]
        (job.gates / "exchange").write_text(victim)
        job.until("the victim in an exchange", (job.gates / f"exchange.{victim}").exists)
        if sent is signal.SIGSTOP:
            signals.freeze([job.workers()[victim]])  # it does not come out of the gate any more
        else:
            job.send(victim, sent)
        job.open("exchange")
        victims.append(victim)
        job.until("a world without it", lambda victim=victim: victim not in job.members())  # type: ignore[misc]
        members = job.await_world(3)
    job.finish()
    ends = {line["worker_id"]: line["because"] for line in job.events("worker_exited")}
    stayed = {line["worker_id"] for line in job.events("entered")} - set(victims)
    assert {ends[worker] for worker in stayed} == {"exited with 0"}, "a survivor was restarted"
    assert len(stayed) == 3, "each victim was replaced, and nobody else"
    assert job.left_behind() == {}


def kill_two(job: Job) -> None:
    """Kill a member and then rank 0 in a world of three; each is replaced, and the job goes on to its end."""
    job.pace(0.05)
    job.shut("end")
    for victim in (1, 0):
        members = job.await_world(3)
        job.send(members[victim], signal.SIGKILL)
        job.until("a world without it", lambda gone=members[victim]: gone not in job.members())  # type: ignore[misc]
    job.await_world(3)
    job.finish()


def gloo_for_nccl(nccl: Any) -> None:
    """`--ring nccl` is gloo between CPUs."""
    from tests.unit.gloo import GlooGroup

    nccl.check_device = lambda device: None
    nccl.make_group = GlooGroup


def gated(process_group: Any) -> None:
    """A worker can be held in the middle of an exchange: at the gate "exchange"."""
    transport = process_group.ProcessGroupTransport
    sound, adding, attempt = transport.exchange, transport.add_up, transport.attempt

    def exchange(self: Any, *tensors: Any) -> None:
        sound(self, *tensors)
        hold(self)

    def add_up(self: Any, tensors: Any) -> None:
        adding(self, tensors)
        hold(self)

    def hold(self: Any) -> None:
        if self.attempts > 1:  # the first one greets
            from tests.live.scripts import gates  # it looks at who it is in, which a process that is forked from is not

            gates.hold("exchange")

    def counted(self: Any) -> Any:
        self.attempts = getattr(self, "attempts", 0) + 1
        return attempt(self)

    transport.attempt, transport.exchange, transport.add_up = counted, exchange, add_up


def hangs_after_abort(process_group: Any) -> None:
    """Devices of the first workers of slots 1 and 2 never come to rest after an abort. To be called after `gated`."""
    transport = process_group.ProcessGroupTransport
    drain = transport._drain
    process_group.DRAIN_S = 0.5

    def hanging(self: Any) -> None:
        if self.attempts > 1 and os.environ.get("ELASTIC_WORKER_ID") in ("local.1.0", "local.2.0"):
            self._last = SimpleNamespace(is_completed=lambda: False)
        drain(self)

    transport._drain = hanging


def named_gpus(gpu: Any) -> None:
    """The slots have GPUs of their own. The file `device.<worker_id>` beside the gates says what a worker was told."""

    def uuid_of(device: object) -> str:
        told = Path(os.environ["LIVE_GATES"], f"device.{os.environ['ELASTIC_WORKER_ID']}")
        told.write_text(os.environ["ELASTIC_DEVICE"])
        return f"GPU-{os.environ['ELASTIC_SLOT']}"

    gpu.uuid_of = uuid_of


def gated_start(mpi: Any) -> None:
    """A worker can be held when all others are in MPI_Init, or about to be: at the gate "mpi-init"."""
    join = mpi.MpiWorld._join

    def held(self: Any) -> None:
        from tests.live.scripts import gates  # as above

        gates.hold("mpi-init")
        join(self)

    mpi.MpiWorld._join = held
