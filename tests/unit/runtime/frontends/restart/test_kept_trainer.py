"""The state of transformers.Trainer as JSON; with Trainer itself it is tried in tests/frameworks."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch

from runtime.frontends.restart.kept_trainer import _StateJson


@dataclasses.dataclass
class State:
    """The part of a TrainerState that matters here."""

    global_step: int = 0
    log_history: list[Any] = dataclasses.field(default_factory=list)
    stateful_callbacks: dict[str, Any] = dataclasses.field(default_factory=dict)


class Counted:
    """A scalar that counts how often it is written."""

    ndim = 0

    def __init__(self) -> None:
        self.written = 0

    def item(self) -> float:
        self.written += 1
        return 0.5


def test_the_json_is_that_of_the_state_however_its_log_changes() -> None:
    state, kept = State(), _StateJson()
    first, second = {"loss": 1.0}, {"loss": 2.0}
    for log in (
        [],
        [first],
        [first],
        [first, second],
        [first, second, {"a": 3}],
        [second, first],
        [first],
        [],
        [second],
    ):
        state.global_step, state.log_history = state.global_step + 1, [*log]
        kept.update(state)
        assert json.loads(kept.json) == dataclasses.asdict(state)


def test_an_entry_is_not_written_again_in_each_step() -> None:
    state, kept, counted = State(), _StateJson(), [Counted() for _ in range(50)]
    for one in counted:
        state.log_history.append({"loss": one})
        kept.update(state)
        kept.update(state)
    assert max(one.written for one in counted) <= 3, "twice as the newest, once when another one is behind it"
    assert json.loads(kept.json)["log_history"] == [{"loss": 0.5}] * 50


def test_scalars_become_numbers_and_other_values_are_named() -> None:
    state, kept = State(log_history=[{"a": torch.tensor(0.5), "b": np.float32(0.25), "c": np.int64(3)}]), _StateJson()
    kept.update(state)
    assert json.loads(kept.json)["log_history"] == [{"a": 0.5, "b": 0.25, "c": 3}]
    state.log_history.append({"a": torch.ones(2)})
    with pytest.raises(TypeError, match="Tensor tensor"):
        kept.update(state)
