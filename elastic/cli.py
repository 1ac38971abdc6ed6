"""The command line: `elastic run` and `elastic status`. Arguments are checked here; errors are one paragraph."""

from __future__ import annotations

import argparse
import importlib.machinery
import json
import os
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from chaos_tests import cli as chaos
from elastic import launchers, samples, siblings
from elastic.checkpoints import commands
from elastic.checkpoints.naming import OWN_FILES_PREFIX
from elastic.config import JobSpec, Reduction, RingKind, Stragglers, Timing
from elastic.errors import ConfigError, ElasticError, ExitCode
from elastic.fleet import commands as fleet
from elastic.spot import choose

DEFAULT_WORKERS = 2
"""The smallest world in which one death loses nothing."""

STATUS_WAIT_S = 5.0
"""How long `status` waits for a leader: an election takes two seconds."""

RUN_EXAMPLES = """\
examples:
  elastic run train.py                              two workers; one may die at any moment
  elastic run --workers 4 --min-workers 2 train.py --lr 3e-4
  elastic run --job-dir /data/job --fresh train.py  a new job where an old one was
  elastic run -m mypackage.train --lr 3e-4          a module instead of a file
  mpirun -n 4 elastic run train.py                  four workers, of this one machine; srun is alike

exit codes:
  0 done                                1 the script failed
  2 bad input                           3 below --min-workers, or no etcd
  4 every copy of the state is lost     5 workers disagree
  6 every node had to go: start it again
  130, 143 interrupted
"""

STATUS_EXAMPLES = """\
examples:
  elastic status --job-dir elastic-jobs/train-1
  elastic status --job-dir elastic-jobs/train-1 --json | jq .generation
  elastic status train-1 --rendezvous 127.0.0.1:7070
"""


DOCTOR_EXAMPLES = """\
examples:
  elastic doctor --exact train.py --lr 3e-4
  elastic doctor --exact --steps 20 --json -m mypackage.train | jq .exact

The script's processes end when those steps are over; what comes behind its loop is not run. What it does before and
between the steps is done, three times.

exit codes:
  0 exact    1 not exact    2 bad input, or the script fails
"""


DRAIN_EXAMPLES = """\
examples:
  elastic drain --job-dir elastic-jobs/train-1 --node gpu-7              between two steps; nothing is computed twice
  elastic drain --job-dir elastic-jobs/train-1 --node gpu-7 --cancel     it may work again
  elastic drain --rendezvous 127.0.0.1:7070 --node gpu-7                 of all jobs; it gets no other one
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command `elastic`; returns its exit code."""
    parsed = parser().parse_args(arguments)
    try:
        code: int = parsed.verb(parsed)
    except ConfigError as error:
        _complain(error)
        return ExitCode.BAD_INPUT
    except ElasticError as error:
        _complain(error)
        return ExitCode.BELOW_QUORUM
    return code


def parser() -> argparse.ArgumentParser:
    top = _Parser(
        prog="elastic",
        description="Elastic, fault-tolerant training for PyTorch: workers die, freeze, leave and join, and no step "
        "and no bit is lost.",
    )
    verbs = top.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=_Parser)
    _add_run(verbs)
    _add_status(verbs)
    chaos.add(verbs)
    commands.add(verbs)
    samples.add(verbs)
    _add_drain(verbs)
    _add_doctor(verbs)
    fleet.add(verbs)
    return top


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> Any:
        _complain(ConfigError(f"{message}. See `{self.prog} --help`."))
        sys.exit(ExitCode.BAD_INPUT)


