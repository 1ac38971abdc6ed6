"""How long a step is said to take."""

from __future__ import annotations

from runtime.pace import Pace


def after(*begun_s: float) -> float:
    pace = Pace()
    for now_s in begun_s:
        pace.begin(now_s)
    return pace.step_s


def test_two_steps_have_to_pass_before_it_is_known() -> None:
    assert (after(), after(5.0), after(5.0, 7.0), after(5.0, 7.0, 9.0)) == (0.0, 0.0, 0.0, 2.0)


def test_what_comes_between_two_steps_now_and_then_does_not_count() -> None:
    assert after(0.0, 1.0, 2.0, 603.0) == 1.0  # an evaluation of ten minutes
    assert after(0.0, 1.0, 2.0, 603.0, 604.0) == 1.0


def test_steps_that_stay_slower_are_slower() -> None:
    assert after(0.0, 1.0, 2.0, 5.0, 8.0) == 3.0


def test_the_wait_for_a_copy_is_no_part_of_a_step() -> None:
    pace = Pace()
    pace.waited(1.0)
    for now_s, waited_s in ((0.0, 0.0), (2.0, 0.5), (4.5, 0.5), (7.0, 0.0)):
        pace.begin(now_s)
        pace.waited(waited_s)
    assert pace.step_s == 2.0
