"""`elastic rendezvous | agent | submit | jobs | logs | stop`, and what `status` and `drain` do with --rendezvous."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic.config import JobSpec, check_name, check_pairs, job_from_toml
from elastic.errors import ConfigError, ElasticError, ExitCode
from elastic.fleet.addresses import INSECURE, check_plain, check_reachable, own_address, parse
from elastic.fleet.documents import check_for_fleet
from elastic.jobdir import DEFAULT_PARENT
from elastic.spot import choose

if TYPE_CHECKING:
    from elastic.fleet.client import FleetClient

GRACE_S = 30.0
LOOK_S = 0.2

STOP_WAIT_S = 90.0
"""A job that is stopped is over by then: it is ended if it has not left in order."""

RENDEZVOUS_EXAMPLES = """\
examples:
  elastic rendezvous --etcd 127.0.0.1:2379 --listen 127.0.0.1:7070
  elastic rendezvous --etcd 10.0.0.1:2379,10.0.0.2:2379,10.0.0.3:2379 --listen 10.0.0.1:7070 --insecure

One to three of these, on different machines, with the same etcd: one of them leads, the others take over.

exit codes:
  2 bad input    130, 143 stopped
"""

AGENT_EXAMPLES = """\
examples:
  elastic agent --rendezvous 127.0.0.1:7070 --slots 2
  elastic agent --rendezvous 10.0.0.1:7070,10.0.0.2:7070 --address 10.0.0.7 --slots 8 --label gpu=h100 --insecure

Ctrl-C and SIGTERM take the node out of its jobs first, between two steps; a second one ends them at once.

exit codes:
  2 bad input    130, 143 stopped
"""

SUBMIT_EXAMPLES = """\
examples:
  elastic submit job.toml --rendezvous 127.0.0.1:7070
  elastic submit job.toml --rendezvous 127.0.0.1:7070 --wait           exit code of the job
  elastic submit job.toml --rendezvous 127.0.0.1:7070 --resume train-1

job.toml:
  name = "train"
  command = ["python", "train.py", "--lr", "3e-4"]
  directory = "/srv/train"              where that is, on every node
  workers = 4
  min_workers = 2                       it starts when these fit, all or none
  labels = ["gpu=h100"]                 only on nodes whose agents have these
  checkpoint_dir = "s3://bucket/runs"   which every node reaches; each job has a directory in it
  [env]
  OMP_NUM_THREADS = "4"
"""

JOBS_EXAMPLES = """\
examples:
  elastic jobs --rendezvous 127.0.0.1:7070
  elastic jobs --rendezvous 127.0.0.1:7070 --json | jq '.jobs[] | select(.state == "waits")'
"""

LOGS_EXAMPLES = """\
examples:
  elastic logs --rendezvous 127.0.0.1:7070                     of the only job: all its workers
  elastic logs --rendezvous 127.0.0.1:7070 --job train-1 -f gpu-7.0.0
  elastic logs --job-dir elastic-jobs/train-1 local.0.0
"""

STOP_EXAMPLES = """\
examples:
  elastic stop train-1 --rendezvous 127.0.0.1:7070

A job that trains stops after a step, with a checkpoint of it; `elastic submit --resume` goes on from there.
"""


def add(verbs: Any) -> None:
    """The verbs of a fleet."""
    _add_rendezvous(verbs)
    _add_agent(verbs)
    _add_submit(verbs)
    jobs = verbs.add_parser(
        "jobs",
        help="the jobs and nodes of a fleet",
        description="Show all jobs of a fleet, what those that wait are waiting for, and its nodes.",
        epilog=JOBS_EXAMPLES,
    )
    add_replicas(jobs)
    jobs.add_argument("--json", action="store_true", help="as one JSON object")
    jobs.set_defaults(verb=_jobs)
    _add_logs(verbs)
    stop = verbs.add_parser(
        "stop",
        help="end a job of a fleet",
        description="End a job of a fleet: in order, if it trains, and wait until it is over.",
        epilog=STOP_EXAMPLES,
    )
    stop.add_argument("job", metavar="JOB")
    add_replicas(stop)
    stop.add_argument("--json", action="store_true", help="as one JSON object")
    stop.set_defaults(verb=_stop)


def add_replicas(verb: argparse.ArgumentParser, group: Any = None) -> None:
    """--rendezvous and --insecure of a verb. group: the one in which --rendezvous has alternatives."""
    (group or verb).add_argument(
        "--rendezvous",
        required=group is None,
        metavar="HOST:PORT,...",
        help="replicas of the rendezvous, all or some",
    )
    verb.add_argument(INSECURE, action="store_true", help="speak plain text with other machines")


def client_of(options: argparse.Namespace) -> FleetClient:
    """For an operator's verb. Raises ConfigError."""
    from elastic.fleet.client import FleetClient

    replicas = parse("--rendezvous", options.rendezvous)
    check_plain("--rendezvous", replicas, insecure=options.insecure)
    return FleetClient(replicas)