def _add_run(verbs: Any) -> None:
    run = verbs.add_parser(
        "run",
        help="run a training script on this machine, with workers that may die",
        usage="elastic run [options] SCRIPT [ARGS...]\n       elastic run [options] -m MODULE [ARGS...]",
        description="Run a training script with several workers on this machine. The script calls elastic.join().",
        epilog=RUN_EXAMPLES,
    )
    run.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help=f"workers (default {DEFAULT_WORKERS}; under mpirun or srun as many as they have started tasks)",
    )
    run.add_argument(
        "--min-workers",
        type=int,
        default=1,
        metavar="M",
        help="below this many, training waits for replacements; at the start it goes on with M when the join window "
        "is over (default %(default)s)",
    )
    run.add_argument("--max-workers", type=int, help=argparse.SUPPRESS)  # refused, with the reason
    run.add_argument(
        "--spares",
        type=int,
        default=0,
        metavar="K",
        help="processes kept ready besides the workers, with the script's own set-up done, to take the places of lost "
        "ones (default %(default)s)",
    )
    run.add_argument(
        "--stragglers",
        choices=[str(policy) for policy in Stragglers],
        default=str(Stragglers.NAME),
        help="give each worker as many shards as its speed allows, and say which are too slow; 'demote': these also "
        "give their place to a spare; 'ignore': neither, all compute equally many (default %(default)s)",
    )
    run.add_argument(
        "--slow-factor",
        type=float,
        default=2.0,
        metavar="F",
        help="a straggler takes F times as long for a shard as the median of the others (default %(default)g)",
    )
    run.add_argument(
        "--reduction",
        choices=[str(kind) for kind in Reduction],
        default=str(Reduction.EXACT),
        help="how gradients are summed: the same bits for every number of workers, or the fastest way "
        "(default %(default)s)",
    )
    run.add_argument(
        "--no-retain-results",
        action="store_true",
        help="use less memory: do not keep the gradients of the last pass for a worker that missed them when another "
        "died; it computes that pass again",
    )
    run.add_argument(
        "--ring",
        choices=[str(kind) for kind in RingKind],
        default=str(RingKind.TCP),
        help="what carries the gradients; nccl: between GPUs, one for each worker; mpi: of one mpirun, needs "
        "elastic-ring[mpi] (default %(default)s)",
    )
    run.add_argument("--threads", type=int, default=1, metavar="T", help="torch threads of each worker (default 1)")
    run.add_argument("--job-dir", type=Path, metavar="DIR", help="default: ./elastic-jobs/<name>-<n>")
    run.add_argument(
        "--fresh",
        action="store_true",
        help="move an old job in DIR aside; without it, one that was interrupted goes on",
    )
    run.add_argument(
        "--checkpoint-every",
        default="auto",
        metavar="T",
        help='"10 min", "500 steps", "off", or "auto": '
        "as often as its cost and the failures so far make best (default %(default)s)",
    )
    run.add_argument(
        "--snapshot-every",
        default="auto",
        metavar="T",
        help="how often the state is copied into the memory of this machine, from which a job that loses all workers "
        'goes on; as --checkpoint-every, where "auto" is every 5 s, or less often where that costs more than 1 %% of '
        "the time (default %(default)s)",
    )
    run.add_argument(
        "--keep",
        default="last 2",
        metavar="K",
        help='checkpoints to keep: "last 2", or "last 2, every 10000 steps" (default "%(default)s")',
    )
    run.add_argument(
        "--checkpoint-dir",
        default="",
        metavar="DIR",
        help="a directory, or an fsspec path such as s3://bucket/run (default: checkpoints in the job directory)",
    )
    run.add_argument("--name", metavar="JOB", help="name of the job (default: from the script's name)")
    run.add_argument("--no-replace", action="store_true", help="go on without a worker that was lost")
    run.add_argument(
        "--max-restarts",
        type=int,
        default=3,
        metavar="R",
        help="exits by the script's own fault that are forgiven, per worker slot; kills from outside are never "
        "counted (default %(default)s)",
    )
    run.add_argument(
        "--cold-start",
        action="store_true",
        help="start every worker with an interpreter of its own instead of forking it from a process that has done "
        "the imports; for modules of yours that set environment variables which torch reads when it is imported",
    )
    run.add_argument(
        "--pause-limit",
        type=float,
        default=Timing().pause_limit_s,
        metavar="S",
        help="seconds that a job below --min-workers waits, with its state in memory, before it ends with 3 (default "
        "%(default)g)",
    )
    run.add_argument(
        "--hang-limit",
        type=float,
        default=Timing().hang_s,
        metavar="S",
        help="seconds that the others wait for a worker whose script gets nowhere between two operations, or uses a "
        "processor in one shard, before it is replaced (default %(default)g)",
    )
    choose.add_option(run)
    run.add_argument(
        "--grace",
        type=float,
        metavar="S",
        help="SIGTERM is a notice too: S seconds later this command may be killed (terminationGracePeriodSeconds); "
        "without it a job that trains has 5 s to stop after a step, with a checkpoint",
    )
    run.add_argument("--quiet", action="store_true", help="only the script's output and errors")
    run.add_argument("--json", action="store_true", help="progress and summary as JSON lines on stdout")
    run.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module, as in python -m")
    run.add_argument(
        "script", metavar="SCRIPT", nargs=argparse.REMAINDER, help="the training script, and its arguments"
    )
    run.set_defaults(verb=_run)


