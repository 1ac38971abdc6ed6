"""What `elastic doctor --exact` tells the script's process, in one environment variable, and what it gets back.

The process appends a line of JSON to `path` when a step begins, and ends when it has begun step `steps`:

    {"step", "shards", "state": {name: hash}, "scalars": {name: value}, "samples": [...], "generators": {name: hash}}

state: everything registered, and job.state, as the step finds it. scalars, samples: of the step before. generators:
of the script's own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Self

VARIABLE = "ELASTIC_EXAMINATION"


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """apart: each shard is computed by a process of its own, a copy of this one as it was when the pass began.
    deterministic: torch warns of kernels that are not."""

    path: str
    steps: int
    apart: bool = False
    deterministic: bool = False

    def to_environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self | None:
        """None: this is no examination."""
        text = environment.get(VARIABLE)
        return cls(**json.loads(text)) if text else None
