"""`python -m elastic.agent [--wait] OPTIONS`.

The import of torch takes most of the start, so on an idle machine the fork server is started first and imports while
the agent does. On a busy machine both would take processor time from the processes that work there, so one imports
after the other. With --wait all imports are done beforehand, and the agent begins when a byte comes on its standard
input. Only then does it use the job's directory, which at most one agent may do.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from elastic.agent.process.process_start import ForkServerProcess, start_fork_server
from elastic.errors import ElasticError

WAIT = "--wait"
STDIN = 0


def start_early(words: Sequence[str]) -> ForkServerProcess | None:
    """Start the fork server of the job that these options name. None: workers cannot be forked, or bad options."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--job-dir", "--node"):
        parser.add_argument(option)
    options, _ = parser.parse_known_args(words)
    if options.job_dir is None or options.node is None:
        return None
    job_dir = Path(options.job_dir).resolve()
    try:
        # Read as plain JSON, because the codec would import too much. The agent itself checks the file.
        job = json.loads((job_dir / "job.json").read_bytes())
        variables = dict(pair.split("=", 1) for pair in job["env"])
        if not job["fork"]:
            return None
        return start_fork_server(job["command"], variables, job_dir / "logs", options.node, restarts=job["restart"])
    except (ElasticError, OSError, ValueError, KeyError, TypeError):
        return None


def has_idle_processor(load: float, processors: int, own: int) -> bool:
    """Whether one processor is left for the fork server. load: processes that ran or waited for a processor of this
    machine in the last minute, on average. own: on how many of its processors this process may run."""
    return own > 1 and processors - load >= 1


def wait_for_begin() -> None:
    """Wait for the byte that says to begin. Raises SystemExit if standard input was closed instead."""
    if not os.read(STDIN, 1):
        sys.exit(1)


def main() -> int:
    try:
        os.fstat(STDIN)
    except OSError:  # closed: another file would get its number, and be replaced below
        os.open(os.devnull, os.O_RDONLY)
    idle = has_idle_processor(os.getloadavg()[0], os.cpu_count() or 1, len(os.sched_getaffinity(0)))
    fork_server = start_early(sys.argv[1:]) if idle else None
    gc.disable()  # imports leave hardly any garbage, and to look for it is a tenth of their time
    from elastic.agent import agent

    if not idle:
        fork_server = start_early(sys.argv[1:])
    gc.freeze()
    gc.enable()
    if WAIT in sys.argv[1:]:
        sys.argv.remove(WAIT)
        wait_for_begin()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, STDIN)
    os.close(nothing)
    return agent.main(fork_server)


if __name__ == "__main__":
    sys.exit(main())
