"""Which job or fleet a verb is about, and what to show there: --job-dir, --rendezvous, --certs."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic.doors.roles import VARIABLE, Role
from elastic.errors import ConfigError
from elastic.fleet.addresses import INSECURE, check_plain, parse

if TYPE_CHECKING:
    from elastic.doors.keyring import Keyring
    from elastic.fleet.client import FleetClient

REPLICAS = "ELASTIC_RENDEZVOUS"
"""The replicas of whoever gives no --rendezvous."""


EXIT_CODES = """
exit codes:
  0 done    2 bad input    3 nobody answers, or it has not come to it in time    130 interrupted
"""
"""Of the verbs that ask about a job or a fleet, or something of it."""


def add_either(verb: argparse.ArgumentParser, *, several: bool = False, by_default: bool = True) -> None:
    """--job-dir of a job on this machine, or --rendezvous of a fleet. several: any number of directories. by_default:
    without either of them the newest directory is meant, see `job_dir_of`."""
    where = verb.add_mutually_exclusive_group(required=not by_default and not known_replicas())
    what = "of a job on this machine" + "; of one of several machines those of its nodes, one by one" * several
    what += " (default, without a fleet: the newest in ./elastic-jobs, of a job that runs if one does)" * by_default
    where.add_argument("--job-dir", type=Path, metavar="DIR", action="append" if several else "store", help=what)
    add_replicas(verb, where)


def add_replicas(verb: argparse.ArgumentParser, group: Any = None) -> None:
    """--rendezvous, --certs and --insecure of a verb. group: the one in which --rendezvous has alternatives."""
    (group or verb).add_argument(
        "--rendezvous",
        default=known_replicas(),
        required=group is None and not known_replicas(),
        metavar="HOST:PORT,...",
        help=f"replicas of the rendezvous, all or some (default: ${REPLICAS})",
    )
    add_certs(verb)


def add_certs(verb: argparse.ArgumentParser) -> None:
    """--certs and --insecure."""
    verb.add_argument(
        "--certs",
        type=Path,
        metavar="DIR",
        help=f"certificates to show and to believe, see `elastic certs --help` (default: ${VARIABLE})",
    )
    verb.add_argument(INSECURE, action="store_true", help="without certificates: plain text with other machines")


def known_replicas() -> str | None:
    """By the environment; an empty variable is none."""
    return os.environ.get(REPLICAS) or None


def job_dir_of(options: argparse.Namespace) -> Path | None:
    """As given, or the newest here; None if a job of a fleet is meant. Of several it is said which one was taken.
    Raises ConfigError if there is none."""
    if options.job_dir is not None or options.rendezvous:
        job_dir: Path | None = options.job_dir
        return job_dir
    if options.job is not None:
        raise ConfigError(f"{options.job}: say with --rendezvous of which fleet, or give --job-dir")
    found, live = job_dirs_here()
    if len(found) > 1:
        of = f"{live} that run" if live > 1 else "the jobs here that runs" if live else f"{len(found)}"
        print(f"elastic: {found[0]}, the {'only one' if live == 1 else 'newest'} of {of}", file=sys.stderr)
    return found[0]


def job_dirs_here() -> tuple[list[Path], int]:
    """As `jobs_in` of ./elastic-jobs, at least one. Raises ConfigError."""
    from elastic.jobdir import DEFAULT_PARENT, jobs_in

    found, live = jobs_in(Path(DEFAULT_PARENT))
    if not found:
        raise ConfigError(
            f"there is no job in {Path.cwd() / DEFAULT_PARENT}; give --job-dir DIR, or --rendezvous HOST:PORT,... of a "
            f"fleet (${REPLICAS})"
        )
    return found, live


def certs_of(options: argparse.Namespace) -> Path | None:
    """As given, or by the environment; an empty variable is none."""
    given = options.certs or os.environ.get(VARIABLE)
    return Path(given).absolute() if given else None


def keyring_of(certs: Path | None, *roles: Role) -> Keyring | None:
    """The certificate for the first of these roles that there is, or None without certificates. Raises ConfigError."""
    if certs is None:
        return None
    from elastic.doors.keyring import of_role

    return of_role(certs, *roles)


def client_of(options: argparse.Namespace) -> FleetClient:
    """For an operator's verb. Raises ConfigError."""
    from elastic.doors.channels import Door
    from elastic.fleet.client import FleetClient

    replicas = parse("--rendezvous", options.rendezvous)
    keyring = keyring_of(certs_of(options), Role.OPERATOR, Role.VIEWER)
    check_plain("--rendezvous", replicas, allowed=options.insecure or keyring is not None)
    return FleetClient(replicas, door=Door(keyring))
