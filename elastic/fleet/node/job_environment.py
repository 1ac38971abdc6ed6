"""The environment, accelerators and settings that a node gives the workers of a job.

The environment comes from a file of NAME=VALUE lines, as `docker run --env-file` reads it. Its values never leave the
node. They are taken as they stand, with quotes if there are any; lines that are empty or begin with # are skipped.

A job gets as many accelerators as it has slots on the node, and none that another job has. The workers of each job
count accelerators from 0, among those in CUDA_VISIBLE_DEVICES; so that variable is set for each job.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from elastic.config import JobSpec, check_pairs
from elastic.errors import ConfigError
from elastic.rendezvous.reach import Reach
from elastic.security.job_user import JobUser

BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """The settings that all jobs on this node have in common. jobs_dir: has a directory for each job. grace_s: how long
    an agent that is asked to leave may take. job_user: the user as whom jobs run; None: the daemon's. log_words: the
    options of a job's agent for its log."""

    node: str
    reach: Reach
    jobs_dir: Path
    notices: str
    grace_s: float
    job_user: JobUser | None = None
    log_words: Mapping[str, str] = field(default_factory=dict)


def with_environment(spec: JobSpec, node: str) -> JobSpec:
    """The job with the variables of its `env_from` file on this node in its `env`; `env` wins over the file.

    Raises ConfigError naming the node, the file and what is wrong with it, and no value.
    """
    if not spec.env_from:
        return spec
    where = f"env_from={spec.env_from} on {node}"
    try:
        pairs = parse(_read(spec.env_from))
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror}") from error
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    own = spec.environment
    return replace(spec, env=(*spec.env, *(f"{name}={value}" for name, value in pairs if name not in own)), env_from="")


def parse(content: bytes) -> list[tuple[str, str]]:
    """(name, value) of each line. Raises ConfigError naming the line."""
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError("it is not UTF-8") from error
    found: list[tuple[str, str]] = []
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.removesuffix("\r")
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = line.partition("=")
        try:
            if not equals:
                raise ConfigError("there is no =")
            check_pairs("env", [*(f"{known}=" for known, _ in found), line])
        except ConfigError as error:
            raise ConfigError(f"line {number} must be NAME=VALUE: {error}") from error
        found.append((name, value))
    return found


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ConfigError("it is no file")
        content = file.read(BYTES_MAX + 1)
    if len(content) > BYTES_MAX:
        raise ConfigError(f"it is larger than {BYTES_MAX} bytes")
    return content


DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"


def of_node(environment: Mapping[str, str], devices: Path = Path("/dev")) -> tuple[str, ...]:
    """The accelerators of the daemon, as CUDA_VISIBLE_DEVICES names them; without it, every device of NVIDIA's
    driver."""
    if (given := environment.get(DEVICES_VARIABLE)) is not None:
        return tuple(name.strip() for name in given.split(",") if name.strip())
    found = (re.fullmatch(r"nvidia(\d+)", path.name) for path in devices.glob("nvidia*"))
    return tuple(str(number) for number in sorted(int(match[1]) for match in found if match is not None))


def choose(all_of_node: Iterable[str], taken: Iterable[str], slots: int) -> tuple[str, ...]:
    """The first free accelerators for a job, as many as it has slots; fewer if there are not so many."""
    busy = set(taken)
    return tuple(device for device in all_of_node if device not in busy)[:slots]
