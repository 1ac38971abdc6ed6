"""`elastic scale` and `elastic quota`: how many workers a job of a fleet is to have, and how many slots an owner may
count on."""

from __future__ import annotations

import argparse
from typing import Any

from elastic.cli.options import EXIT_CODES, add_answer, add_replicas, answer, client_of
from elastic.errors import ConfigError

QUOTA_EXAMPLES = """\
examples:
  elastic quota vision 8 --rendezvous 127.0.0.1:7070
  elastic quota vision 0 --rendezvous 127.0.0.1:7070                   none any more

Within its quota an owner's jobs come before all jobs that are beyond theirs, and take slots back from them. Beyond it
they run on what is left. `elastic jobs` shows all quotas, and what is used of them.
"""

SCALE_EXAMPLES = """\
examples:
  elastic scale train-1 8 --rendezvous 127.0.0.1:7070
  elastic scale train 2 --rendezvous 127.0.0.1:7070 --json

From min_workers to max_workers of the job's file. Nothing is interrupted: workers come and leave between two steps, and
no bit changes. A larger job gets slots where there are free ones; `elastic top` shows the progress.
"""


def add(verbs: Any) -> None:
    scale = verbs.add_parser(
        "scale",
        help="give a job of a fleet another number of workers",
        description="Give a job of a fleet another number of workers, while it trains or waits.",
        epilog=SCALE_EXAMPLES + EXIT_CODES,
    )
    scale.add_argument("job", metavar="JOB")
    scale.add_argument("workers", metavar="N", type=int, help="the number of workers")
    add_replicas(scale)
    add_answer(scale, _scale)
    quota = verbs.add_parser(
        "quota",
        help="set how many slots of a fleet the jobs of an owner get before others",
        description="Set an owner's quota: the slots that its jobs get before jobs of owners beyond their quota.",
        epilog=QUOTA_EXAMPLES + EXIT_CODES,
    )
    quota.add_argument("owner", metavar="OWNER", help="the name in a certificate, or `owner` of job files")
    quota.add_argument("slots", metavar="N", type=int, help="number of slots; 0: no quota")
    add_replicas(quota)
    add_answer(quota, _quota)


def _scale(options: argparse.Namespace) -> int:
    if options.workers < 1:
        raise ConfigError(f"N={options.workers} must be at least 1; `elastic stop` ends a job")
    told = client_of(options).scale(options.job, options.workers)
    said = f"{told['job']} is to have {told['workers']} workers; it was {told['before']}"
    return answer(options, told, said)


def _quota(options: argparse.Namespace) -> int:
    told = client_of(options).allow(options.owner, options.slots)
    said = f"{told['owner']} has a quota of {told['slots']} slots; it was {told['before']}"
    return answer(options, told, said)
