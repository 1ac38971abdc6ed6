"""The command line of an agent, read and checked before the agent does anything."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic.config import JobSpec, check_name
from elastic.errors import ConfigError
from elastic.preemption import selection
from elastic.preemption.provider import NoticeSource
from elastic.process import log
from elastic.records.files import read_job
from elastic.rendezvous import reach as reaching
from elastic.rendezvous.reach import Reach

GRACE_S = 30.0
"""Default seconds from SIGTERM until this process is killed: the default of Kubernetes."""

LEAVES_AFTER_LOSS = "ELASTIC_LEAVES_AFTER_LOSS"
"""Variable of whoever starts an agent: 1, if this node is to be left when it has lost a worker."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """What an agent has to do.

    slots: how many workers this node brings. Spares are started in addition, and only the leader decides which workers
    become spares. grace_s: seconds from SIGTERM until this process may be killed: time to leave in order. None: GRACE_S
    if the job goes on elsewhere, else SIGTERM stops the workers at once. leaves_after_loss: whether all workers leave
    this node when one of them is lost.
    """

    spec: JobSpec
    job_dir: Path
    node: str
    slots: int
    grace_s: float | None
    notices: Sequence[NoticeSource]
    reach: Reach
    leaves_after_loss: bool = False


def of_words(words: Sequence[str] | None = None) -> Assignment:
    """Parse the command line. Raises ConfigError."""
    parser = argparse.ArgumentParser(prog="python -m elastic.agent", description="The daemon of one node.")
    parser.add_argument("--job-dir", type=Path, required=True, help="directory with job.json and rendezvous.json")
    parser.add_argument("--node", required=True, help="name of this node, unique in the job")
    parser.add_argument("--slots", type=int, required=True, help="number of workers on this node")
    selection.add_option(parser)
    parser.add_argument(
        "--grace",
        type=float,
        metavar="S",
        help="seconds from SIGTERM until this process is killed (terminationGracePeriodSeconds); default: "
        f"{GRACE_S:g} where the job goes on elsewhere, and none where it does not",
    )
    reaching.add_options(parser)
    log.add_options(parser)  # agent.main has obeyed them already
    options = parser.parse_args(words)
    check_name("--node", options.node)
    if options.slots < 1:
        raise ConfigError(f"--slots={options.slots} must be >= 1")
    selection.check_grace(options.grace)
    notices = selection.sources(selection.check(options.notices), os.environ)
    job_dir = options.job_dir.resolve()
    spec, reach = read_job(job_dir), reaching.of_options(options)
    leaves = os.environ.get(LEAVES_AFTER_LOSS) == "1"
    return Assignment(spec, job_dir, options.node, options.slots, options.grace, notices, reach, leaves)
