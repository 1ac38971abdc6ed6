"""How this process was started: by an agent, alone, or for an examination; and on which device it runs."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from elastic import stop_signals
from elastic.agent.worker import held_signals
from elastic.agent.worker.environment import AGENT_SOCKET, SLOT, THREADS, WorkerEnvironment
from elastic.agent.worker.examination import Examination
from elastic.errors import ConfigError
from elastic.protocol.shard_advice import Worlds
from runtime.data.loader import check_count
from runtime.guards import checks
from runtime.reduction.flat_pool import CPU
from runtime.session import Session
from runtime.worker.isolated_shards import IsolatedSession
from runtime.worker.single import SingleSession


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
        from runtime.worker.recorded_join import Joining, Recording

        path = Path(examination.recording)
        return Joining(path, sums_on) if examination.joins else Recording(path, examination.at, sums_on)
    return SingleSession(sums_on)


def worlds() -> Worlds | None:
    """The worlds in which it matters how many shards there are; None: none, or they are not known."""
    return WorkerEnvironment.from_environ(os.environ).worlds if os.environ.get(AGENT_SOCKET) else None


def device(given: str | torch.device | None) -> torch.device:
    """The device for batches, which becomes the current device. "cuda", or None if there is CUDA, is this worker's own
    CUDA device. Raises ConfigError."""
    available = torch.cuda.is_available()
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
        chosen = torch.device("cuda", int(os.environ.get(SLOT, "0")) % count)
    torch.cuda.set_device(chosen)
    return chosen
