"""`elastic horovodrun`: Horovod's command line, for scripts with elastic.horovod."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elastic.cli.options import EXIT_CODES
from elastic.errors import ConfigError, ExitCode
from elastic.platforms.horovod import option_mapping
from elastic.platforms.horovod.option_mapping import NOT_USED, WantedWorkers

EXAMPLES = """\
examples:
  elastic horovodrun -np 4 python train.py                         4 ranks, in place and exact
  elastic horovodrun -np 4 --min-np 2 python train_elastic.py      workers that come and go
  elastic horovodrun -np 8 -H gpu-1:4,gpu-2:4 python train.py      two machines, by ssh
  elastic horovodrun -np 4 --min-np 2 --max-np 8 --host-discovery-script ./hosts.sh python train_elastic.py
"""
PYTHONS = ("python", "python3")
MAPPED = {
    "num_proc": int,
    "min_np": int,
    "max_np": int,
    "ranks": int,
    "slots_per_host": int,
    "reset_limit": int,
    "start_timeout": float,
    "elastic_timeout": float,
}
"""What of a --config-file is a number."""

PATHS = ("timeline_filename", "hostfile")
TEXTS = ("hosts", "host_discovery_script", *PATHS)
FLAGS = ("restart", "blacklist_hosts")


def add(verbs: Any) -> None:
    """The verb."""
    verb = verbs.add_parser(
        "horovodrun",
        help="Horovod's command line, for scripts that import elastic.horovod",
        usage="elastic horovodrun -np N [options] python SCRIPT [ARGS...]",
        description="Run a script that imports elastic.horovod.torch. Options are those of horovodrun.",
        epilog=EXAMPLES + EXIT_CODES,
    )
    verb.add_argument("-np", "--num-proc", type=int, metavar="N", help="workers to begin with")
    verb.add_argument("--min-np", "--min-num-proc", type=int, metavar="N", help="go on with so many at least")
    verb.add_argument(
        "--max-np",
        "--max-num-proc",
        type=int,
        metavar="N",
        help="take so many at most (default: all slots of -H or --hostfile; with a script -np)",
    )
    verb.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...", help="default: this machine")
    verb.add_argument("-hostfile", "--hostfile", type=Path, metavar="FILE", help="lines such as `gpu-1 slots=4`")
    verb.add_argument("--host-discovery-script", metavar="SCRIPT", help="prints host:slots lines; asked once a second")
    verb.add_argument("--slots-per-host", "--slots", type=int, metavar="N", help="of a host that it prints alone")
    verb.add_argument("--start-timeout", type=float, metavar="S", help="of hosts, to begin (default 30)")
    verb.add_argument(
        "--elastic-timeout",
        type=float,
        metavar="S",
        help="with fewer than --min-np workers the job waits so long for others (default 600)",
    )
    verb.add_argument(
        "--reset-limit", type=int, metavar="N", help="end the job when hosts have come, gone or failed so often"
    )
    verb.add_argument("--blacklist-hosts", action="store_true", help="leave a host for good when it has lost a worker")
    verb.add_argument(
        "--blacklist-cooldown-range",
        "--cooldown-range",
        dest="blacklist_cooldown_range",
        type=float,
        nargs=2,
        metavar=("MIN", "MAX"),
        help="leave it for MIN seconds, doubled with each loss, and MAX at most",
    )
    verb.add_argument("-p", "--ssh-port", type=int, metavar="PORT", help="of ssh to other hosts")
    verb.add_argument("-i", "--ssh-identity-file", metavar="FILE", help="the same")
    verb.add_argument("--timeline-filename", type=Path, metavar="FILE", help="`elastic trace` of the job, at its end")
    verb.add_argument("--config-file", type=Path, metavar="FILE", help="these options, as YAML")
    verb.add_argument("--ranks", type=int, metavar="N", help="exact mode with N ranks (default: -np, unless elastic)")
    verb.add_argument("--restart", action="store_true", help="start the script again for each change of the workers")
    verb.add_argument("--job-dir", type=Path, metavar="DIR", help="of a job on this machine, as `elastic run`")
    verb.add_argument(
        "--checkpoint-dir", default="~/elastic-jobs", metavar="DIR", help="of a job on hosts (default %(default)s)"
    )
    verb.add_argument("--check-build", action="store_true", help="say what this program can do, and end")
    for option in NOT_USED:
        verb.add_argument(*option.names, nargs=option.values, action=_Said, because=option.because)
    verb.add_argument("command", nargs=argparse.REMAINDER, metavar="python SCRIPT")
    verb.set_defaults(verb=_run)


class _Said(argparse.Action):
    """An option that is not used: it is said what became of it."""

    def __init__(self, option_strings: Sequence[str], dest: str, because: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, help=argparse.SUPPRESS, **kwargs)
        self._because = because

    def __call__(self, parser: object, namespace: object, values: object, option_string: str | None = None) -> None:
        _say(f"{option_string} is not used: {self._because}")


def _run(options: argparse.Namespace) -> int:
    from elastic.platforms.horovod.host_options import ELASTIC_S, START_S, HostOptions

    if options.check_build:
        print("Available Frameworks:\n    [X] PyTorch\nAvailable Controllers and Tensor Operations:\n    [X] TCP ring")
        return ExitCode.DONE
    _take_in_config(options)
    places = HostOptions(
        hosts=options.hosts,
        hostfile=options.hostfile,
        script=options.host_discovery_script,
        slots=options.slots_per_host,
        start_timeout_s=START_S if options.start_timeout is None else options.start_timeout,
        elastic_timeout_s=ELASTIC_S if options.elastic_timeout is None else options.elastic_timeout,
        ssh_port=options.ssh_port,
        reset_limit=options.reset_limit,
        ssh_identity_file=options.ssh_identity_file,
        checkpoint_dir=options.checkpoint_dir,
        cooldown_s=_cooldown_s(options),
    )
    discovers = places.script is not None
    wanted = option_mapping.wanted(
        options.num_proc, options.min_np, options.max_np, options.ranks, discovers=discovers, restart=options.restart
    )
    words = _script_of(options.command)
    listed = places.listed(wanted.workers)
    wanted = wanted.among(listed)
    if listed is not None and set(listed) == {"localhost"}:
        if places.reset_limit is not None:
            _say("--reset-limit is not used: there are no hosts that come and go")
        if places.cooldown_s is not None:
            _say("--blacklist-hosts and --blacklist-cooldown-range are not used: there is one host")
        return _here(options, wanted, words, places.elastic_timeout_s)
    if options.timeline_filename is not None:
        _say("--timeline-filename is not used: a job on hosts leaves its journals on them, see `elastic trace`")
    result = places.launch(words, (), wanted, listed)
    _say(f"{result.job}: {result.steps} steps, digest {result.digest}")
    return ExitCode.DONE


def _cooldown_s(options: argparse.Namespace) -> tuple[float, float] | None:
    if options.blacklist_cooldown_range is not None:
        first_s, most_s = options.blacklist_cooldown_range
        return first_s, most_s
    return (math.inf, math.inf) if options.blacklist_hosts else None


def _here(options: argparse.Namespace, wanted: WantedWorkers, words: Sequence[str], elastic_timeout_s: float) -> int:
    """As `elastic run`."""
    from elastic import cli
    from elastic.platforms.local.script_command import command
    from elastic.records import job_directory

    job_dir = options.job_dir
    if job_dir is None and options.timeline_filename is not None:  # `elastic trace` has to know the directory
        module = words[0] == "-m"
        program, _ = command(words[module:], module)  # it is refused before the directory is made
        parent = Path.cwd() / job_directory.DEFAULT_PARENT
        job_dir = job_directory.next_free(parent, job_directory.default_name(program))
    given = ["run", "--workers", str(wanted.most), "--min-workers", str(wanted.least)]
    given += ["--pause-limit", f"{elastic_timeout_s:g}"]
    if job_dir is not None:
        given += ["--job-dir", str(job_dir)]
    if wanted.ranks is not None:
        given += ["--ranks", str(wanted.ranks)]
    if wanted.restart:
        given += ["--restart"]
    code = cli.main([*given, *words])
    if options.timeline_filename is not None and code in (ExitCode.DONE, ExitCode.SCRIPT_FAILED):
        cli.main(["trace", "--job-dir", str(job_dir), "--output", str(options.timeline_filename)])
    return code


def _script_of(command: Sequence[str]) -> list[str]:
    """The script and its arguments, of `python SCRIPT ...`. Raises ConfigError."""
    words = list(command[1:] if command[:1] == ["--"] else command)
    script = words[1:]
    while script[:1] == ["-u"]:  # as it is anyway: what workers print is not held back
        script = script[1:]
    is_python = bool(words) and (Path(words[0]).name in PYTHONS or words[0] == sys.executable)
    if not is_python or script in ([], ["-m"]):
        raise ConfigError(
            f"{' '.join(words) or 'no command'}: write `python SCRIPT`, or `python -m MODULE`, behind the options"
        )
    if script[0].startswith("-") and script[0] != "-m":
        raise ConfigError(
            f"python {script[0]}: of Python's options only -m and -u are taken; write `python SCRIPT`, and set the "
            "others by its environment variables, such as PYTHONOPTIMIZE"
        )
    return script


def _take_in_config(options: argparse.Namespace) -> None:
    """What the command line does not say. Raises ConfigError."""
    if options.config_file is None:
        return
    from elastic.platforms.horovod.host_options import text_of

    try:
        import yaml
    except ImportError:
        raise ConfigError(
            "--config-file needs PyYAML, of an extra: pip install 'elastic-ring[horovod]'; or write its options here"
        ) from None
    path = str(options.config_file)
    try:
        document = yaml.safe_load(text_of(options.config_file, "--config-file"))
    except yaml.YAMLError as error:
        raise ConfigError(f"--config-file {path} is no YAML: {' '.join(str(error).split())}") from error
    unused = {name: option for option in NOT_USED for name in option.names}
    for name, value in option_mapping.of_config(document, path).items():
        field = {"np": "num_proc"}.get(name, name.replace("-", "_"))
        if f"--{name}" in unused:
            _say(f"--{name} of {path} is not used: {unused[f'--{name}'].because}")
        elif field == "blacklist_cooldown_range":
            if not isinstance(value, list) or len(value) != 2:
                raise ConfigError(f"--config-file {path}: {name}: {value!r} must be a list of two numbers of seconds")
            options.blacklist_cooldown_range = options.blacklist_cooldown_range or [
                _number(name, part, float) for part in value
            ]
        elif field in MAPPED or field in TEXTS or field in FLAGS:
            if (said := getattr(options, field)) is None or said is False:  # a 0 is said
                setattr(options, field, _value(name, value, field))
        else:
            raise ConfigError(f"--config-file {path}: there is no option {name}")


def _value(name: str, value: object, field: str) -> Any:
    if field in MAPPED:
        return _number(name, value, MAPPED[field])
    if value is None:  # YAML has it where nothing is behind a name
        return None
    if not isinstance(value, bool if field in FLAGS else str):
        raise ConfigError(f"--config-file: {name}: {value!r} must be {'true or false' if field in FLAGS else 'text'}")
    return Path(str(value)) if field in PATHS else value


def _number(name: str, value: object, kind: type) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"--config-file: {name}: {value!r} must be a number")
    if kind(value) != value:
        raise ConfigError(f"--config-file: {name}: {value!r} must be a whole number")
    return kind(value)


def _say(text: str) -> None:
    print(f"elastic: {text}", file=sys.stderr, flush=True)