def _add_status(verbs: Any) -> None:
    status = verbs.add_parser(
        "status",
        help="what a job is doing",
        description="Show the state of a job: its members, how far it is, and why it is in this state.",
        epilog=STATUS_EXAMPLES,
    )
    status.add_argument("job", metavar="JOB", nargs="?", help="of a fleet (default: the only one that is not over)")
    where = status.add_mutually_exclusive_group(required=True)
    where.add_argument("--job-dir", type=Path, metavar="DIR", help="of a job on this machine")
    fleet.add_replicas(status, where)
    status.add_argument("--json", action="store_true", help="as one JSON object")
    status.set_defaults(verb=_status)


def _add_drain(verbs: Any) -> None:
    drain = verbs.add_parser(
        "drain",
        help="take a node out of a job, between two steps",
        description="Ask the job to go on without a node, and wait until no worker is on it.",
        epilog=DRAIN_EXAMPLES,
    )
    where = drain.add_mutually_exclusive_group(required=True)
    where.add_argument("--job-dir", type=Path, metavar="DIR", help="of a job on this machine")
    fleet.add_replicas(drain, where)
    drain.add_argument("--node", metavar="N", help="which node (default: the only one of the job)")
    drain.add_argument(
        "--budget",
        type=float,
        default=120.0,
        metavar="S",
        help="seconds until the node may be gone; 5 s before, workers that are still there are ended, unless they hold "
        "the only copy of the state (default 120). With --rendezvous: how long to wait; the agent has its own --grace",
    )
    drain.add_argument("--cancel", action="store_true", help="take it back: the node starts workers again")
    drain.add_argument("--json", action="store_true", help="as one JSON object")
    drain.set_defaults(verb=_drain)


def _add_doctor(verbs: Any) -> None:
    doctor = verbs.add_parser(
        "doctor",
        help="examine a script: do its bits depend on anything but its seed?",
        usage="elastic doctor --exact [options] SCRIPT [ARGS...]\n"
        "       elastic doctor --exact [options] -m MODULE [ARGS...]",
        description="Run the first steps of a script as a job of one, twice alike, and once with each shard in a "
        "process of its own; name the first parameter that differs, and the likely reason.",
        epilog=DOCTOR_EXAMPLES,
    )
    doctor.add_argument("--exact", action="store_true", required=True, help="what to examine: its bits")
    doctor.add_argument("--steps", type=int, default=3, metavar="N", help="how many (default %(default)s)")
    doctor.add_argument("--json", action="store_true", help="as one JSON object")
    doctor.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module, as in python -m")
    doctor.add_argument("script", metavar="SCRIPT", nargs=argparse.REMAINDER, help="the script, and its arguments")
    doctor.set_defaults(verb=_doctor)


# ------------------------------------------------------------------------------------------------------------ run


def _run(options: argparse.Namespace) -> int:
    """Once, however many processes of this command a launcher has started on this machine."""
    launch = launchers.find(os.environ, os.getppid())
    if launch is None:
        return _run_here(options, DEFAULT_WORKERS)
    if launch.local_rank:
        return siblings.follow(launch)
    return siblings.lead(launch, lambda: _run_here(options, launch.local_size))


