"""`elastic run`: a job on this machine; and the options of a job, whose names, units, defaults and help stand at the
fields of JobSpec and Timing."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import sys
import tempfile
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import Field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from elastic.checkpoints.naming import OWN_FILES_PREFIX
from elastic.cli.options import complain
from elastic.config import JobSpec, Option, RingKind, Timing
from elastic.errors import ConfigError, ExitCode
from elastic.metrics import option as metrics_option
from elastic.platforms.local import one_of_many, outer_launcher
from elastic.platforms.local.script_command import command
from elastic.preemption import selection
from elastic.version import torch_is_newer

DEFAULT_WORKERS = 2
"""The smallest world in which one death loses nothing."""

TYPES = {"int": int, "float": float}
"""What an option's value is converted to, by the type of its field; other values are strings."""

HELP_COLUMNS = 96

RUN_EXAMPLES = """\
examples:
  elastic run train.py                              two workers; one may die at any moment
  elastic run --workers 4 --min-workers 2 train.py --lr 3e-4
  elastic run --job-dir /data/job --fresh train.py  a new job where an old one was
  elastic run -m mypackage.train --lr 3e-4          a module instead of a file
  elastic run --dashboard train.py                  with a page in the browser that shows the job
  elastic run --metrics 9400 train.py               for Prometheus: http://127.0.0.1:9400/metrics
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
    run.add_argument("--max-workers", type=int, help=argparse.SUPPRESS)  # refused, with the reason
    add_job_options(run)
    run.add_argument("--job-dir", type=Path, metavar="DIR", help="default: ./elastic-jobs/<name>-<n>")
    run.add_argument(
        "--fresh",
        action="store_true",
        help="move an old job in DIR aside; without it, one that was interrupted goes on",
    )
    run.add_argument("--name", metavar="JOB", help="name of the job (default: from the script's name)")
    run.add_argument(
        "--verify",
        metavar="every=N",
        type=verified,
        default=(),
        help="in every N-th step compute one shard on several workers, and compare it and the state of all workers bit "
        "by bit: a worker whose memory or processor has changed a bit is named and replaced (default: never)",
    )
    selection.add_option(run)
    run.add_argument(
        "--grace",
        type=float,
        metavar="S",
        help="after SIGTERM this command has S seconds to leave in order (terminationGracePeriodSeconds); by default a "
        "job that trains has 5 s to stop after a step, with a checkpoint",
    )
    metrics_option.add_option(run)
    run.add_argument(
        "--dashboard",
        action="store_true",
        help="serve a page that shows the job, on this machine only, and print its address",
    )
    run.add_argument("--quiet", action="store_true", help="only the script's output and errors")
    run.add_argument("--json", action="store_true", help="progress and summary as JSON lines on stdout")
    run.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module, as in python -m")
    run.add_argument(
        "script", metavar="SCRIPT", nargs=argparse.REMAINDER, help="the training script, and its arguments"
    )
    run.set_defaults(verb=_run, known=frozenset(run._option_string_actions))


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
    from elastic.platforms.local import dashboard_process, reruns
    from elastic.records import host_memory, job_directory, resume, temp_dirs
    from elastic.store import embedded

    notices = selection.check(options.notices)
    selection.check_grace(options.grace)
    program, words = command(options.script, options.module)
    workers: int = default_workers if options.workers is None else options.workers
    if options.max_workers not in (None, workers):
        raise ConfigError(
            f"--max-workers {options.max_workers}: on one machine --workers {workers} is the largest number, because "
            "all workers start together; --min-workers is the smallest, and --spares the number kept ready"
        )
    spec = JobSpec(
        name=options.name if options.name is not None else job_directory.default_name(program),
        command=words,
        workers=workers,
        env=options.verify,
        **chosen(options),
    )
    if options.verify and spec.restart:
        raise ConfigError(
            "--verify compares what elastic.join() and --ranks compute; scripts of --restart sum by themselves"
        )
    if not options.quiet and not options.module and (names := misplaced(words[2:], options.known, Path(program))):
        said = f"behind {program} is given to the script; options of `elastic run` come before it"
        print(f"elastic: {', '.join(names)} {said}", file=sys.stderr, flush=True)
    if not options.quiet and (said := _about_torch()):
        print(f"elastic: {said}", file=sys.stderr, flush=True)
    worker_process.check_descriptors(spec.workers + spec.spares, etcd=True)
    if spec.ring is RingKind.MPI:
        mpirun.find()
    try:
        embedded.find_binary()
    except ConfigError as error:
        complain(error)
        return ExitCode.BELOW_QUORUM
    temp_dirs.sweep(Path(tempfile.gettempdir()), OWN_FILES_PREFIX)
    if options.dashboard:
        dashboard_process.check_installed()
    with _metrics(options.metrics) as show:
        claim = job_directory.claim(
            spec, options.job_dir, fresh=options.fresh, before_moving=lambda old: resume.check_fresh(spec, old)
        )
        with (
            job_directory.running(claim.path),
            host_memory.directory(wanted=spec.snapshot_every != "off") as memory,
            dashboard_process.beside(claim.path) if options.dashboard else nullcontext() as page,
        ):
            where = show(claim.path, spec)
            if where and not options.quiet:
                print(f"elastic: metrics at {where}", file=sys.stderr, flush=True)
            if page is not None:  # also with --quiet: nobody can open the page without the key
                print(f"elastic: {page}", file=sys.stderr, flush=True)
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


def verified(text: str) -> tuple[str, ...]:
    """--verify as environment of the workers. Raises ArgumentTypeError."""
    from elastic.agent.worker.environment import VERIFY

    name, _, number = text.partition("=")
    if name != "every" or not number.isdecimal() or number == "0":
        raise argparse.ArgumentTypeError(f"{text!r} is not every=N, where N is a number of steps, as in every=100")
    return (f"{VERIFY}={number}",)


def _about_torch() -> str:
    """See torch_is_newer; torch is not imported here."""
    try:
        return torch_is_newer(importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:  # the workers will say so
        return ""


def misplaced(arguments: Sequence[str], known: Collection[str], script: Path) -> list[str]:
    """Options of this command that stand behind the script, and that the script does not seem to have itself: its text
    has neither the option as a string nor its name before `:` or `=`, as a field or an argument."""
    found = [name for word in arguments if (name := word.partition("=")[0]).startswith("--") and name in known]
    if not found or not script.is_file():
        return []
    text = script.read_text(errors="replace")
    names = {name: re.escape(name[2:].replace("-", "_")) for name in found if name != "--help"}
    return [name for name, word in names.items() if not re.search(rf"[\"']{name}[\"']|\b{word}\s*[:=]", text)]


def _metrics(chosen: str | None) -> AbstractContextManager[Callable[[Path, JobSpec], str]]:
    """As service.of_run; "" for a command without --metrics."""
    if chosen is None:
        return nullcontext(lambda job_dir, spec: "")
    from elastic.metrics import service

    return service.of_run(metrics_option.address_of(chosen, certs=None))


# ------------------------------------------------------------------------ the options of a job


def add_job_options(parser: argparse.ArgumentParser) -> None:
    for spec, option in _options(JobSpec, Timing):
        text = option.text.replace("%", "%%")
        if spec.type == "bool":
            flip = "store_false" if spec.default else "store_true"
            parser.add_argument(option.name, dest=spec.name, action=flip, help=text)
            continue
        default = " (default %(default)g)" if spec.type == "float" else " (default %(default)s)"
        default = ' (default "%(default)s")' if " " in str(spec.default) else default
        parser.add_argument(
            option.name,
            dest=spec.name,
            type=TYPES.get(str(spec.type), str),
            default=str(spec.default) if isinstance(spec.default, StrEnum) else spec.default,
            choices=[str(kind) for kind in type(spec.default)] if isinstance(spec.default, StrEnum) else None,
            metavar=option.unit or None,
            help=text if "(default" in text else text + default,
        )


def chosen(options: argparse.Namespace) -> dict[str, Any]:
    """Fields of JobSpec, from what `add_job_options` has added."""
    values = {spec.name: _typed(spec, getattr(options, spec.name)) for spec, _ in _options(JobSpec)}
    timing = Timing(**{spec.name: getattr(options, spec.name) for spec, _ in _options(Timing)})
    return {**values, "timing": timing}


def in_a_file() -> str:
    """The same as fields of a job file, for people."""
    lines = []
    for owner, head in ((JobSpec, ""), (Timing, "  [timing]\n")):
        lines.append(head)
        for spec, option in _options(owner):
            value = not spec.default if spec.type == "bool" else spec.default
            said = f"{spec.name} = {str(value).lower() if isinstance(value, bool) else _quoted(value)}"
            text = option.text.replace("--min-workers", "min_workers").replace("--checkpoint-every", "checkpoint_every")
            lines.append(f"  {said}\n{textwrap.indent(textwrap.fill(text, HELP_COLUMNS - 6), ' ' * 6)}\n")
    return "".join(lines)


def _options(*owners: type) -> Iterator[tuple[Field[Any], Option]]:
    for owner in owners:
        for spec in fields(owner):
            if (option := Option.of(owner, spec.name)) is not None:
                yield spec, option


def _typed(spec: Field[Any], value: Any) -> Any:
    return type(spec.default)(value) if isinstance(spec.default, StrEnum) else value


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else f"{value:g}"
