"""`elastic dashboard`: the page of a job of this machine, or of a fleet."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from elastic.cli.options import EXIT_CODES, add_either, certs_of, client_of, job_dir_of, keyring_of
from elastic.errors import ExitCode
from elastic.observability.dashboard import server
from elastic.platforms.local.dashboard_process import check_installed
from elastic.security.roles import Role

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
    from elastic.observability.dashboard import pages

    job_dir = job_dir_of(options)
    if job_dir is not None:
        pages.serve_directory(job_dir, options.listen, None, _say)
        return ExitCode.DONE
    client = client_of(options)
    keyring = keyring_of(certs_of(options), Role.OPERATOR, Role.VIEWER)
    may_act = keyring is None or getattr(keyring.current().identity, "role", None) is Role.OPERATOR
    client.overview()  # a fleet that does not answer is said before a page is opened
    pages.serve_fleet(client, options.listen, options.rendezvous, _say, may_act=may_act)
    return ExitCode.DONE


def _say(address: str) -> None:
    print(f"elastic: dashboard at {address} (on this machine only; Ctrl-C ends it)", file=sys.stderr, flush=True)