def _run_here(options: argparse.Namespace, default_workers: int) -> int:
    from elastic import embedded, hostmemory, jobdir, mpirun, runs, scratch

    notices = choose.check(options.notices)
    choose.check_grace(options.grace)
    program, command = _command(options.script, options.module)
    workers: int = default_workers if options.workers is None else options.workers
    if options.max_workers not in (None, workers):
        raise ConfigError(
            f"--max-workers {options.max_workers}: the workers of one machine start together, so there are never more "
            f"than --workers {workers}; say with it how many to start, with --min-workers how many must be "
            "left, and with --spares how many to keep ready"
        )
    spec = JobSpec(
        name=options.name if options.name is not None else jobdir.default_name(program),
        command=command,
        workers=workers,
        min_workers=options.min_workers,
        spares=options.spares,
        stragglers=Stragglers(options.stragglers),
        slow_factor=options.slow_factor,
        reduction=Reduction(options.reduction),
        ring=RingKind(options.ring),
        retain_results=not options.no_retain_results,
        threads=options.threads,
        replace=not options.no_replace,
        max_restarts=options.max_restarts,
        checkpoint_every=options.checkpoint_every,
        snapshot_every=options.snapshot_every,
        checkpoint_keep=options.keep,
        checkpoint_dir=options.checkpoint_dir,
        fork=not options.cold_start,
        timing=Timing(pause_limit_s=options.pause_limit, hang_s=options.hang_limit),
    )
    if spec.ring is RingKind.MPI:
        mpirun.find()
    try:
        embedded.find_binary()
    except ConfigError as error:
        _complain(error)
        return ExitCode.BELOW_QUORUM
    scratch.sweep(Path(tempfile.gettempdir()), OWN_FILES_PREFIX)
    claim = jobdir.claim(spec, options.job_dir, fresh=options.fresh)
    with jobdir.running(claim.path), hostmemory.directory(wanted=spec.snapshot_every != "off") as memory:
        return runs.to_the_end(
            spec,
            claim.path,
            again=claim.again,
            memory=memory,
            notices=notices,
            grace_s=options.grace,
            quiet=options.quiet,
            as_json=options.json,
        )


def _command(words: Sequence[str], module: bool) -> tuple[str, tuple[str, ...]]:
    """What to run: its name for people, and the command of a worker. Raises ConfigError if there is no such thing."""
    words = words[1:] if words[:1] == ["--"] else words
    if not words:
        raise ConfigError("no script given: write `elastic run train.py`, or `elastic run -m package.train`")
    program, arguments = words[0], tuple(words[1:])
    if module:
        _check_module(program)
        return program, (sys.executable, "-m", program, *arguments)
    path = Path(program)
    if not path.exists():
        raise ConfigError(f"the script {program} does not exist (looked from {Path.cwd()})")
    if not (path.is_file() or (path / "__main__.py").is_file()):
        raise ConfigError(f"{program} is no script but a directory; give the file, or a module with -m")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"the script {program} cannot be read; check its permissions")
    return program, (sys.executable, program, *arguments)


def _check_module(name: str) -> None:
    # Only the outermost package: looking for the rest would run its code here.
    package = name.split(".", 1)[0]
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"-m {name}: not the name of a module; for a file, leave out -m")
    search = [str(Path.cwd()), *sys.path]
    if importlib.machinery.PathFinder.find_spec(package, search) is None and package not in sys.stdlib_module_names:
        raise ConfigError(f"there is no module {package} in {Path.cwd()} or on Python's path")


# --------------------------------------------------------------------------------------------------------- status


def _status(options: argparse.Namespace) -> int:
    from elastic import troubles

    if options.job_dir is None:
        document = fleet.status(options)
    elif options.job is not None:
        raise ConfigError(f"{options.job}: a directory holds one job; give JOB with --rendezvous only")
    else:
        document = job_status(options.job_dir)
        if document["state"] != "closed":
            document["troubles"] = [asdict(trouble) for trouble in troubles.of_job(options.job_dir)]
    print(json.dumps(document) if options.json else _status_text(document))
    return ExitCode.DONE


