"""A worker's settings of checkpoints, which its agent passes in one environment variable."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

CHECKPOINTS_VARIABLE = "ELASTIC_CHECKPOINTS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """root: a directory or an fsspec path. every, keep: see policy.py."""

    root: str = "checkpoints"
    every: str = "off"
    keep: str = "last 2"
    job: str = "job"
    job_id: str = ""
    """Tells two jobs of one name apart. "": a job without an agent."""
    ledger: str = ""
    """Path of steps.jsonl, which must hold the steps before a checkpoint; "": there is none."""
    resume: str = ""
    """The entry of the periodic series from which this run of the job goes on; "": from the start."""
    resume_from: str = ""
    """The directory of that entry's storage; "": the root."""
    memory: str = ""
    """A directory in this machine's memory (elastic/records/host_memory.py) for snapshots; "": there is none."""
    snapshot_every: str = "off"
    """As `every`."""
    skipped: tuple[str, ...] = ()
    """Entries of that series from which this run, or an earlier one, did not go on because they are damaged."""
    interruptions: int = 0
    """How often the job was started again."""
    observed_s: float = 0.0
    """Seconds from the job's beginning to this run."""

    def to_environment(self) -> dict[str, str]:
        return {CHECKPOINTS_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        return cls.of(json.loads(environment.get(CHECKPOINTS_VARIABLE, "{}")))

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        """The settings whose fields are in a JSON object. Raises TypeError for a field that this version does not
        know."""
        return cls(**{**document, "skipped": tuple(document.get("skipped", ()))})
