"""`elastic stacks` and `elastic kill`: what one worker does now, and its death, to see the job survive it.

Both commands ask the leader of the job, which tells the worker's agent.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from elastic.cli.options import EXIT_CODES, add_answer, add_either, answer, client_of, job_dir_of
from elastic.errors import ConfigError, ElasticError
from elastic.rendezvous.job_status import job_status

if TYPE_CHECKING:
    from elastic.fleet.remote_logs import LogSource

TIMEOUT_S = 5.0

STACKS_EXAMPLES = """\
examples:
  elastic stacks local.1.0                                     of the newest job in ./elastic-jobs
  elastic stacks gpu-7.0.0 --rendezvous 127.0.0.1:7070 --job train-1

The worker goes on: its threads write where they are to its log, also while C code holds the interpreter.
"""

KILL_EXAMPLES = """\
examples:
  elastic kill local.1.0                                       of the newest job in ./elastic-jobs
  elastic kill gpu-7.0.0 --rendezvous 127.0.0.1:7070 --job train-1

SIGKILL: the worker ends as if its machine had failed. The others finish the step, and a new worker takes its place.
"""


def add(verbs: Any) -> None:
    for name, act, text, about, examples in (
        ("stacks", _stacks, "where the threads of a worker are now", "Show the stacks of a worker.", STACKS_EXAMPLES),
        ("kill", _kill, "kill a worker, to see the job survive it", "Kill a worker by SIGKILL.", KILL_EXAMPLES),
    ):
        verb = verbs.add_parser(name, help=text, description=about, epilog=examples + EXIT_CODES)
        verb.add_argument("worker", metavar="WORKER", help="such as local.1.0; `elastic status` shows them")
        add_either(verb)
        verb.add_argument("--job", metavar="JOB", help="with --rendezvous (default: the only one that is not over)")
        add_answer(verb, act)


def _stacks(options: argparse.Namespace) -> int:
    from elastic.fleet import remote_logs

    source, ask = _job(options)
    text = remote_logs.stacks(source, options.worker, lambda: ask(False))
    return answer(options, {"worker_id": options.worker, "stacks": text}, text.rstrip("\n"))


def _kill(options: argparse.Namespace) -> int:
    _, ask = _job(options)
    ask(True)
    said = f"the agent of {options.worker} kills it; `elastic story {options.worker}` tells what follows"
    return answer(options, {"worker_id": options.worker, "killed": True}, said)


def _job(options: argparse.Namespace) -> tuple[LogSource, Callable[[bool], None]]:
    """The logs of the job, and what asks for the worker's stacks (False) or kills it (True)."""
    from elastic.fleet import remote_logs
    from elastic.records.job_directory import read_json
    from elastic.rendezvous.operator_client import signal_worker

    job_dir = job_dir_of(options)
    if job_dir is None:
        client = client_of(options)
        job = client.job(options.job or "")["job"]
        return remote_logs.FleetLogs(client, job), lambda kill: client.signal_worker(job, options.worker, kill=kill)
    if options.job is not None:
        raise ConfigError(f"{options.job}: a directory holds one job; give --job with --rendezvous only")
    status = job_status(job_dir)
    if status["state"] == "closed":
        raise ConfigError(f"the job in {job_dir} is over: {status['because']}")
    where = read_json(job_dir / "rendezvous.json")
    if where is None:
        raise ElasticError("the job is being started; nobody leads it yet")
    address = where["address"]
    return (
        remote_logs.DirectoryLogs(job_dir),
        lambda kill: signal_worker(address, options.worker, kill=kill, timeout_s=TIMEOUT_S),
    )
