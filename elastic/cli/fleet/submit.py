"""`elastic submit`: a job for a fleet."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic.cli.fleet.jobs import wait_for
from elastic.cli.job.run import in_a_file
from elastic.cli.options import EXIT_CODES, add_answer, add_replicas, answer, client_of
from elastic.config import JobSpec, job_from_toml
from elastic.errors import ConfigError
from elastic.fleet.documents import check_for_fleet

if TYPE_CHECKING:
    from elastic.fleet.client import FleetClient

EXAMPLES = """\
examples:
  elastic submit job.toml --rendezvous 127.0.0.1:7070
  elastic submit job.toml --rendezvous 127.0.0.1:7070 --wait           ends with the job's exit code
  elastic submit job.toml --rendezvous 127.0.0.1:7070 --resume train-1

job.toml:
  name = "train"
  command = ["python", "train.py", "--lr", "3e-4"]
  directory = "/srv/train"              where that is, on every node
  workers = 4
  min_workers = 2                       it starts when these fit, all or none
  priority = 5                          before those with less, which it may preempt; default 0
  owner = "vision"                      whose quota it uses; with certificates the name in yours counts
  labels = ["gpu=h100"]                 only on nodes whose agents have these
  checkpoint_dir = "s3://bucket/runs"   which every node reaches; each job has a directory in it
  env_from = "/etc/train/secrets.env"   NAME=VALUE lines, read on each node: for what the fleet is not to know
  [env]
  OMP_NUM_THREADS = "4"
"""


def add(verbs: Any) -> None:
    verb = verbs.add_parser(
        "submit",
        help="give a fleet a job",
        description="Give a fleet a job, which starts when its minimum of workers fits. Prints the job's name.",
        epilog=f"{EXAMPLES}\nother fields, and their defaults; for true and false, the value that is not the "
        f"default:\n{in_a_file()}\n{EXIT_CODES}",
    )
    verb.add_argument("file", type=Path, metavar="JOB.TOML")
    add_replicas(verb)
    verb.add_argument(
        "--resume", metavar="JOB", help="go on from the newest checkpoint of this ended job, which this machine reads"
    )
    verb.add_argument("--priority", type=int, metavar="N", help="instead of the priority in the file")
    verb.add_argument("--wait", action="store_true", help="wait until the job is over, and exit with its exit code")
    add_answer(verb, _submit)


def _submit(options: argparse.Namespace) -> int:
    client = client_of(options)
    spec = read_job_file(options.file)
    if options.priority is not None:
        spec = replace(spec, priority=options.priority)
    resume = f"{options.resume}@{_newest_checkpoint(client, options.resume)}" if options.resume else ""
    told = client.submit(spec, resume)
    name = told["job"]
    if told["larger"]:
        print(f"elastic: {name} waits, and is {told['larger']}", file=sys.stderr, flush=True)
    if not options.wait:
        return answer(options, told, name)
    print(f"elastic: {name}", file=sys.stderr, flush=True)
    return wait_for(options, client, name)


def read_job_file(path: Path) -> JobSpec:
    """A job for a fleet. Raises ConfigError, with the line where there is one."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        because = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"{path} cannot be read: {because}; give a job in TOML") from error
    spec = job_from_toml(text, str(path))
    try:
        check_for_fleet(spec)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return spec


def _newest_checkpoint(client: FleetClient, job: str) -> str:
    """The newest of that job's that is whole. Raises ConfigError if there is none."""
    from elastic.checkpoints.series import Series
    from elastic.checkpoints.storage import storage_at

    before = client.job(job)
    storage = storage_at(before["checkpoints"])
    try:
        found, skipped = Series(storage).newest(before["identity"])
    except OSError as error:
        raise ConfigError(f"{storage.url} cannot be read from here: {error}") from error
    for other in skipped:
        print(f"elastic: skipped the checkpoint {other.name}: {other.problem}", file=sys.stderr)
    if found is None:
        raise ConfigError(f"{storage.url} has no whole checkpoint of {before['job']}; submit without --resume")
    print(f"elastic: goes on from step {found.name.step}, checkpoint {found.name}", file=sys.stderr)
    return str(found.name)
