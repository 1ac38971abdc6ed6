"""How this process was started: by an agent, alone, or for an examination; and on which device it runs."""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path

import torch

from elastic.agent.worker import held_signals
from elastic.agent.worker.environment import AGENT_SOCKET, DEVICE, RANKS, RING, SLOT, THREADS, WorkerEnvironment
from elastic.agent.worker.examination import Examination
from elastic.config import RingKind
from elastic.errors import ConfigError
from elastic.process import stop_signals
from elastic.protocol.shard_advice import Worlds
from runtime.allreduce.reduction.flat_pool import CPU
from runtime.data.loader import check_count
from runtime.guards import checks
from runtime.session import Session
from runtime.worker.gpu import uuid_of
from runtime.worker.isolated_shards import IsolatedSession
from runtime.worker.single import SingleSession

VISIBLE = "CUDA_VISIBLE_DEVICES"
GPU_FILES = "/dev/nvidia[0-9]*"
"""Those of GPUs of NVIDIA, which their driver has made."""
_HIDDEN = re.compile(r"(?!\s*(\d|GPU-|MIG-))")
"""Values of that variable that hide all GPUs: CUDA takes what stands before the first word that names none. So do "",
-1, and the NoDevFiles that Slurm gives jobs without a GPU."""


def threads(given: int | None) -> int:
    """The number of threads for torch.set_num_threads. Raises ConfigError."""
    return check_count("threads", int(os.environ.get(THREADS, "1")) if given is None else given)


def session(threads: int, device: torch.device) -> Session:
    """The session of this process. Raises NotUnderElastic under a launcher of many processes."""
    if os.environ.get(AGENT_SOCKET):
        if stop_signals.is_child():
            held_signals.hold()
        from runtime.worker.worker_session import connect

        return connect(threads, device)
    checks.check_launcher(os.environ)
    examination = Examination.from_environment(os.environ)
    sums_on = device if device.type == "cuda" else CPU
    if examination is not None and examination.apart:
        return IsolatedSession()
    if examination is not None and examination.recording:
        from runtime.worker.recorded_join import Joining, Recording, Succeeding

        path = Path(examination.recording)
        newcomer = Succeeding if os.environ.get(RANKS, "0") != "0" else Joining
        return newcomer(path, sums_on) if examination.joins else Recording(path, examination.at, sums_on)
    if examination is not None and examination.backwards:
        from runtime.worker.recorded_join import Backwards

        return Backwards(sums_on)
    return SingleSession(sums_on)


def worlds() -> Worlds | None:
    """The worlds in which it matters how many shards there are; None: none, or they are not known."""
    return WorkerEnvironment.from_environ(os.environ).worlds if os.environ.get(AGENT_SOCKET) else None


def device(given: str | torch.device | None) -> torch.device:
    """The device for batches, which becomes the current device. "cuda", or None if there is CUDA, is this worker's own
    CUDA device. Raises ConfigError."""
    available = torch.cuda.is_available()
    if given is None and not available:
        _check_without_gpu()
    try:
        chosen = torch.device(("cuda" if available else "cpu") if given is None else given)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f'device={given!r} is none of torch\'s: write "cpu" or "cuda:0"') from error
    if chosen.type != "cuda":
        return chosen
    count = torch.cuda.device_count() if available else 0
    if (chosen.index or 0) >= count:
        raise ConfigError(f'device={given!r}: torch sees {count} CUDA devices here; leave device= out, or write "cpu"')
    if chosen.index is None:
        chosen = torch.device("cuda", _own_gpu(count))
    torch.cuda.set_device(chosen)
    return chosen


def _check_without_gpu() -> None:
    """Raise ConfigError if this machine has GPUs for which torch was built, and torch cannot use them: a worker that
    trains on its CPU without a word would hold up all others."""
    found = sorted(glob.glob(GPU_FILES))
    if torch.version.cuda is None or not found or _HIDDEN.match(os.environ.get(VISIBLE, "0")):
        return
    try:
        torch.cuda.init()
        because = "it finds none"
    except Exception as error:
        because = str(error).split("\n")[0].rstrip(".")
    raise ConfigError(
        f"this machine has GPUs ({', '.join(found)}), but torch {torch.__version__}, built for CUDA "
        f"{torch.version.cuda}, cannot use them: {because}. Mostly the driver is older than torch's CUDA: nvidia-smi "
        'shows what it supports. To train on the CPU on purpose, write elastic.join(device="cpu"), or set '
        f"{VISIBLE}=-1."
    )


def _own_gpu(count: int) -> int:
    """The index of this worker's GPU, of so many: the one that its predecessors in the slot had, or that with the
    number of the slot. Raises ConfigError if that GPU is gone, or belongs to another worker."""
    slot, told = int(os.environ.get(SLOT, "0")), os.environ.get(DEVICE, "")
    if told:
        here = [uuid_of(torch.device("cuda", index)) for index in range(count)]
        if told not in here:
            raise ConfigError(
                f"{told}, on which the workers of slot {slot} have trained, is gone: torch sees {', '.join(here)}, "
                "which other slots may use. Look for the GPU with nvidia-smi, and in the kernel's log for Xid. Once it "
                "is back, start the agent of this node again; until then the job goes on without this slot."
            )
        return slot % count if here[slot % count] == told else here.index(told)
    # Whoever has set NCCL_HOSTID, or given this worker a GPU of its own, knows what he does.
    alone = count == 1 and VISIBLE in os.environ
    if slot >= count and os.environ.get(RING) == RingKind.NCCL and not alone and "NCCL_HOSTID" not in os.environ:
        raise ConfigError(
            f"--ring nccl: worker {slot} of this node would share a GPU, as torch sees {count} here, and NCCL refuses "
            f"that. Start at most {count} workers and spares on this node; or share GPUs with --ring tcp."
        )
    return slot % count
