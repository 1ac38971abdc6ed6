"""The command line: `elastic VERB`. A module for each verb, or for a few that belong together.

Each module says what its verb takes and what it prints, and is imported when its verb is asked for. It imports other
packages only when the verb runs, so a verb that only asks loads neither torch, etcd, cryptography nor rich.

    local/          whole jobs on this machine: what `run` and `doctor --exact` do
    options.py      what verbs share: the parser, the script, which job or fleet is meant
    run.py          `elastic run`, and the options of a job
    status.py       `elastic status`
    checkpoints.py  `elastic checkpoints`
    samples.py      `elastic samples`
    drain.py        `elastic drain`
    doctor.py       `elastic doctor`
    daemons.py      `elastic rendezvous`, `elastic agent`
    upgrade.py      `elastic agent --upgrade`
    submit.py       `elastic submit`
    scale.py        `elastic scale`, `elastic quota`
    jobs.py         `elastic jobs`, `elastic stop`
    top.py          `elastic top`
    story.py        `elastic logs`, `elastic story`
    worker.py       `elastic stacks`, `elastic kill`
    certs.py        `elastic certs`
    __main__.py     `python -m elastic.cli`

Seven verbs are elsewhere: `elastic adopt` in elastic/adopt, `elastic trace` in elastic/timeline, `elastic dashboard` in
elastic/dashboard, `elastic slurm` in elastic/slurm, `elastic k8s` in elastic/k8s, `elastic search` in elastic/search,
`elastic chaos` in chaos_tests.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from elastic.cli.options import Parser, complain
from elastic.errors import ConfigError, ElasticError, ExitCode
from elastic.version import __version__

MODULES = {
    "run": "elastic.cli.run",
    "status": "elastic.cli.status",
    "chaos": "chaos_tests.cli",
    "checkpoints": "elastic.cli.checkpoints",
    "samples": "elastic.cli.samples",
    "drain": "elastic.cli.drain",
    "doctor": "elastic.cli.doctor",
    "adopt": "elastic.adopt.command",
    "rendezvous": "elastic.cli.daemons",
    "agent": "elastic.cli.daemons",
    "submit": "elastic.cli.submit",
    "scale": "elastic.cli.scale",
    "quota": "elastic.cli.scale",
    "jobs": "elastic.cli.jobs",
    "stop": "elastic.cli.jobs",
    "top": "elastic.cli.top",
    "logs": "elastic.cli.story",
    "story": "elastic.cli.story",
    "trace": "elastic.timeline.command",
    "stacks": "elastic.cli.worker",
    "kill": "elastic.cli.worker",
    "dashboard": "elastic.dashboard.command",
    "slurm": "elastic.slurm.command",
    "k8s": "elastic.k8s.command",
    "search": "elastic.search.command",
    "certs": "elastic.cli.certs",
}
"""Verb -> the module that adds it, in the order of `elastic --help`. A module may add several verbs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command `elastic`; returns its exit code. arguments: default those of this process."""
    if arguments is not None:
        return _main(arguments)
    code = _main(sys.argv[1:])
    gc.freeze()  # the process ends: to look through all objects for cycles once more takes longer than many a verb
    return code


def _main(words: Sequence[str]) -> int:
    parsed = parser(words).parse_args(words)
    try:
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
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    return code


def parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """With the verb that these words ask for, or with all of them."""
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
