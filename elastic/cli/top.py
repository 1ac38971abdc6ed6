"""`elastic top`: what a fleet is doing, looked at again and again."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from typing import Any

from elastic.cli.where import EXIT_CODES, add_replicas, client_of
from elastic.errors import ConfigError, ElasticError, ExitCode

ENDED_SHOWN = 5

EXAMPLES = """\
examples:
  elastic top --rendezvous 127.0.0.1:7070               until Ctrl-C
  elastic top --rendezvous 127.0.0.1:7070 --members     a line for each member, too
  elastic top --rendezvous 127.0.0.1:7070 --looks 2 --json | tail -1 | jq '.jobs[].steps_per_s'

On a terminal the newest look stays; elsewhere one comes below the other. A rate is that between two looks.
"""


def add(verbs: Any) -> None:
    verb = verbs.add_parser(
        "top",
        help="what a fleet is doing, live: its jobs, how fast they are, and its nodes",
        description="Show the jobs of a fleet, their members and steps a second, and its nodes, until Ctrl-C.",
        epilog=EXAMPLES + EXIT_CODES,
    )
    add_replicas(verb)
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


def _looks(options: argparse.Namespace) -> None:
    from elastic.fleet import top

    client = client_of(options)
    live = sys.stdout.isatty() and not options.json
    before, before_s = None, 0.0
    for number in itertools.count(1):
        try:
            now, now_s = top.look(client), time.monotonic()
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
