"""Notes the state of a script step by step for `elastic doctor`, and ends the script after some steps.

Code after the loop does not run: it might overwrite a trained model with one of a few steps.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn

from elastic.agent.worker.examination import Examination
from elastic.errors import ElasticError
from elastic.records.ledger import plain
from runtime.guards.unregistered import CONTAINER_MAX, DEPTH_MAX, ELEMENTS
from runtime.recovery.state.encoding import to_blob
from runtime.recovery.state.training_state import Carrier
from runtime.script_end import exit_now, raised_at
from runtime.script_files import is_library
from runtime.session import StepRecord


class Examiner:
    """Used by the user's thread only."""

    def __init__(self, examination: Examination, carrier: Carrier) -> None:
        self._path = Path(examination.path)
        self._steps = examination.steps
        self.at = examination.at
        """The step before which a checkpoint is taken; -1: none."""
        self.whole_epochs = examination.whole_epochs
        self.sizes: list[tuple[str, str, int, int]] = []
        """With logical ranks: what the script has changed in the step before (ddp/frames/size_limits.py)."""
        self._carrier = carrier
        self._before: StepRecord | None = None
        if examination.deterministic:
            torch.use_deterministic_algorithms(True, warn_only=True)

    def applied(self, record: StepRecord) -> None:
        """Note the record of a step that is over."""
        self._before = record

    def note(self, step: int, shards: int | None, frame: FrameType | None) -> None:
        """Note the state when a step begins or the loop ends; after the last step end the process. frame: the
        script's."""
        line = {
            "step": step,
            "shards": shards,
            "state": self._carrier.digests(),
            "scalars": plain(self._before.scalars) if self._before is not None else {},
            "samples": self._before.samples if self._before is not None else [],
            "generators": {name: _state_of(generator) for name, generator in _generators(frame)},
            "variables": dict(_variables(frame, self._registered())),
            "sizes": self.sizes,
        }
        self._write(line)
        if step >= self._steps:
            exit_now(0)

    def failed(self, error: BaseException) -> None:
        """Note how the script fails, and where: "" if the error comes from no line of the script."""
        place, ours = raised_at(error), isinstance(error, ElasticError)
        if is_library(place.rpartition(":")[0]):
            place = ""
        self._write({"raised": type(error).__name__, "ours": ours, "message": str(error), "place": place})

    def _write(self, line: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _registered(self) -> set[int]:
        """Ids of the registered modules, their parts and their tensors."""
        modules = [part for module in self._carrier.modules().values() for part in module.modules()]
        tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        return {id(thing) for thing in (*modules, *tensors)}


def _generators(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """Random generators in variables of the script's functions, by name, from the innermost function outwards."""
    seen: set[int] = set()
    while frame is not None:
        for name, value in {**frame.f_globals, **frame.f_locals}.items():
            known = isinstance(value, torch.Generator | np.random.Generator | np.random.RandomState | random.Random)
            if known and id(value) not in seen:
                seen.add(id(value))
                yield name, value
        frame = frame.f_back


def _variables(frame: FrameType | None, registered: set[int]) -> Iterator[tuple[str, str]]:
    """(name, hash) of values in variables of the script's functions that it may compute with, as _generators."""
    seen: set[str] = set()
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            for name, value in {**frame.f_globals, **frame.f_locals}.items():
                if name in seen or name.startswith("__"):
                    continue
                seen.add(name)
                if (content := _content(value, registered)) is not None:
                    yield name, hashlib.sha256(content.encode()).hexdigest()[:16]
        frame = frame.f_back


def _content(value: object, registered: set[int], depth: int = 0) -> str | None:
    """A value as text; for large tensors a part of it. None: the value has no such text, or is registered."""
    if id(value) in registered or depth > DEPTH_MAX:
        return None
    match value:
        case bool() | int() | float() | str() | None:
            return repr(value)
        case torch.Tensor() if value.layout is torch.strided and not (value.is_meta or value.is_quantized):
            start = value.detach().flatten()[:ELEMENTS] if value.is_contiguous() else value.detach()[:1]
            return f"{value.dtype} {tuple(value.shape)} {to_blob(start).numpy().tobytes().hex()}"
        case np.ndarray() if not value.dtype.hasobject:
            return f"{value.dtype} {value.shape} {value.flatten()[:ELEMENTS].tobytes().hex()}"
        case nn.Module():
            parts: list[object] = [*value.parameters(), *value.buffers()]
        case list() | tuple() if len(value) <= CONTAINER_MAX:
            parts = list(value)
        case dict() if len(value) <= CONTAINER_MAX:
            parts = [part for item in value.items() for part in item]
        case _:
            return None
    contents = [_content(part, registered, depth + 1) for part in parts]
    return None if None in contents else repr(contents)


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
