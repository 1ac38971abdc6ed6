"""The state of transformers.Trainer as JSON, and what a Trainer gets back; with Trainer itself: tests/frameworks."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elastic.errors import NotCarried
from runtime.frontends.frameworks.plain_state import ELEMENTS_MAX
from runtime.frontends.restart import kept_trainer
from runtime.frontends.restart.kept_trainer import LOADERS, REPLACED, SKIPPED, KeptTrainer, _StateJson


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


BEFORE = {"state": '{"global_step": 3}', "at": [0, 3, False]}


def test_a_second_training_of_the_same_trainer_has_all_that_was_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "RANK", "0")
    monkeypatch.setattr(KeptTrainer, "first", None)
    monkeypatch.setattr(kept_trainer, "kept_before", lambda name: BEFORE)
    resumed: list[object] = []
    trainer: Any = SimpleNamespace(args=SimpleNamespace(**dict.fromkeys(SKIPPED, True)))
    own = {name: lambda *given: resumed.append(given[0]) for name in (*REPLACED, *LOADERS)}
    vars(trainer).update(own)
    place: Any = SimpleNamespace(memory=str(tmp_path))
    KeptTrainer(trainer, place)
    trainer.train("the script's own snapshot")
    assert resumed == [str(tmp_path / "trainer.0")]
    assert not any(getattr(trainer.args, name) for name in SKIPPED)
    assert all(getattr(trainer, name) is not own[name] for name in LOADERS), "keep() has filled it"
    trainer.train("another snapshot")
    assert resumed[1:] == ["another snapshot"]
    assert {name: getattr(trainer, name) for name in own} == own
    assert all(getattr(trainer.args, name) for name in SKIPPED)


class Average:
    """A callback."""

    def __init__(self, name: str, value: float) -> None:
        self.name = name
        self.weights = nn.Linear(ELEMENTS_MAX + 1, 1, bias=False)
        nn.init.constant_(self.weights.weight, value)


class Counts:
    """Another one."""

    steps = 0


class Kept:
    """In the place of a KeptScript."""

    def __init__(self, state_dict: Callable[[], Any]) -> None:
        """state_dict: of what it keeps."""
        self.off = ""
        self.steps = 0
        self._state_dict = state_dict

    def turn_off(self, because: str) -> None:
        self.off = because

    def done(self) -> None:
        self._state_dict()
        self.steps += 1


@pytest.fixture
def kept_with(tmp_path: Path) -> Callable[..., Any]:
    def made(*callbacks: object) -> Any:
        trainer: Any = SimpleNamespace(
            args=SimpleNamespace(**dict.fromkeys(SKIPPED, True)),
            callback_handler=SimpleNamespace(callbacks=[*callbacks]),
            control=SimpleNamespace(should_epoch_stop=False, should_training_stop=False),
            model=nn.Linear(3, 2),
            state=State(global_step=1),
            _tr_loss=torch.zeros(()),
        )
        vars(trainer).update({name: lambda *given: None for name in (*REPLACED, *LOADERS)})
        place: Any = SimpleNamespace(memory=str(tmp_path))
        kept: Any = KeptTrainer(trainer, place)
        kept._kept, kept._updates = Kept(kept.state_dict), 10
        kept._long.begin(kept._rows())
        return kept

    return made


def test_callbacks_get_what_those_of_their_name_had(kept_with: Callable[..., Any]) -> None:
    """Trainer puts those that it makes anew from a snapshot behind the others."""
    first, second, counts = Average("first", 1.0), Average("second", 1.0), Counts()
    kept = kept_with(counts, first, second)
    kept._trainer.shadow = [torch.zeros(ELEMENTS_MAX + 1)]  # of a class of the script's own
    nn.init.constant_(second.weights.weight, 3.0)
    counts.steps = 7
    kept._maybe_log_save_evaluate()
    found = kept.state_dict()
    assert (kept._kept.steps, kept._kept.off) == (1, "")
    callbacks: list[Any] = [Average("first", 1.0), Average("second", 1.0), Counts()]
    again = kept_with(*callbacks)
    again._found = found
    again._restore()
    assert torch.equal(again._trainer.shadow[0], torch.zeros(ELEMENTS_MAX + 1))
    assert [float(one.weights.weight.detach().mean()) for one in callbacks[:2]] == [1.0, 3.0]
    assert callbacks[2].steps == 7
    again._maybe_log_save_evaluate()
    told = {name: long["modules"].keys() for name, _, long in again.state_dict()["callbacks"]}
    assert told == {"Average": {"weights"}, "Counts": set()}, "what was filled is kept in the next step, too"


def test_those_of_an_older_version_have_no_tensors(kept_with: Callable[..., Any]) -> None:
    counts = Counts()
    kept_with(counts)._restore_callbacks({"callbacks": [["Counts", {"steps": 7}]], "control": {}})
    assert counts.steps == 7


def test_nothing_is_kept_when_a_callback_makes_what_the_next_round_could_not_fill(
    kept_with: Callable[..., Any],
) -> None:
    counts: Any = Counts()
    kept = kept_with(counts)
    counts.best = copy.deepcopy(kept._trainer.model)
    kept._maybe_log_save_evaluate()
    assert kept._kept.off.startswith("best of Counts was made when training had begun")


def test_what_cannot_be_carried_ends_no_training(kept_with: Callable[..., Any]) -> None:
    kept = kept_with(Counts())

    def refused() -> None:
        raise NotCarried("callbacks.0.2 is a function")

    kept._kept.done = refused
    kept._maybe_log_save_evaluate()
    assert kept._kept.off == "callbacks.0.2 is a function"
