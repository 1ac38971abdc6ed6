"""What an agent tells a worker that it starts, as environment variables.

Other variables have modules of their own: mpi_ranks.py, examination.py, death_watch.py, and
elastic/checkpoints/settings.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Self, get_type_hints

from elastic.config import Compression, JobSpec, Overlap, Reduction, RingKind, Timing
from elastic.errors import ConfigError
from elastic.protocol.shard_advice import Worlds
from elastic.protocol.worker_id import node_of
from elastic.protocol.worker_slot import Spawn
from elastic.security.roles import CERTS_VARIABLE

AGENT_SOCKET = "ELASTIC_AGENT_SOCKET"
"""The unix socket of the agent that started this process. Unset: a job of one worker."""
SLOT = "ELASTIC_SLOT"
"""The worker's number on its node, from 0."""
RING = "ELASTIC_RING"
DEVICE = "ELASTIC_DEVICE"
THREADS = "ELASTIC_THREADS"
"""The value of `elastic run --threads`, for a script that does not set the thread count itself."""
RANKS = "ELASTIC_RANKS"
"""The number of ranks of a script that was written for torchrun. Unset or "0": the script calls elastic.join()."""
RESTART = "ELASTIC_RESTART"
"""Whether the script is started again in each generation: "1" or "0"."""
VERIFY = "ELASTIC_VERIFY"
"""N of `elastic run --verify every=N`, in the environment of the job. Unset or "0": nothing is verified."""
WORKER_ID = "ELASTIC_WORKER_ID"
JOB_DIR = "ELASTIC_JOB_DIR"


@dataclass(frozen=True, slots=True)
class _Variable:
    """The environment variable of a field, and the translation of its value. default: what an unset one means."""

    name: str
    read: Callable[[str], Any] = str
    write: Callable[[Any], str] = str
    default: str | None = None


def _flag(name: str) -> _Variable:
    return _Variable(name, lambda text: text == "1", lambda value: str(int(value)))


def _object(name: str, kind: type) -> _Variable:
    def read(text: str) -> Any:
        return kind(**document) if (document := json.loads(text)) is not None else None

    return _Variable(name, read, lambda value: json.dumps(value and asdict(value)))


def _path(text: str) -> Path | None:
    return Path(text) if text else None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnvironment:
    """What a worker is told. address: the node's, under which other workers reach this one. certs: directory of
    certificates; None: plain text. restarted: the worker replaces one that has ended. worlds: those in which it
    matters how many shards there are; None: none. device: the UUID of the GPU that the workers of this slot had before,
    or ""."""

    worker_id: Annotated[str, _Variable(WORKER_ID)]
    job: Annotated[str, _Variable("ELASTIC_JOB")]
    job_dir: Annotated[Path, _Variable(JOB_DIR, Path)]
    slot: Annotated[int, _Variable(SLOT, int)]
    restarted: Annotated[bool, _flag("ELASTIC_RESTARTED")]
    ranks: Annotated[int, _Variable(RANKS, int)]
    restart: Annotated[bool, _flag(RESTART)]
    threads: Annotated[int, _Variable(THREADS, int)]
    reduction: Annotated[Reduction, _Variable("ELASTIC_REDUCTION", Reduction)]
    compression: Annotated[Compression, _Variable("ELASTIC_COMPRESSION", Compression)]
    outer: Annotated[str, _Variable("ELASTIC_OUTER")]
    overlap: Annotated[Overlap, _Variable("ELASTIC_OVERLAP", Overlap)]
    retain_results: Annotated[bool, _flag("ELASTIC_RETAIN_RESULTS")]
    ring: Annotated[RingKind, _Variable(RING, RingKind)]
    timing: Annotated[Timing, _object("ELASTIC_TIMING", Timing)]
    agent_socket: Annotated[str, _Variable(AGENT_SOCKET)]
    address: Annotated[str, _Variable("ELASTIC_HOST")]
    certs: Annotated[Path | None, _Variable(CERTS_VARIABLE, _path, lambda certs: str(certs or ""), default="")]
    worlds: Annotated[Worlds | None, _object("ELASTIC_WORLDS", Worlds)]
    device: Annotated[str, _Variable(DEVICE, default="")]

    @classmethod
    def of_job(
        cls,
        spec: JobSpec,
        job_dir: Path,
        slot: int,
        wanted: Spawn,
        *,
        agent_socket: str,
        address: str,
        certs: Path | None,
        worlds: Worlds | None,
    ) -> Self:
        """What the worker that an agent starts in a slot is told."""
        return cls(
            worker_id=wanted.worker_id,
            job=spec.name,
            job_dir=job_dir,
            slot=slot,
            restarted=wanted.restarted,
            agent_socket=agent_socket,
            address=address,
            certs=certs,
            worlds=worlds,
            device=wanted.device,
            **{name: getattr(spec, name) for name in _variables() if hasattr(spec, name)},
        )

    @property
    def node(self) -> str:
        return node_of(self.worker_id)

    def to_environ(self) -> dict[str, str]:
        """The variables. ELASTIC_NODE is for scripts only. An empty ELASTIC_CERTS hides an inherited one."""
        own = {variable.name: variable.write(getattr(self, field)) for field, variable in _variables().items()}
        return {**own, "ELASTIC_NODE": self.node}

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Self:
        """Read the variables. Raises ConfigError naming a variable that is missing or cannot be read."""
        variables = _variables()
        defaults = {variable.name: variable.default for variable in variables.values() if variable.default is not None}
        found = {**defaults, **environ}
        try:
            return cls(**{field: variable.read(found[variable.name]) for field, variable in variables.items()})
        except KeyError as missing:
            raise ConfigError(f"{missing.args[0]} is not set; start the script with `elastic run`") from None
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the environment of this worker is damaged ({error}); leave ELASTIC_* alone") from error


@cache
def _variables() -> Mapping[str, _Variable]:
    """By field."""
    hints = get_type_hints(WorkerEnvironment, include_extras=True)
    return {field: hint.__metadata__[0] for field, hint in hints.items()}
