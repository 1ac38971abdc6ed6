"""`elastic run --dashboard`: the dashboard of the job in a process of its own, whose end ends nothing else."""

from __future__ import annotations

import importlib.util
import selectors
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elastic.errors import ConfigError
from elastic.process import children

MODULE = "elastic.observability.dashboard"
LOG = "dashboard.log"

START_S = 15.0
"""Seconds in which the dashboard has to listen; training waits so long. It takes one, and some on a busy machine."""

END_S = 5.0
"""Seconds for the pages to get the job's end."""


def check_installed() -> None:
    """Raises ConfigError if what the dashboard needs is not installed."""
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the dashboard needs {' and '.join(missing)}, of an extra: pip install 'elastic-ring[dashboard]'"
        )


@contextmanager
def beside(job_dir: Path) -> Iterator[str]:
    """A dashboard of the job until the end of the context. Yields a sentence with the address to open, or why there is
    none: then training goes on without it."""
    command = children.python(MODULE, "--job-dir", str(job_dir))
    process = children.start(command, job_dir / "logs" / LOG, stdout=subprocess.PIPE)
    try:
        yield _how_it_started(process)
    finally:
        children.ask(process)
        children.wait_or_kill(process, END_S)
        assert process.stdout is not None
        process.stdout.close()


def _how_it_started(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        in_time = selector.select(START_S)
    if not in_time:
        process.kill()  # nobody would hear of an address that comes later
        because = f"it did not listen within {START_S:g} s and was ended"
    elif address := process.stdout.readline().decode().strip():
        return f"dashboard at {address}"
    else:
        because = f"it has ended; see logs/{LOG}"
    return f"there is no dashboard: {because}. Training goes on; `elastic dashboard` shows the job, too"
