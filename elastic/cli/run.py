"""`elastic run`: a job on this machine."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from elastic.checkpoints.naming import OWN_FILES_PREFIX
from elastic.cli.local import one_of_many, outer_launcher
from elastic.cli.options import command, complain
from elastic.config import JobSpec, Reduction, RingKind, Stragglers, Timing
from elastic.errors import ConfigError, ExitCode
from elastic.preemption import selection

DEFAULT_WORKERS = 2
"""The smallest world in which one death loses nothing."""

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


def add(verbs: Any) -> None:
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
        help="exits by the script's own fault that are forgiven, per worker slot; kills from outside are not counted. "
        "Also how often a job begins again whose members all died before a step was applied (default %(default)s)",
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
        "processor in one shard, before it is replaced, and that all may get nowhere before the job goes back to the "
        "newest snapshot or checkpoint (default %(default)g)",
    )
    selection.add_option(run)
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


def _run(options: argparse.Namespace) -> int:
    """Once, however many processes of this command a launcher has started on this machine."""
    launch = outer_launcher.find(os.environ, os.getppid())
    if launch is None:
        return _run_here(options, DEFAULT_WORKERS)
    if launch.local_rank:
        return one_of_many.follow(launch)
    return one_of_many.lead(launch, lambda: _run_here(options, launch.local_size))


def _run_here(options: argparse.Namespace, default_workers: int) -> int:
    from elastic.agent.process import mpirun, worker_process
    from elastic.cli.local import reruns
    from elastic.records import host_memory, job_directory, temp_dirs
    from elastic.store import embedded

    notices = selection.check(options.notices)
    selection.check_grace(options.grace)
    program, words = command(options.script, options.module)
    workers: int = default_workers if options.workers is None else options.workers
    if options.max_workers not in (None, workers):
        raise ConfigError(
            f"--max-workers {options.max_workers}: the workers of one machine start together, so there are never more "
            f"than --workers {workers}; say with it how many to start, with --min-workers how many must be "
            "left, and with --spares how many to keep ready"
        )
    spec = JobSpec(
        name=options.name if options.name is not None else job_directory.default_name(program),
        command=words,
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
    worker_process.check_descriptors(spec.workers + spec.spares, etcd=True)
    if spec.ring is RingKind.MPI:
        mpirun.find()
    try:
        embedded.find_binary()
    except ConfigError as error:
        complain(error)
        return ExitCode.BELOW_QUORUM
    temp_dirs.sweep(Path(tempfile.gettempdir()), OWN_FILES_PREFIX)
    claim = job_directory.claim(spec, options.job_dir, fresh=options.fresh)
    with job_directory.running(claim.path), host_memory.directory(wanted=spec.snapshot_every != "off") as memory:
        return reruns.to_the_end(
            spec,
            claim.path,
            again=claim.again,
            memory=memory,
            notices=notices,
            grace_s=options.grace,
            quiet=options.quiet,
            as_json=options.json,
        )
