"""Which sources of notices a node watches: what `--notices` means."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import assert_never

from elastic.errors import ConfigError
from elastic.preemption import aws, azure, gcp, slurm
from elastic.preemption.aws import Aws
from elastic.preemption.azure import Azure
from elastic.preemption.file import File
from elastic.preemption.gcp import Gcp
from elastic.preemption.kubernetes import kubernetes
from elastic.preemption.provider import NoticeSource
from elastic.preemption.relay import NoticeRelay
from elastic.preemption.slurm import Slurm

DEFAULT = "ELASTIC_NOTICES"
"""Environment variable: what `--notices` is where it is not given; for images of machines."""
VENDOR = Path("/sys/class/dmi/id/sys_vendor")
"""Where the firmware names the maker of this machine."""
CHOICES = "auto, aws, gcp, azure, k8s, slurm, slurm:requeue, file:PATH, or none"


RELAYED = "node:"
"""With a job directory: what the daemon of a fleet's node says to the agents of its jobs."""


class Provider(StrEnum):
    AWS = "aws"
    GCP = "gcp"
    AZURE = "azure"
    KUBERNETES = "k8s"
    SLURM = "slurm"


MAKERS = {"Amazon EC2": Provider.AWS, "Google": Provider.GCP, "Microsoft Corporation": Provider.AZURE}


def add_option(parser: argparse.ArgumentParser) -> None:
    """`--notices` as the command line and the agent have it."""
    parser.add_argument(
        "--notices",
        default=os.environ.get(DEFAULT, "auto"),
        metavar="WHO",
        help=f"who tells that this machine is about to go: {CHOICES} (default: ${DEFAULT}, else auto)",
    )


def check(choice: str) -> str:
    """The choice itself. Raises ConfigError if `sources` would not know it."""
    if choice.startswith(RELAYED):
        return choice
    if choice not in ("auto", "none", "slurm:requeue", *Provider) and not choice.startswith("file:/"):
        hint = "; the path must be absolute" if choice.startswith("file:") else ""
        raise ConfigError(f"--notices {choice} is none of: {CHOICES}{hint}")
    return choice


def check_grace(seconds: float | None) -> None:
    """Raises ConfigError unless it is a time in which a node can leave, or None."""
    if seconds is not None and not 0 < seconds < math.inf:
        raise ConfigError(f"--grace {seconds:g} must be a positive number of seconds, the time from SIGTERM to SIGKILL")


def sources(choice: str, environment: Mapping[str, str], vendor: Path = VENDOR) -> list[NoticeSource]:
    """The sources of a checked choice; no network is asked yet. Raises ConfigError for k8s outside of a pod."""
    if choice.startswith(RELAYED):
        return [NoticeRelay(Path(choice.removeprefix(RELAYED)))]
    if choice.startswith("file:"):
        return [File(Path(choice.removeprefix("file:")))]
    if choice == "slurm:requeue":
        return [Slurm(environment, requeue=True)]
    if choice == "none":
        return []
    if choice != "auto":
        return _of(Provider(choice), environment)
    return [source for provider in guess(environment, maker(vendor)) for source in _of(provider, environment)]


def guess(environment: Mapping[str, str], made_by: str) -> list[Provider]:
    """Who may take this machine away, by its environment and the firmware's word: no network is tried.

    An address given for a provider's metadata service names it too; an SDK's switch that forbids asking is obeyed.
    """
    found = [Provider.SLURM] if slurm.JOB in environment else []
    addresses = {aws.ENDPOINT: Provider.AWS, gcp.HOST: Provider.GCP, azure.HOST: Provider.AZURE}
    named = [provider for variable, provider in addresses.items() if environment.get(variable)]
    clouds = named or [provider for name, provider in MAKERS.items() if name == made_by]
    forbidden = {aws.DISABLED: Provider.AWS, gcp.DISABLED: Provider.GCP}
    no = {provider for variable, provider in forbidden.items() if environment.get(variable, "").lower() == "true"}
    return found + [provider for provider in clouds if provider not in no]


def maker(vendor: Path = VENDOR) -> str:
    """The maker of this machine as its firmware says, or empty."""
    try:
        return vendor.read_text().strip()
    except OSError:
        return ""


def _of(provider: Provider, environment: Mapping[str, str]) -> list[NoticeSource]:
    match provider:
        case Provider.AWS:
            return [Aws(environment)]
        case Provider.GCP:
            return [Gcp(environment, gcp.PREEMPTED), Gcp(environment, gcp.MAINTENANCE)]
        case Provider.AZURE:
            return [Azure(environment)]
        case Provider.KUBERNETES:
            return kubernetes(environment)
        case Provider.SLURM:
            return [Slurm(environment, requeue=False)]
        case _:
            assert_never(provider)