# ------------------------------------------------------------------------------------------------------ daemons


def _add_rendezvous(verbs: Any) -> None:
    verb = verbs.add_parser(
        "rendezvous",
        help="serve a fleet: one replica of what decides where jobs run, and who is a member of each",
        description="One replica of a fleet's rendezvous. Everything that lasts is in etcd.",
        epilog=RENDEZVOUS_EXAMPLES,
    )
    verb.add_argument("--etcd", required=True, metavar="HOST:PORT,...", help="members of the etcd cluster, as IPs")
    verb.add_argument("--listen", required=True, metavar="HOST:PORT", help="the address that agents and users reach")
    verb.add_argument(
        "--dir",
        type=Path,
        default=Path("elastic-rendezvous"),
        metavar="DIR",
        help="for journals; nothing in it is needed again (default ./%(default)s)",
    )
    verb.add_argument(INSECURE, action="store_true", help="listen where other machines reach it, in plain text")
    verb.set_defaults(verb=_rendezvous)


def _rendezvous(options: argparse.Namespace) -> int:
    import asyncio

    from elastic.fleet.server import Server

    (listen,) = _one("--listen", parse("--listen", options.listen, any_port=True))
    endpoints = parse("--etcd", options.etcd)
    if listen.startswith(("0.0.0.0:", "[::]:")):
        raise ConfigError(f"--listen {listen} is every address; give the one that agents reach")
    check_plain("--listen", [listen], insecure=options.insecure)
    check_plain("--etcd", endpoints, insecure=options.insecure)
    _make(options.dir, "--dir")
    return asyncio.run(Server(options.dir.absolute(), endpoints, listen).run())


def _add_agent(verbs: Any) -> None:
    verb = verbs.add_parser(
        "agent",
        help="offer this machine to a fleet",
        description="The daemon of a node: it runs the workers of the jobs that the fleet places here. They end with "
        "it.",
        epilog=AGENT_EXAMPLES,
    )
    add_replicas(verb)
    verb.add_argument("--node", metavar="N", help="name of this node, unique in the fleet (default: the host's)")
    verb.add_argument("--slots", type=int, default=1, metavar="N", help="workers it takes (default %(default)s)")
    verb.add_argument(
        "--label", action="append", default=[], metavar="K=V", help="something jobs may ask for; any number of times"
    )
    verb.add_argument(
        "--address", default="127.0.0.1", metavar="HOST", help="under which other nodes reach it (default %(default)s)"
    )
    verb.add_argument(
        "--jobs-dir",
        type=Path,
        default=Path(DEFAULT_PARENT),
        metavar="DIR",
        help="on this machine; each job gets a directory in it (default ./%(default)s)",
    )
    choose.add_option(verb)
    verb.add_argument(
        "--grace",
        type=float,
        default=GRACE_S,
        metavar="S",
        help="how long a job may take to leave this node in order (default %(default)g)",
    )
    verb.set_defaults(verb=_agent)


