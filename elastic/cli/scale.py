"""`elastic scale`: another number of workers for a job of a fleet."""

from __future__ import annotations

import argparse
import json
from typing import Any

from elastic.cli.options import EXIT_CODES, add_replicas, client_of
from elastic.errors import ConfigError, ExitCode

EXAMPLES = """\
examples:
  elastic scale train-1 8 --rendezvous 127.0.0.1:7070
  elastic scale train 2 --rendezvous 127.0.0.1:7070 --json

From min_workers to max_workers of the job's file. Nothing is interrupted: workers come and leave between two steps, and
no bit changes. A larger job gets slots where there are free ones; `elastic top` shows how it comes to it.
"""


def add(verbs: Any) -> None:
    verb = verbs.add_parser(
        "scale",
        help="give a job of a fleet another number of workers",
        description="Give a job of a fleet another number of workers, while it trains or waits.",
        epilog=EXAMPLES + EXIT_CODES,
    )
    verb.add_argument("job", metavar="JOB")
    verb.add_argument("workers", metavar="N", type=int, help="how many it is to have")
    add_replicas(verb)
    verb.add_argument("--json", action="store_true", help="as one JSON object")
    verb.set_defaults(verb=_scale)


def _scale(options: argparse.Namespace) -> int:
    if options.workers < 1:
        raise ConfigError(f"N={options.workers} must be at least 1; `elastic stop` ends a job")
    told = client_of(options).scale(options.job, options.workers)
    said = f"{told['job']} is to have {told['workers']} workers; it was {told['before']}"
    print(json.dumps(told) if options.json else said)
    return ExitCode.DONE
