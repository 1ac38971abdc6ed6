"""`elastic logs`: what workers have printed."""

from __future__ import annotations

import argparse
from typing import Any

from elastic.cli.options import EXIT_CODES, add_either, client_of, job_dir_of
from elastic.errors import ExitCode

EXAMPLES = """\
examples:
  elastic logs -f                                              of the newest job in ./elastic-jobs
  elastic logs --rendezvous 127.0.0.1:7070                     of the only job: all its workers
  elastic logs --rendezvous 127.0.0.1:7070 --job train-1 -f gpu-7.0.0
  elastic logs --job-dir elastic-jobs/train-1 local.0.0
"""


def add(verbs: Any) -> None:
    verb = verbs.add_parser(
        "logs",
        help="what workers have printed",
        description="Show the logs of a job's workers, wherever they are.",
        epilog=EXAMPLES + EXIT_CODES,
    )
    verb.add_argument("worker", metavar="WORKER", nargs="?", help="one of them (default: all)")
    add_either(verb)
    verb.add_argument("--job", metavar="JOB", help="with --rendezvous (default: the only one that is not over)")
    verb.add_argument("-f", "--follow", action="store_true", help="go on with what comes, until Ctrl-C")
    verb.add_argument("--json", action="store_true", help='as JSON lines: {"log", "text"}')
    verb.set_defaults(verb=_logs)


def _logs(options: argparse.Namespace) -> int:
    from elastic.fleet import remote_logs

    if (job_dir := job_dir_of(options)) is not None:
        source: remote_logs.LogSource = remote_logs.DirectoryLogs(job_dir)
    else:
        client = client_of(options)
        source = remote_logs.FleetLogs(client, client.job(options.job or "")["job"])
    remote_logs.show(source, options.worker, follow=options.follow, as_json=options.json)
    return ExitCode.DONE