def _agent(options: argparse.Namespace) -> int:
    import asyncio

    from elastic.fleet.charge import Site
    from elastic.fleet.daemon import Daemon, Offer
    from elastic.joblock import JobLock
    from elastic.journal import Journal, journal_path

    replicas = parse("--rendezvous", options.rendezvous)
    node = options.node if options.node is not None else default_node(socket.gethostname())
    check_name("--node", node)
    if options.slots < 1:
        raise ConfigError(f"--slots={options.slots} must be >= 1")
    check_pairs("--label", options.label)
    choose.check_grace(options.grace)
    notices = choose.check(options.notices)
    address = own_address(options.address)
    check_plain("--rendezvous", replicas, insecure=options.insecure)
    check_plain("--address", [address], insecure=options.insecure)
    check_reachable(address, replicas)
    _make(options.jobs_dir, "--jobs-dir")
    jobs_dir = options.jobs_dir.absolute()
    site = Site(
        node=node,
        address=address,
        replicas=replicas,
        jobs_dir=jobs_dir,
        notices=notices,
        grace_s=options.grace,
    )
    who = f"daemon-{node}"
    with JobLock(jobs_dir / f"{node}.lock"), Journal(journal_path(jobs_dir, who), "", who, node) as journal:
        print(f"elastic: node {node} at {address} with {options.slots} slots; jobs in {jobs_dir}", flush=True)

        async def attend() -> int:
            return await Daemon(site, Offer(options.slots, tuple(options.label)), journal).run()

        return asyncio.run(attend())


def default_node(host: str) -> str:
    """The host's name as that of a node: without its domain."""
    return "".join(c if c.isalnum() else "-" for c in host.partition(".")[0].lower()).strip("-")[:63] or "node"


def _one(option: str, values: tuple[str, ...]) -> tuple[str]:
    if len(values) != 1:
        raise ConfigError(f"{option} takes one address, not {len(values)}")
    return (values[0],)


def _make(directory: Path, option: str) -> None:
    try:
        (directory / "journal").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option} {directory}: {error.strerror}; give a directory that can be written") from error


# ------------------------------------------------------------------------------------------------------- submit


def _add_submit(verbs: Any) -> None:
    verb = verbs.add_parser(
        "submit",
        help="give a fleet a job",
        description="Give a fleet a job, which starts when its minimum of workers fits. Prints the job's name.",
        epilog=SUBMIT_EXAMPLES,
    )
    verb.add_argument("file", type=Path, metavar="JOB.TOML")
    add_replicas(verb)
    verb.add_argument(
        "--resume", metavar="JOB", help="go on from the newest checkpoint of this job, which is over; read from here"
    )
    verb.add_argument("--wait", action="store_true", help="until it is over, and end with its exit code")
    verb.add_argument("--json", action="store_true", help="as one JSON object")
    verb.set_defaults(verb=_submit)


def _submit(options: argparse.Namespace) -> int:
    client = client_of(options)
    spec = read_job_file(options.file)
    resume = f"{options.resume}@{_newest_checkpoint(client, options.resume)}" if options.resume else ""
    name = client.submit(spec, resume)
    if not options.wait:
        print(json.dumps({"job": name}) if options.json else name)
        return ExitCode.DONE
    print(f"elastic: {name}", file=sys.stderr, flush=True)
    ended = _await_end(client, name, None)
    print(json.dumps(ended) if options.json else _ended_text(ended))
    return int(ended["exit_code"])


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


def _await_end(client: FleetClient, job: str, within_s: float | None) -> dict[str, Any]:
    """The job's entry when it is over. Raises ElasticError if it is not within that time."""
    deadline_s = None if within_s is None else time.monotonic() + within_s
    while True:
        try:
            entry = client.job(job)
        except ConfigError:
            raise
        except ElasticError:  # nobody leads just now
            entry = {"state": ""}
        if entry["state"] == "ended":
            return entry
        if deadline_s is not None and time.monotonic() >= deadline_s:
            raise ElasticError(f"{job} is not over after {within_s:g} s; `elastic status` shows what it does")
        time.sleep(LOOK_S)  # a remote process: there is nothing to wait on


# ---------------------------------------------------------------------------------------------- looking and ending


def _jobs(options: argparse.Namespace) -> int:
    overview = client_of(options).overview()
    print(json.dumps(overview) if options.json else overview_text(overview))
    return ExitCode.DONE


