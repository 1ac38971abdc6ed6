"""elastic.keep where the world has the same ranks in each round: each rank goes on with what it alone has, too."""

from __future__ import annotations

import pytest

from tests.unit.runtime.recovery.kept.ranks import STEPS, WORLD, Model
from tests.unit.runtime.recovery.kept.test_chains import lines


def test_a_round_goes_on_with_the_bits_of_all_ranks() -> None:
    quiet, two = lines("ranks", "quiet", "two")
    assert two[1:] == quiet[1:] and len(set(quiet[1:])) == 3


@pytest.mark.long
def test_the_bits_need_the_order_of_gradients_and_random_numbers_and_ranks_that_drift_apart_are_named() -> None:
    """Else the test above could not fail."""
    quiet, order, random, drift = (digests for _, *digests in lines("ranks", "quiet", "order", "random", "drift"))
    assert order != quiet and random != quiet
    assert drift[1] == "Disagree"


@pytest.mark.long
@pytest.mark.parametrize("name", ["late", "zero"])
def test_a_state_of_one_rank_alone_is_kept_though_the_first_step_does_not_show_it(name: str) -> None:
    quiet, two = lines("ranks", f"{name}-quiet", name)
    assert two[1:] == quiet[1:] and len(set(quiet[1:])) == 3


@pytest.mark.long
def test_steps_behind_the_last_one_that_is_kept_are_done_again_with_the_same_bits() -> None:
    quiet, every = lines("ranks", "quiet", "every")
    assert every[1:] == quiet[1:]


@pytest.mark.long
def test_a_state_that_begins_late_for_a_parameter_that_is_not_known_is_named_where_it_differs() -> None:
    ((_, *digests),) = lines("ranks", "lost")
    assert digests[1] == "Disagree"


@pytest.mark.long
def test_a_communication_hook_sees_the_gradients_of_each_step_once() -> None:
    ((_, *calls),) = lines("ranks", "hook")
    assert calls == [str(STEPS * len(list(Model().parameters())))] * WORLD


@pytest.mark.long
def test_all_ranks_are_told_when_one_of_them_cannot_keep_its_state() -> None:
    """They would wait for it in the first step for ever. Who has turned it off goes on, and so do the others."""
    odd, stops, apart, full = (digests for _, *digests in lines("ranks", "odd", "stops", "apart", "full"))
    assert odd == ["NotCarried"] * WORLD and apart == ["ConfigError"] * WORLD
    for names in (stops, full):
        assert len(set(names)) == WORLD and "RuntimeError" not in names
