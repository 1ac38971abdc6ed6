"""What `elastic doctor --exact` tells the script's process, in one environment variable, and what it gets back.

The process appends a line of JSON to `path` when a step begins, and ends when it has begun step `steps`:

    {"step", "shards", "state": {name: hash}, "scalars": {name: value}, "samples": [...], "generators": {name: hash},
     "variables": {name: hash}}

state: everything registered, and job.state, as the step finds it. scalars, samples: of the step before. generators:
of the script's own. variables: numbers, texts, tensors and models that are neither registered nor in job.state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Self

EXAMINATION_VARIABLE = "ELASTIC_EXAMINATION"
EPOCH_STEPS = 3
"""So short is every epoch of an examination at most, so that few steps have several."""
MIDDLE = EPOCH_STEPS + 1
"""Examined runs are entered here, inside of the second epoch: what lies before its steps is run again."""
STEPS = 2 * EPOCH_STEPS
"""So many steps are run: the last one shows what a newcomer makes of the second epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """apart: each shard is computed by a process of its own, a copy of this one as it was when the pass began.
    deterministic: torch warns of kernels that are not. at: before this step a checkpoint is taken, and its first pass
    is written to `recording`; -1: nothing is. joins: it is a newcomer that enters in that pass."""

    path: str
    steps: int
    apart: bool = False
    deterministic: bool = False
    at: int = -1
    recording: str = ""
    joins: bool = False

    def to_environment(self) -> dict[str, str]:
        return {EXAMINATION_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self | None:
        """None: this is no examination."""
        text = environment.get(EXAMINATION_VARIABLE)
        return cls(**json.loads(text)) if text else None
