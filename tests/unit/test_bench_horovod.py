"""The decisions of tests/bench/horovod.py: steps that are done again, and the targets."""

from __future__ import annotations

from tests.bench.horovod import HOROVOD, STEPS, STEPS_AGAIN, death_rows, done_again, step_rows
from tests.bench.node_deaths import Outcome
from tests.bench.stamps import Stamp


def stamps(*steps: int) -> list[Stamp]:
    return [Stamp(number, step, 1, 1, 3, 0.5) for number, step in enumerate(steps)]


def test_a_step_that_a_worker_applies_twice_is_done_again() -> None:
    assert done_again({"a": stamps(0, 1, 2), "b": stamps(1, 2, 3)}) == 0
    assert done_again({"a": stamps(0, 1, 1, 2), "b": stamps(2, 1, 2)}) == 2


def test_the_targets_are_missed_by_slow_deaths_repeated_steps_and_slow_steps() -> None:
    fast, slow = Outcome(0.3, 5.0, 1.0, 1.0, 0.2), Outcome(0.7, 5.0, 1.0, 1.0, 0.2)
    assert [row.target for row in death_rows([fast], 0) if row.target] == ["median <= 0.5 s: met", "0: met"]
    assert [row.target for row in death_rows([slow], 4) if row.target] == ["median <= 0.5 s: MISSED", "0: MISSED"]
    steps = [0.1] * 12
    for factor, said in ((1.0, "met"), (1.2, "MISSED")):
        rows = step_rows({STEPS: steps, STEPS_AGAIN: steps, HOROVOD: [factor * one for one in steps]})
        assert rows[-1].target.endswith(said)
