"""The command line: `elastic VERB`. A module for each verb, or for a few that belong together.

Each module says what its verb takes and what it prints. What a verb needs beside that it imports when it runs, so that
`elastic --help` stays fast.

    parsing.py   the parser, and how an error is said
    script.py    SCRIPT or -m MODULE, of run and doctor
    upgrade.py   of `elastic agent --upgrade`
    where.py     which job or fleet is meant: --job-dir, --rendezvous
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from chaos_tests import cli as chaos
from elastic import __version__, samples
from elastic.checkpoints import commands as checkpoints
from elastic.cli import certs, daemons, doctor, drain, jobs, logs, run, scale, status, story, submit, top
from elastic.cli.parsing import Parser, complain
from elastic.errors import ConfigError, ElasticError, ExitCode

VERBS = (run, status, chaos, checkpoints, samples, drain, doctor, daemons, submit, jobs, scale, top, logs, story, certs)
"""In the order of `elastic --help`; each adds its own."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command `elastic`; returns its exit code."""
    parsed = parser().parse_args(arguments)
    try:
        code: int = parsed.verb(parsed)
        sys.stdout.flush()
    except ConfigError as error:
        complain(error)
        return ExitCode.BAD_INPUT
    except ElasticError as error:
        complain(error)
        return ExitCode.BELOW_QUORUM
    except BrokenPipeError:  # whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        about = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        complain(ConfigError(f"{about}; see that it is there, and that this user may use it"))
        return ExitCode.BAD_INPUT
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    return code


def parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="elastic",
        description="Elastic, fault-tolerant training for PyTorch: workers die, freeze, leave and join, and no step "
        "and no bit is lost.",
    )
    top.add_argument("--version", action="version", version=f"elastic {__version__}")
    verbs = top.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=Parser)
    for verb in VERBS:
        verb.add(verbs)
    return top
