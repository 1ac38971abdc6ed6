"""The command line: `elastic VERB`. A module for each verb, or for a few that belong together.

Each module says what its verb takes and what it prints, and is imported when its verb is asked for. It imports other
packages only when the verb runs, so a verb that only asks loads neither torch, etcd, cryptography nor rich.

    options.py   what verbs share: the parser, the script, which job or fleet is meant
    job/         verbs about one job
    fleet/       verbs about a fleet
    platforms/   verbs that start jobs on other systems
    __main__.py  `python -m elastic.cli`

No other package imports this one. `elastic chaos` is in chaos_tests, which lies above it.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from elastic.errors import ConfigError, ElasticError, ExitCode
from elastic.version import __version__

if TYPE_CHECKING:
    import argparse

MODULES = {
    "run": "elastic.cli.job.run",
    "status": "elastic.cli.job.status",
    "chaos": "chaos_tests.cli",
    "checkpoints": "elastic.cli.job.checkpoints",
    "samples": "elastic.cli.job.samples",
    "drain": "elastic.cli.job.drain",
    "upgrade": "elastic.cli.fleet.upgrade",
    "doctor": "elastic.cli.fleet.doctor",
    "rendezvous": "elastic.cli.fleet.daemons",
    "agent": "elastic.cli.fleet.daemons",
    "submit": "elastic.cli.fleet.submit",
    "scale": "elastic.cli.fleet.scale",
    "quota": "elastic.cli.fleet.scale",
    "jobs": "elastic.cli.fleet.jobs",
    "stop": "elastic.cli.fleet.jobs",
    "top": "elastic.cli.job.top",
    "logs": "elastic.cli.job.story",
    "story": "elastic.cli.job.story",
    "trace": "elastic.cli.job.trace",
    "stacks": "elastic.cli.job.worker",
    "kill": "elastic.cli.job.worker",
    "dashboard": "elastic.cli.job.dashboard",
    "slurm": "elastic.cli.platforms.slurm",
    "k8s": "elastic.cli.platforms.k8s",
    "search": "elastic.cli.platforms.search",
    "horovodrun": "elastic.cli.platforms.horovodrun",
    "certs": "elastic.cli.fleet.certs",
}
"""Verb -> the module that adds it, in the order of `elastic --help`. A module may add several verbs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command `elastic`; returns its exit code. arguments: default those of this process."""
    try:
        _open_closed()
        if arguments is not None:
            return _main(arguments)
        code = _main(sys.argv[1:])
    except KeyboardInterrupt:  # also in the first moments, most of which the imports of _main() take
        return ExitCode.INTERRUPTED
    gc.freeze()  # the process ends: to look through all objects for cycles once more takes longer than many a verb
    return code


def _open_closed() -> None:
    """Open /dev/null for standard input, output and errors where the caller has closed them: verbs print to them, and
    a file that is opened later would get their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def _main(words: Sequence[str]) -> int:
    from elastic.cli.options import complain

    try:
        parsed = parser(words).parse_args(words)
        code: int = parsed.verb(parsed)
        sys.stdout.flush()
    except ConfigError as error:
        complain(error)
        return ExitCode.BAD_INPUT
    except ElasticError as error:
        complain(error)
        return ExitCode.BELOW_QUORUM
    except BrokenPipeError:  # the reader of the output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        about = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        complain(ConfigError(f"{about}; see that it is there, and that this user may use it"))
        return ExitCode.BAD_INPUT
    return code


def parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """With the verb that these words ask for, or with all of them."""
    from elastic.cli.options import Parser

    top = Parser(
        prog="elastic",
        description="Elastic, fault-tolerant training for PyTorch: workers die, freeze, leave and join, and no step "
        "and no bit is lost.",
    )
    top.add_argument("--version", action="version", version=f"elastic {__version__}")
    verbs = top.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=Parser)
    asked = [MODULES[word] for word in words[:1] if word in MODULES]
    for module in dict.fromkeys(asked or MODULES.values()):
        importlib.import_module(module).add(verbs)
    return top
