"""Which job or fleet a verb is about: --job-dir, --rendezvous."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic.fleet.addresses import INSECURE, check_plain, parse

if TYPE_CHECKING:
    from elastic.fleet.client import FleetClient


def add_either(verb: argparse.ArgumentParser) -> None:
    """--job-dir of a job on this machine, or --rendezvous of a fleet."""
    where = verb.add_mutually_exclusive_group(required=True)
    where.add_argument("--job-dir", type=Path, metavar="DIR", help="of a job on this machine")
    add_replicas(verb, where)


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
