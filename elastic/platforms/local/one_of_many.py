"""Several processes of one command on one machine, of which one acts and the others wait for it and end as it does.

    mpirun -n 4 elastic run train.py      local rank 0 runs a job of four workers

They meet in a directory: the one that acts holds the lock of the file `lead` and writes its exit code there; each of
the others leaves a file with the processors it may run on, which a launcher has often divided among them. The one that
acts renames it, so that the others know that it was there, however soon it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from elastic.errors import ConfigError, ExitCode
from elastic.platforms.local.outer_launcher import Launch
from elastic.records.files import write_atomically

MEET_S = 30.0
"""Until all are there. A launcher starts them together; imports take a second, on a busy machine some."""
PART_S = 2.0
ACTING_POLL_S = 0.02


def lead(launch: Launch, act: Callable[[], int]) -> int:
    """As local rank 0, on the processors of all: the exit code of `act`. Passes on what it raises."""
    home = _home(launch)
    held = os.open(home / "lead", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    code = int(ExitCode.SCRIPT_FAILED)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        others = [home / f"processors.{rank}" for rank in range(1, launch.local_size)]
        _await(lambda: all(path.exists() for path in others), MEET_S)
        known = [path.rename(_met(path)).read_text() for path in others if path.exists()]
        os.sched_setaffinity(0, os.sched_getaffinity(0).union(int(cpu) for text in known for cpu in text.split()))
        code = int(act())
        return code
    except ConfigError:
        code = int(ExitCode.BAD_INPUT)
        raise
    finally:
        os.pwrite(held, str(code).encode(), 0)
        os.close(held)
        _await(lambda: not any(path.exists() or _met(path).exists() for path in others), PART_S)
        shutil.rmtree(home, ignore_errors=True)


def follow(launch: Launch) -> int:
    """Wait for local rank 0. Returns its exit code; raises ConfigError if it never came."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the process that runs the job has got it too, and says when it is over
    home = _home(launch)
    mine = home / f"processors.{launch.local_rank}"
    write_atomically(mine, " ".join(map(str, sorted(os.sched_getaffinity(0)))).encode())
    with contextlib.ExitStack() as stack:
        stack.callback(mine.unlink, missing_ok=True)
        stack.callback(_met(mine).unlink, missing_ok=True)
        if not _await(lambda: not mine.exists() or _is_led(home / "lead"), MEET_S):
            raise ConfigError(
                f"{launch.launcher} started this as process {launch.local_rank} of {launch.local_size}, and process 0, "
                f"which runs the job, is not here after {MEET_S:g} s"
            )
        held = os.open(home / "lead", os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, held)
        fcntl.flock(held, fcntl.LOCK_SH)
        code = os.pread(held, 16, 0).decode()
    return int(code) if code else ExitCode.SCRIPT_FAILED


def _home(launch: Launch) -> Path:
    name = hashlib.sha256(launch.key.encode()).hexdigest()[:16]
    home = Path(tempfile.gettempdir()) / f"elastic-siblings-{os.getuid()}-{name}"
    home.mkdir(0o700, exist_ok=True)
    if home.stat(follow_symlinks=False).st_uid != os.getuid():
        raise ConfigError(f"{home} belongs to somebody else; set TMPDIR to a directory of your own")
    return home


def _met(processors: Path) -> Path:
    return processors.with_name(f"met.{processors.name}")


def _is_led(lead: Path) -> bool:
    """Whether somebody acts, or has done so and said how it ended; a file of long ago is neither."""
    try:
        descriptor = os.open(lead, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return bool(os.pread(descriptor, 16, 0))
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)


def _await(reached: Callable[[], bool], limit_s: float) -> bool:
    """Files of other processes: there is nothing to wait on."""
    deadline_s = time.monotonic() + limit_s
    while not reached():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(ACTING_POLL_S)
    return True
