"""What an agent tells a worker that it starts, as environment variables.

Other variables have modules of their own: mpi_ranks.py, examination.py, death_watch.py, and
elastic/checkpoints/settings.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from elastic.config import Compression, JobSpec, Overlap, Reduction, RingKind, Timing
from elastic.errors import ConfigError
from elastic.protocol.shard_advice import Worlds
from elastic.protocol.worker_id import node_of
from elastic.security.roles import CERTS_VARIABLE

AGENT_SOCKET = "ELASTIC_AGENT_SOCKET"
"""The unix socket of the agent that started this process. Unset: a job of one worker."""
SLOT = "ELASTIC_SLOT"
"""The worker's number on its node, from 0."""
THREADS = "ELASTIC_THREADS"
"""The value of `elastic run --threads`, for a script that does not set the thread count itself."""
RANKS = "ELASTIC_RANKS"
"""The number of ranks of a script that was written for torchrun. Unset or "0": the script calls elastic.join()."""
RESTART = "ELASTIC_RESTART"
"""Whether the script is started again in each generation: "1" or "0"."""
WORKER_ID = "ELASTIC_WORKER_ID"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnvironment:
    """What a worker is told. address: the node's, under which other workers reach this one. certs: directory of
    certificates; None: plain text. restarted: the worker replaces one that has ended. worlds: those in which it
    matters how many shards there are; None: none."""

    worker_id: str
    job: str
    job_dir: Path
    slot: int
    restarted: bool
    ranks: int
    restart: bool
    threads: int
    reduction: Reduction
    compression: Compression
    overlap: Overlap
    retain_results: bool
    ring: RingKind
    timing: Timing
    agent_socket: str
    address: str
    certs: Path | None
    worlds: Worlds | None

    @classmethod
    def of_job(
        cls,
        spec: JobSpec,
        job_dir: Path,
        worker_id: str,
        slot: int,
        *,
        restarted: bool,
        agent_socket: str,
        address: str,
        certs: Path | None,
        worlds: Worlds | None,
    ) -> Self:
        return cls(
            worker_id=worker_id,
            job=spec.name,
            job_dir=job_dir,
            slot=slot,
            restarted=restarted,
            ranks=spec.ranks,
            restart=spec.restart,
            threads=spec.threads,
            reduction=spec.reduction,
            compression=spec.compression,
            overlap=spec.overlap,
            retain_results=spec.retain_results,
            ring=spec.ring,
            timing=spec.timing,
            agent_socket=agent_socket,
            address=address,
            certs=certs,
            worlds=worlds,
        )

    @property
    def node(self) -> str:
        return node_of(self.worker_id)

    def to_environ(self) -> dict[str, str]:
        """The variables. ELASTIC_NODE is for scripts only. An empty ELASTIC_CERTS hides an inherited one."""
        return {
            WORKER_ID: self.worker_id,
            "ELASTIC_JOB": self.job,
            "ELASTIC_JOB_DIR": str(self.job_dir),
            "ELASTIC_NODE": self.node,
            SLOT: str(self.slot),
            "ELASTIC_RESTARTED": "1" if self.restarted else "0",
            RANKS: str(self.ranks),
            RESTART: "1" if self.restart else "0",
            THREADS: str(self.threads),
            "ELASTIC_REDUCTION": str(self.reduction),
            "ELASTIC_COMPRESSION": str(self.compression),
            "ELASTIC_OVERLAP": str(self.overlap),
            "ELASTIC_RETAIN_RESULTS": "1" if self.retain_results else "0",
            "ELASTIC_RING": str(self.ring),
            "ELASTIC_TIMING": json.dumps(asdict(self.timing)),
            AGENT_SOCKET: self.agent_socket,
            "ELASTIC_HOST": self.address,
            CERTS_VARIABLE: str(self.certs or ""),
            "ELASTIC_WORLDS": json.dumps(self.worlds and asdict(self.worlds)),
        }

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Self:
        """Read the variables. Raises ConfigError naming a variable that is missing or cannot be read."""
        certs = environ.get(CERTS_VARIABLE)
        try:
            return cls(
                worker_id=environ[WORKER_ID],
                job=environ["ELASTIC_JOB"],
                job_dir=Path(environ["ELASTIC_JOB_DIR"]),
                slot=int(environ[SLOT]),
                restarted=environ["ELASTIC_RESTARTED"] == "1",
                ranks=int(environ[RANKS]),
                restart=environ[RESTART] == "1",
                threads=int(environ[THREADS]),
                reduction=Reduction(environ["ELASTIC_REDUCTION"]),
                compression=Compression(environ["ELASTIC_COMPRESSION"]),
                overlap=Overlap(environ["ELASTIC_OVERLAP"]),
                retain_results=environ["ELASTIC_RETAIN_RESULTS"] == "1",
                ring=RingKind(environ["ELASTIC_RING"]),
                timing=Timing(**json.loads(environ["ELASTIC_TIMING"])),
                agent_socket=environ[AGENT_SOCKET],
                address=environ["ELASTIC_HOST"],
                certs=Path(certs) if certs else None,
                worlds=Worlds(**worlds) if (worlds := json.loads(environ["ELASTIC_WORLDS"])) else None,
            )
        except KeyError as missing:
            raise ConfigError(f"{missing.args[0]} is not set; start the script with `elastic run`") from None
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the environment of this worker is damaged ({error}); leave ELASTIC_* alone") from error