def job_status(job_dir: Path, wait_s: float = STATUS_WAIT_S) -> dict[str, Any]:
    """The job's state as `elastic status --json` prints it.

    Of an ended job: state "closed", no members. Raises ConfigError if there never was a job, ElasticError if nobody
    answers for it within wait_s.
    """
    from elastic import jobdir
    from elastic.client import fetch_status

    if not (job_dir / "job.json").exists():
        raise ConfigError(f"{job_dir} holds no job; give the --job-dir of `elastic run`")
    deadline_s = time.monotonic() + wait_s
    while True:
        if (result := jobdir.read_json(job_dir / "result.json")) is not None:
            return _closed(job_dir, result)
        try:
            where = jobdir.read_json(job_dir / "rendezvous.json")
            if where is None:
                raise ElasticError("the job is being started; nobody leads it yet")
            return fetch_status(where["address"], wait_s)
        except ElasticError as error:
            if time.monotonic() >= deadline_s:
                if not jobdir.is_live(job_dir):
                    raise ElasticError(
                        f"the job in {job_dir} was interrupted; none of its processes is alive"
                    ) from error
                raise
            time.sleep(0.1)  # a file and a remote process: there is nothing to wait on


# ---------------------------------------------------------------------------------------------------------- drain


def _drain(options: argparse.Namespace) -> int:
    from elastic import drain

    if not 0 < options.budget < float("inf"):
        raise ConfigError(f"--budget {options.budget:g} must be a positive number of seconds")
    if options.job_dir is None:
        return fleet.drain(options)
    node = drain.ask(options.job_dir, options.node, options.budget, over=options.cancel)
    said = f"node {node} stays" if options.cancel else drain.wait(options.job_dir, node, options.budget)
    print(json.dumps({"node": node, "drained": not options.cancel}) if options.json else said)
    return ExitCode.DONE


# --------------------------------------------------------------------------------------------------------- doctor


def _doctor(options: argparse.Namespace) -> int:
    from elastic import doctor

    if options.steps < 1:
        raise ConfigError(f"--steps {options.steps} must be at least 1")
    _, command = _command(options.script, options.module)
    report = doctor.examine(command, options.steps)
    print(json.dumps(report.document()) if options.json else "\n".join(report.text()))
    return ExitCode.DONE if report.exact else ExitCode.SCRIPT_FAILED


def _closed(job_dir: Path, result: dict[str, Any]) -> dict[str, Any]:
    from elastic.jobdir import read_json
    from elastic.live import StepsTail

    tail = StepsTail(job_dir / "steps.jsonl")
    tail.poll(0.0)
    return {
        "job": (read_json(job_dir / "job.json") or {}).get("name", ""),
        "state": "closed",
        "generation": result["generation"],
        "because": result["because"],
        "applied": tail.steps,
        "members": [],
        "exit_code": result["exit_code"],
        "digest": result["digest"],
    }


def _status_text(document: dict[str, Any]) -> str:
    lines = [
        f"{document['job']}: {document['state']}, generation {document['generation']}"
        + (f", {document['applied']} steps" if "applied" in document else ""),
        f"because {document['because']}",
    ]
    if document.get("checkpoint"):
        lines.append(f"newest checkpoint {document['checkpoint']}")
    lines += [
        f"  rank {member['rank']}  {member['worker_id']}  on {member['node']}  pid {member['pid']}  "
        f"{member['applied']} steps" + _speed_text(member)
        for member in document["members"]
    ]
    lines += [f"  straggler {worker_id}: {because}" for worker_id, because in document.get("stragglers", {}).items()]
    lines += [f"  {worker_id}: {how}" for worker_id, how in document.get("held_up_by", {}).items()]
    lines += [f"  spare   {worker_id}" for worker_id in document.get("spares", ())]
    lines += [f"trouble: {trouble['because']}; {trouble['advice']}" for trouble in document.get("troubles", ())]
    return "\n".join(lines)


def _speed_text(member: dict[str, Any]) -> str:
    shard_ms, shards = member.get("shard_ms"), member.get("shards", 0)
    return "" if shard_ms is None else f"  {shards} shard{'s' * (shards != 1)} of {shard_ms:.3g} ms"


def _complain(error: Exception) -> None:
    print(textwrap.fill(f"elastic: {error}", 100, break_long_words=False, break_on_hyphens=False), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
