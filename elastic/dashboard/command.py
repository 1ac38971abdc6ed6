"""`elastic dashboard`: the page of a job of this machine, or of a fleet."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic.cli.local.dashboard_process import check_installed
from elastic.cli.options import EXIT_CODES, add_either, certs_of, client_of, job_dir_of, keyring_of
from elastic.dashboard import server
from elastic.errors import ExitCode
from elastic.security.roles import Role

POLL_S = 0.25
"""Seconds between two looks at the files of a job of this machine, while a page shows it."""

FLEET_POLL_S = 1.0

EXAMPLES = """\
examples:
  elastic run --dashboard train.py                       with the job, until it is over
  elastic dashboard                                      of the newest job in ./elastic-jobs, also if it is over
  elastic dashboard --job-dir elastic-jobs/train-1 --listen 8080
  elastic dashboard --rendezvous 10.0.0.1:7070 --certs ~/certs
  ssh -L 7171:127.0.0.1:7171 gpu-head                    from another machine, which opens the printed address

The address that is printed has a key: who has it may see the job and, with an operator's certificate or on this
machine, act on it. Until Ctrl-C.
"""


def add(verbs: Any) -> None:
    verb = verbs.add_parser(
        "dashboard",
        help="a page that shows a job, or a fleet, live",
        description="Serve a page, on this machine only, that shows a job or a fleet, live.",
        epilog=EXAMPLES + EXIT_CODES,
    )
    add_either(verb)
    verb.add_argument(
        "--listen",
        metavar="[HOST:]PORT",
        help=f"a loopback address (default {server.HOST}:{server.PORT}, or a free port if that is taken)",
    )
    verb.set_defaults(verb=_dashboard, job=None)


def _dashboard(options: argparse.Namespace) -> int:
    check_installed()
    job_dir = job_dir_of(options)
    if job_dir is not None:
        serve_directory(job_dir, options.listen, None, _say)
        return ExitCode.DONE
    from elastic.dashboard.app import Dashboard
    from elastic.dashboard.feeds import FleetFeed
    from elastic.dashboard.fleet_source import FleetClientSource

    client = client_of(options)
    keyring = keyring_of(certs_of(options), Role.OPERATOR, Role.VIEWER)
    may_act = keyring is None or getattr(keyring.current().identity, "role", None) is Role.OPERATOR
    client.overview()  # a fleet that does not answer is said before a page is opened
    feed = FleetFeed(FleetClientSource(client, may_act=may_act), FLEET_POLL_S)
    listening = server.listen(options.listen)
    server.serve(listening, lambda access: Dashboard(access, None, feed, options.rendezvous), feed.run, _say)
    return ExitCode.DONE


def serve_directory(job_dir: Path, listen: str | None, run: int | None, say: Callable[[str], None]) -> None:
    """The page of one job of this machine. run: as of DirectorySource. Raises ConfigError."""
    from elastic.dashboard.app import Dashboard
    from elastic.dashboard.directory_source import DirectorySource
    from elastic.dashboard.feeds import JobFeed

    feed = JobFeed(DirectorySource(job_dir, run), POLL_S, leader_only=False)
    name = Path(os.path.abspath(job_dir)).name  # also of "..", which no browser asks for
    server.serve(server.listen(listen), lambda access: Dashboard(access, feed, None, name), feed.run, say)


def _say(address: str) -> None:
    print(f"elastic: dashboard at {address} (on this machine only; Ctrl-C ends it)", file=sys.stderr, flush=True)
