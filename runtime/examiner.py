"""Notes the state of a script step by step for `elastic doctor --exact`, and ends it after some steps.

What comes behind the loop is not run: it might write a model of three steps over one of three weeks.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from elastic.examination import Examination
from elastic.ledger import plain
from runtime.session import StepRecord
from runtime.state import Carrier


class Examiner:
    """Used by the user's thread only."""

    def __init__(self, examination: Examination, carrier: Carrier) -> None:
        self._path = Path(examination.path)
        self._steps = examination.steps
        self._carrier = carrier
        self._before: StepRecord | None = None
        if examination.deterministic:
            torch.use_deterministic_algorithms(True, warn_only=True)

    def applied(self, record: StepRecord) -> None:
        """A step is over."""
        self._before = record

    def note(self, step: int, shards: int | None, frame: FrameType | None) -> None:
        """A step begins, or the loop ends there. frame: the script's. Ends the process if this was the last."""
        line = {
            "step": step,
            "shards": shards,
            "state": self._carrier.digests(),
            "scalars": plain(self._before.scalars) if self._before is not None else {},
            "samples": self._before.samples if self._before is not None else [],
            "generators": {name: _state_of(generator) for name, generator in _generators(frame)},
        }
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if step >= self._steps:
            self.end()

    def end(self) -> None:
        """End the process here."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _generators(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """Those that the script's functions have in variables, by name, from the innermost function outwards."""
    seen: set[int] = set()
    while frame is not None:
        for name, value in {**frame.f_globals, **frame.f_locals}.items():
            known = isinstance(value, torch.Generator | np.random.Generator | np.random.RandomState | random.Random)
            if known and id(value) not in seen:
                seen.add(id(value))
                yield name, value
        frame = frame.f_back


def _state_of(generator: Any) -> str:
    match generator:
        case torch.Generator():
            state = generator.get_state().numpy().tobytes()
        case np.random.Generator():
            state = repr(generator.bit_generator.state).encode()
        case np.random.RandomState():
            state = repr(generator.get_state(legacy=False)).encode()
        case _:
            state = repr(generator.getstate()).encode()
    return hashlib.sha256(state).hexdigest()[:16]
