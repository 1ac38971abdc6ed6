"""`python -m elastic.agent [--wait] OPTIONS`.

What takes long at the start of an agent is what its workers import: torch. So the fork server is started first, and
imports side by side with the agent. With --wait all of that is done beforehand: the agent itself, which may be the
only one that uses the job's directory, begins when a byte comes on its standard input.
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
    """The fork server of the job that these options name. None where workers cannot be forked, and for options that
    the agent will not accept: it says so itself."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--job-dir", "--node", "--handover"):
        parser.add_argument(option)
    options, _ = parser.parse_known_args(words)
    if options.job_dir is None or options.node is None or options.handover is not None:
        return None  # with --handover there are workers already: those that are to come have time
    job_dir = Path(options.job_dir).resolve()
    try:
        # As codec.job_to_json writes it, without what reading it all would import. The agent itself checks it.
        job = json.loads((job_dir / "job.json").read_bytes())
        variables = dict(pair.split("=", 1) for pair in job["env"])
        return start_fork_server(job["command"], variables, job_dir / "logs", options.node) if job["fork"] else None
    except (ElasticError, OSError, ValueError, KeyError, TypeError):
        return None


def wait_for_begin() -> None:
    """Raises SystemExit if nobody is left to say it."""
    if not os.read(STDIN, 1):
        sys.exit(1)


def main() -> int:
    try:
        os.fstat(STDIN)
    except OSError:  # closed: its number would be that of something else, and replaced below
        os.open(os.devnull, os.O_RDONLY)
    fork_server = start_early(sys.argv[1:])
    gc.disable()  # imports leave hardly any garbage, and to look for it is a tenth of their time
    from elastic.agent import agent

    gc.freeze()
    gc.enable()
    if WAIT in sys.argv[1:]:
        sys.argv.remove(WAIT)  # a program that takes this one's place begins at once
        wait_for_begin()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, STDIN)
    os.close(nothing)
    return agent.main(fork_server)


if __name__ == "__main__":
    sys.exit(main())
