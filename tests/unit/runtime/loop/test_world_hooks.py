"""When all may stop for good: with a step whose begin is saved, and not too late."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from elastic.agent.worker.node_notice import NodeNotice
from runtime.loop.hooks import world_hooks
from runtime.loop.hooks.world_hooks import PARTING_S, WorldHooks


class Steps:
    """Steps of a job that begin when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.session = SimpleNamespace(parting=False, going=None)
        self.changes = WorldHooks(cast(Any, self.session))
        monkeypatch.setattr(world_hooks, "time", SimpleNamespace(monotonic=lambda: self.now_s))

    def begin(self, after_s: float, *, saved: bool = False) -> bool:
        self.now_s += after_s
        return self.changes.may_part(saved)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(monkeypatch)


def test_only_a_step_whose_begin_is_saved_can_be_the_last(steps: Steps) -> None:
    assert [steps.begin(0.1, saved=saved) for saved in (False, True, False)] == [False, True, False]


def test_what_was_saved_for_the_end_counts_until_it_has_come(steps: Steps) -> None:
    assert not steps.begin(0.1)
    steps.session.parting = True
    assert [steps.begin(0.1, saved=saved) for saved in (False, True, False)] == [False, True, True]
    steps.session.parting = False
    assert not steps.begin(0.1)


def test_the_end_does_not_wait_for_ever_for_a_slow_storage(steps: Steps) -> None:
    steps.session.parting = True
    answers = [steps.begin(1.0) for _ in range(int(PARTING_S))]
    assert answers == [False] * int(PARTING_S - 1) + [True]


def test_with_long_steps_nobody_waits_for_another_one(steps: Steps) -> None:
    assert not steps.begin(60.0), "the first one has no length yet"
    assert steps.begin(PARTING_S)
    assert not steps.begin(PARTING_S / 10)


@pytest.mark.parametrize(("left_s", "waits"), [(PARTING_S + 20.1, True), (PARTING_S + 19.9, False)])
def test_with_long_steps_the_end_waits_if_the_machine_does(steps: Steps, left_s: float, waits: bool) -> None:
    """For one more step, which ends with a wish, and the one that begins with the checkpoint."""
    assert not steps.begin(60.0), "the first one has no length yet"
    steps.session.going = NodeNotice(steps.now_s + 10 + left_s, "spot notice")
    steps.session.parting = True
    assert steps.begin(10.0) is not waits
    assert steps.begin(10.0, saved=waits)


def test_a_second_notice_in_the_same_words_is_another_notice(steps: Steps) -> None:
    """The first one was taken back, or a nearer end is announced now: nobody tells the worker so."""
    told: list[float] = []
    steps.changes.drain_hooks.append(lambda seconds_left, because: told.append(round(seconds_left)))
    for left_s, after_s in ((120.0, 10.0), (20.0, 30.0), (120.0, 0.0)):
        steps.session.going = NodeNotice(steps.now_s + left_s, "the file says so")
        steps.changes.tell_drain()
        assert steps.changes.take_wish() and not steps.changes.take_wish()
        steps.now_s += after_s
    assert told == [120, 20, 120]


def test_a_notice_that_a_new_leader_repeats_is_told_once(steps: Steps) -> None:
    """It comes as late as this process was busy."""
    told: list[str] = []
    steps.changes.drain_hooks.append(lambda seconds_left, because: told.append(because))
    until_s = steps.now_s + 120
    for late_s in (0.0, 0.001, 3.0, 0.5):
        steps.session.going = NodeNotice(until_s + late_s, "the file says so")
        steps.changes.tell_drain()
        assert steps.changes.take_wish() is (late_s == 0)
    steps.now_s = until_s + 30
    assert steps.changes.take_wish(), "the last one before the end"
    steps.session.going = NodeNotice(steps.now_s, "the file says so")
    steps.changes.tell_drain()
    assert not steps.changes.take_wish()
    assert told == ["the file says so"]
