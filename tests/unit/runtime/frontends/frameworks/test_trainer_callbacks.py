"""Callbacks of Trainer find their state by the name of their class, in any order."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.errors import ConfigError
from runtime.frontends.frameworks import trainer_callbacks
from runtime.frontends.frameworks.long_tensors import CallbackReader


class Best:
    def __init__(self, score: float) -> None:
        self.score = score


class Counts:
    def __init__(self, number: int) -> None:
        self.number = number


class Bare:
    """It keeps nothing."""


def kept(callbacks: list[Any]) -> list[Any]:
    return trainer_callbacks.kept(callbacks, CallbackReader(None))


def put_back(callbacks: list[Any], state: list[Any]) -> None:
    trainer_callbacks.put_back(callbacks, state, CallbackReader(None))


def shown(callbacks: list[Any]) -> list[dict[str, Any]]:
    return [vars(each) for each in callbacks]


def test_the_order_of_callbacks_may_differ_and_a_class_may_be_there_twice() -> None:
    state = kept([Best(0.5), Counts(1), Counts(2)])
    here: list[Any] = [Counts(0), Best(0.0), Bare(), Counts(0)]
    put_back(here, state)
    assert shown(here) == [{"number": 1}, {"score": 0.5}, {}, {"number": 2}]


def test_a_callback_that_is_in_one_process_only_is_named() -> None:
    name = f"{__name__}.Best"
    words = "give Trainer its callbacks in all workers, not only if trainer.is_world_process_zero()"
    with pytest.raises(ConfigError, match=f"callback {name} has a state in the other workers") as missing:
        put_back([Counts(0)], kept([Counts(1), Best(0.5)]))
    with pytest.raises(ConfigError, match=f"callback {name} has a state in this worker, and is not in the o") as more:
        put_back([Counts(0), Best(0.5)], kept([Counts(1)]))
    assert words in str(missing.value)
    assert words in str(more.value)


def test_callbacks_without_a_state_may_be_in_one_process_only() -> None:
    put_back([], kept([Bare()]))
    put_back([Bare()], [])


def test_bars_of_transformers_may_be_in_one_process_only() -> None:
    shows = type("ProgressCallback", (Counts,), {"__module__": "transformers.trainer_callback"})
    stops = type("EarlyStoppingCallback", (Counts,), {"__module__": "transformers.trainer_callback"})
    put_back([], kept([shows(1)]))
    with pytest.raises(ConfigError, match="EarlyStoppingCallback"):
        put_back([], kept([stops(1)]))


def test_a_checkpoint_of_an_older_version_has_the_order_alone() -> None:
    here: list[Any] = [Best(0.0), Counts(0)]
    put_back(here, [{"score": 0.5}, {"number": 3}])
    assert shown(here) == [{"score": 0.5}, {"number": 3}]
    with pytest.raises(ConfigError, match="the state of 1 callbacks and names none, and this Trainer has 2"):
        put_back(here, [{"score": 0.5}])
