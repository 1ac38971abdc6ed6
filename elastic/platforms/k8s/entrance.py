"""Before an agent starts in its pod: the certificates of its node, and the job, which the first pod submits.

This is an init container, and alone has the authority's key. Which job is meant follows from the Job that the pod
belongs to: all of its pods, also those that take the place of others, come to the same one.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from elastic.checkpoints.series import newest_at
from elastic.config import JobSpec
from elastic.errors import ConfigError, ElasticError, ExitCode
from elastic.fleet.client import FleetClient
from elastic.fleet.registry import base_name
from elastic.records.files import write_atomically
from elastic.security.certificate_authority import Authority
from elastic.security.channels import ChannelFactory
from elastic.security.keyring import of_role
from elastic.security.roles import Role

JOB_FILE = "job"
"""In the pod's own directory: the full name of the job."""

PATIENCE_S = 1800.0
"""How long a fleet may take to begin: images are pulled, volumes are made."""
PAUSE_S = 1.0


def with_workers(spec: JobSpec, fewest: int, most: int) -> JobSpec:
    """The job, for so many workers. Raises ConfigError."""
    return replace(spec, workers=most, min_workers=fewest, max_workers=most)


def issue_own(ca: Path, own: Path, node: str) -> None:
    """The certificates of the node, with which it may also look at the job. Raises ConfigError."""
    Authority(ca).issue(node, [Role.AGENT, Role.VIEWER], own)


def enter(
    spec: JobSpec, replicas: tuple[str, ...], ca: Path, node: str, owner: str, say: Callable[[str], object]
) -> str:
    """The full name of the job, which this or another pod has submitted. owner: the uid of the Job of these pods. say:
    told once why it takes long. Raises ConfigError, and ElasticError if the fleet does not answer for half an hour."""
    with tempfile.TemporaryDirectory(prefix="elastic-enter-") as directory:
        Authority(ca).issue(node, [Role.OPERATOR], Path(directory))
        client = FleetClient(replicas, channels=ChannelFactory(of_role(Path(directory), Role.OPERATOR)))
        deadline_s, said = time.monotonic() + PATIENCE_S, ""
        while True:
            try:
                return _enter(client, spec, owner)
            except ConfigError:
                raise
            except ElasticError as error:
                if time.monotonic() > deadline_s:
                    raise
                if str(error) != said:
                    said = str(error)
                    say(f"the fleet does not answer yet: {said}")
            time.sleep(PAUSE_S)  # another machine: there is nothing to wait on


def _enter(client: FleetClient, spec: JobSpec, owner: str) -> str:
    known = [job for job in client.overview()["jobs"] if base_name(job["job"]) == spec.name]
    own = [job for job in known if job["request"].rpartition("-")[0] == owner]
    if own and not _goes_on(own[-1]):
        return str(own[-1]["job"])
    for job in known:
        if job not in own and job["state"] != "ended":
            if job["state"] != "stopping":
                client.stop(job["job"], "its pods have been replaced by those of another Job")
            raise ElasticError(f"{job['job']}, of an earlier Job, has not ended yet")
    before = own or [job for job in known[-1:] if job["exit_code"] != ExitCode.DONE]
    found = newest_at(before[-1]["checkpoints"], before[-1]["identity"]) if before else None
    resume = f"{before[-1]['job']}@{found}" if found is not None else ""
    return str(client.submit(spec, resume, token=f"{owner}-{len(own)}")["job"])


def _goes_on(job: dict[str, Any]) -> bool:
    """Whether it was interrupted because all nodes had to go, or were too few, or etcd was older than the job, and
    another one goes on from its checkpoint. What an operator has stopped stays so."""
    interrupted = (ExitCode.DRAINED, ExitCode.BELOW_QUORUM, ExitCode.TERMINATED)
    return bool(job["state"] == "ended" and job["exit_code"] in interrupted and not job["stopped"])


def remember(own: Path, job: str) -> None:
    """For the agent of this pod. Raises OSError."""
    write_atomically(own / JOB_FILE, job.encode(), 0o600)
