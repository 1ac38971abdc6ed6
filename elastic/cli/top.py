"""`elastic top`: what a fleet, or the jobs of this machine, are doing, looked at again and again."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic.cli.where import EXIT_CODES, add_either, client_of, job_dirs_here
from elastic.errors import ConfigError, ElasticError, ExitCode

ENDED_SHOWN = 5

EXAMPLES = """\
examples:
  elastic top                                           the jobs that run in ./elastic-jobs, or the newest there
  elastic top --rendezvous 127.0.0.1:7070               until Ctrl-C
  elastic top --rendezvous 127.0.0.1:7070 --members     a line for each member, too
  elastic top --rendezvous 127.0.0.1:7070 --looks 2 --json | tail -1 | jq '.jobs[].steps_per_s'

On a terminal the newest look stays; elsewhere one comes below the other. A rate is that between two looks.
"""


def add(verbs: Any) -> None:
    verb = verbs.add_parser(
        "top",
        help="what a fleet, or this machine, is doing, live: jobs, how fast they are, and nodes",
        description="Show jobs, their members and steps a second, and the nodes of a fleet, until Ctrl-C.",
        epilog=EXAMPLES + EXIT_CODES,
    )
    add_either(verb)
    verb.add_argument("--every", type=float, default=2.0, metavar="S", help="seconds (default %(default)g)")
    verb.add_argument("--looks", type=int, metavar="N", help="end after so many (default: go on)")
    verb.add_argument("--members", action="store_true", help="with the members of each job")
    verb.add_argument("--json", action="store_true", help="as one JSON object a line")
    verb.set_defaults(verb=_top)


def _top(options: argparse.Namespace) -> int:
    if not 0 < options.every < float("inf"):
        raise ConfigError(f"--every {options.every:g} must be a positive number of seconds")
    if options.looks is not None and options.looks < 1:
        raise ConfigError(f"--looks {options.looks} must be at least 1")
    _looks(options)
    return ExitCode.DONE


def _look_of(options: argparse.Namespace) -> Callable[[], dict[str, Any]]:
    from elastic.fleet import top

    if options.job_dir is not None:
        return lambda: top.look_here([options.job_dir])
    if not options.rendezvous:
        return lambda: top.look_here(_dirs_here())
    client = client_of(options)
    return lambda: top.look(client)


def _dirs_here() -> list[Path]:
    """The directories of all jobs that run in ./elastic-jobs; if none runs, that of the job which was started last."""
    found, live = job_dirs_here()
    return found[: max(live, 1)]


def _looks(options: argparse.Namespace) -> None:
    from elastic.fleet import top

    look = _look_of(options)
    live = sys.stdout.isatty() and not options.json
    before, before_s = None, 0.0
    for number in itertools.count(1):
        try:
            now, now_s = look(), time.monotonic()
        except ConfigError:
            raise
        except ElasticError as error:
            if number == 1 or options.looks is not None:
                raise
            print(f"elastic: {error}; looking again", file=sys.stderr, flush=True)
        else:
            shown = top.facts(now, now_s, before, before_s, ENDED_SHOWN)
            before, before_s = now, now_s
            _show(json.dumps(shown) if options.json else top.text(shown, members=options.members), live=live)
        if number == options.looks:
            return
        time.sleep(options.every)


def _show(text: str, *, live: bool) -> None:
    """live: in place of what the terminal shows."""
    home = "\033[H\033[J" if live else ""
    print(f"{home}{text}" + ("" if live or text.startswith("{") else "\n"), flush=True)
