"""hvd.start_timeline() and hvd.stop_timeline(): the trace of the job, as `elastic trace` writes it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from elastic.agent.worker.environment import JOB_DIR
from elastic.errors import ConfigError
from runtime.frontends.horovod.current import here
from runtime.frontends.horovod.interrupts import BadArgument

WRITE_S = 120.0
_files: list[Path] = []
"""Where the trace is to be written; empty: none is asked for."""


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Have stop_timeline() write the trace of the job to this file, JSON in the trace event format. The job notes what
    it does in any case, so the trace begins with the job. mark_cycles: not used, as there are no cycles. Raises
    BadArgument if a timeline has begun, ConfigError for a process without a job of this machine."""
    here("start_timeline")
    if _files:
        raise BadArgument(f"hvd.start_timeline({file_path!r}): {_files[0]} has begun; call hvd.stop_timeline() before")
    if not os.environ.get(JOB_DIR):
        raise ConfigError("hvd.start_timeline(): a trace is of a job; start the script with `elastic run`")
    _files.append(Path(file_path).absolute())


def stop_timeline() -> None:
    """Rank 0 writes the file. Raises BadArgument if no timeline has begun, ConfigError if it cannot be written."""
    world = here("stop_timeline")
    if not _files:
        raise BadArgument("hvd.stop_timeline(): no timeline has begun; call hvd.start_timeline() before")
    path = _files.pop()
    if world.standing.rank != 0:
        return
    words = ["-m", "elastic.cli", "trace", "--job-dir", os.environ[JOB_DIR], "--output", str(path)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=WRITE_S, check=False)
    if done.returncode:
        raise ConfigError(f"hvd.stop_timeline(): {path} was not written: {done.stderr.strip()[-300:]}")
