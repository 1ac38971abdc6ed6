"""What `elastic doctor` tells the script's process, in one environment variable, and what it gets back.

The process appends a line of JSON to `path` when a step begins, and ends when it has begun step `steps`:

    {"step", "shards", "state": {name: hash}, "scalars": {name: value}, "samples": [...], "generators": {name: hash},
     "variables": {name: hash}, "sizes": [[name, kind, size, most], ...]}

state: everything registered, and job.state, when the step begins. scalars, samples: those of the step before.
generators: the script's own. variables: numbers, texts, tensors and models that are in neither. sizes, with logical
ranks only: what the script has changed in the step before, where its size is limited (frames/size_limits.py in ddp).

If the script raises an exception, the last line is

    {"raised": name of its class, "ours": whether this program raised it, "message", "place": "FILE:LINE" or ""}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Self

EXAMINATION_VARIABLE = "ELASTIC_EXAMINATION"
EPOCH_STEPS = 3
"""The most steps of an epoch in an examination, so that few steps have several epochs."""
MIDDLE = EPOCH_STEPS + 1
"""The step at which examined runs are entered, inside the second epoch: its earlier steps are run again."""
STEPS = 2 * EPOCH_STEPS
"""The number of steps of a run: the last one shows what a newcomer makes of the second epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """An examined run. apart: each shard is computed by a process of its own, a copy of this one from when the pass
    began. backwards: the shards of a pass are computed in the opposite order. deterministic: torch warns of kernels
    that are not deterministic. at: the step before which a checkpoint is taken, and whose first pass is written to
    `recording`; -1: none. joins: this process enters in that pass. whole_epochs: epochs of a script with logical ranks
    have all their steps, not EPOCH_STEPS at most."""

    path: str
    steps: int
    apart: bool = False
    backwards: bool = False
    deterministic: bool = False
    at: int = -1
    recording: str = ""
    joins: bool = False
    whole_epochs: bool = False

    def to_environment(self) -> dict[str, str]:
        return {EXAMINATION_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self | None:
        """The examination in these variables; None: there is none."""
        text = environment.get(EXAMINATION_VARIABLE)
        return cls(**json.loads(text)) if text else None