def overview_text(overview: dict[str, Any]) -> str:
    """The jobs, oldest first, and the nodes."""
    lines = []
    for job in overview["jobs"]:
        where = ", ".join(f"{slots} on {node}" for node, slots in sorted(job["slots"].items()))
        told = f"{job['job']:<20} {job['state']:<9}"
        if job["state"] == "ended":
            told += f" exit {job['exit_code']}: {job['because'].partition(chr(10))[0]}"
        else:
            told += f" {where or str(job['workers']) + ' workers'}" + (f": {job['because']}" if job["because"] else "")
        lines.append(told.rstrip())
        lines += [f"  trouble: {trouble['because']}; {trouble['advice']}" for trouble in job.get("troubles", ())]
    lines = lines or ["no jobs"]
    for node in overview["nodes"]:
        taken = sum(node["jobs"].values())
        state = f"{taken} of {node['slots']} slots taken" if node["up"] else "away"
        labels = f", {' '.join(node['labels'])}" if node["labels"] else ""
        because = f": {node['because']}" if node["because"] and node["up"] else ""
        lines.append(f"node {node['node']:<15} {state}{labels}{because}")
    return "\n".join(lines)


def _ended_text(entry: dict[str, Any]) -> str:
    digest = f", digest {entry['digest']}" if entry["digest"] else ""
    return f"{entry['job']} is over, exit {entry['exit_code']}: {entry['because']}{digest}"


def status(options: argparse.Namespace) -> dict[str, Any]:
    """`elastic status --rendezvous`."""
    return client_of(options).status(options.job or "")


def _stop(options: argparse.Namespace) -> int:
    client = client_of(options)
    job = client.stop(options.job, "asked for by `elastic stop`")
    ended = _await_end(client, job, STOP_WAIT_S)
    print(json.dumps(ended) if options.json else _ended_text(ended))
    return ExitCode.DONE


def drain(options: argparse.Namespace) -> int:
    """`elastic drain --rendezvous`: no job on that node any more, until it is taken back."""
    client = client_of(options)
    if options.node is None:
        raise ConfigError("say which node with --node; `elastic jobs` shows which there are")
    if options.cancel:
        client.cordon(options.node, "", over=True)
        print(json.dumps({"node": options.node, "drained": False}) if options.json else f"node {options.node} stays")
        return ExitCode.DONE
    client.cordon(options.node, "asked for by `elastic drain`", over=False)
    deadline_s = time.monotonic() + options.budget
    while left := _still_on(client, options.node):
        if time.monotonic() >= deadline_s:
            raise ElasticError(f"still on node {options.node} after {options.budget:g} s: {', '.join(left)}")
        time.sleep(LOOK_S)  # a remote process: there is nothing to wait on
    said = f"node {options.node} is empty, and gets no job until `elastic drain --node {options.node} --cancel`"
    print(json.dumps({"node": options.node, "drained": True}) if options.json else said)
    return ExitCode.DONE


def _still_on(client: FleetClient, node: str) -> list[str]:
    """Workers of jobs that are on that node, as far as the jobs' leaders know."""
    from elastic.drain import workers_on

    try:
        overview = client.overview()
        left = [job for known in overview["nodes"] if known["node"] == node for job in known["jobs"]]
        for job in overview["jobs"]:
            if job["state"] in ("placed", "stopping"):
                left += workers_on(node, client.status(job["job"]))
    except ConfigError:
        raise
    except ElasticError:
        return ["nobody leads the fleet at the moment"]
    return left


# --------------------------------------------------------------------------------------------------------- logs


def _add_logs(verbs: Any) -> None:
    verb = verbs.add_parser(
        "logs",
        help="what workers have printed",
        description="Show the logs of a job's workers, wherever they are.",
        epilog=LOGS_EXAMPLES,
    )
    verb.add_argument("worker", metavar="WORKER", nargs="?", help="one of them (default: all)")
    where = verb.add_mutually_exclusive_group(required=True)
    add_replicas(verb, where)
    where.add_argument("--job-dir", type=Path, metavar="DIR", help="of a job on this machine")
    verb.add_argument("--job", metavar="JOB", help="with --rendezvous (default: the only one that is not over)")
    verb.add_argument("-f", "--follow", action="store_true", help="go on with what comes, until Ctrl-C")
    verb.add_argument("--json", action="store_true", help='as JSON lines: {"log", "text"}')
    verb.set_defaults(verb=_logs)


def _logs(options: argparse.Namespace) -> int:
    from elastic.fleet import logs

    if options.job_dir is not None:
        source: logs.Source = logs.Directory(options.job_dir)
    else:
        client = client_of(options)
        source = logs.Nodes(client, client.job(options.job or "")["job"])
    try:
        logs.show(source, options.worker, follow=options.follow, as_json=options.json)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return ExitCode.DONE
