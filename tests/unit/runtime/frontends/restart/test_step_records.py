"""Which lines the ledger gets of a script in rounds: each step once, with the mean of what its processes log."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from runtime.frontends.restart.rounds import ScriptReport, ScriptState, tells_new_ones
from runtime.frontends.restart.step_records import StepRecords, mean
from runtime.recovery.kept.choice import KeptStep, RoundNumber
from runtime.recovery.kept.step_log import LoggedStep
from runtime.session import StepRecord

FIRST, SECOND, THIRD = (RoundNumber(0, generation) for generation in (1, 2, 3))
SAID = ScriptReport(1, 2, ScriptState.WAITING)


class Book:
    def __init__(self) -> None:
        self.lines: list[StepRecord] = []
        self.records = StepRecords(self.lines.append)

    def hear(self, number: RoundNumber, *steps: int, ranks: tuple[int, ...] = (0, 1), plus: float = 0.0) -> None:
        """What these ranks of two have logged: their own number besides that of the step."""
        logged = [
            LoggedStep(number, step, rank, 2, (0.1 * step,), {"loss": (step + rank + plus,)})
            for step in steps
            for rank in ranks
        ]
        self.records.hear([replace(SAID, logged=tuple(logged))])

    def told(self) -> list[tuple[int, int, float | None]]:
        """Steps done, generation, loss."""
        return [(line.step + 1, line.generation, line.scalars.get("loss")) for line in self.lines]


def test_a_step_is_recorded_when_no_round_goes_back_before_it() -> None:
    book = Book()
    book.records.begin(FIRST, None)
    book.hear(FIRST, 1, 2, 3, 4)
    book.records.keep(FIRST, 2)
    book.records.keep(FIRST, 2)
    assert book.told() == [(1, 1, 1.5), (2, 1, 2.5)]
    assert book.lines[1] == StepRecord(1, 0, 1, 2, (0.2,), {"loss": 2.5}, [])
    book.records.begin(SECOND, KeptStep(3, FIRST, 0))
    book.hear(SECOND, 4, 5, plus=0.25)
    book.records.keep(SECOND, book.records.newest(SECOND))
    assert book.told()[2:] == [(3, 1, 3.5), (4, 2, 4.75), (5, 2, 5.75)], "that of the round that was not lost"


def test_what_not_all_have_told_is_left_out() -> None:
    book = Book()
    book.records.begin(FIRST, None)
    book.hear(FIRST, 1)
    book.hear(FIRST, 2, ranks=(1,))
    book.records.begin(SECOND, KeptStep(3, FIRST, 0))
    assert book.told() == [(1, 1, 1.5), (2, 2, None), (3, 2, None)]


def test_where_all_workers_are_new_they_record_what_was_left() -> None:
    book = Book()
    book.hear(SECOND, 5, 8)
    book.hear(SECOND, 7, ranks=(0,))
    book.hear(FIRST, 4, 5, 6, 7)
    book.records.begin(THIRD, KeptStep(7, SECOND, 0))
    wanted = [(5, 2, 5.5), (6, 3, None), (7, 3, None)]
    assert book.told() == wanted, "nothing is left of step 6, which was done in that round"
    book.hear(THIRD, 8)
    book.records.keep(THIRD, 8)
    assert book.told()[3:] == [(8, 3, 8.5)]


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_worker_that_is_new_records_what_the_others_do_also_when_they_are_lost_just_then(is_lost: bool) -> None:
    old, new = Book(), Book()
    old.records.begin(FIRST, None)
    old.hear(FIRST, 1, 2, 3, 4, 5)
    old.records.keep(FIRST, 2)
    knows = replace(SAID, recorded=old.records.recorded)
    new.records.hear([knows, SAID])
    assert new.records.recorded == -1, "it does not know what was said of steps behind these"
    assert tells_new_ones("a", {"a": knows, "b": knows, "c": SAID}, ["a", "b", "c"])
    assert not tells_new_ones("b", {"a": knows, "b": knows, "c": SAID}, ["a", "b", "c"])
    assert not tells_new_ones("a", {"a": knows, "b": knows}, ["a", "b"])
    told = [replace(knows, tells=True, logged=tuple(old.records.unrecorded())), SAID]
    for book in (old, new):
        book.records.hear(told)
        if book is new or not is_lost:
            book.records.begin(SECOND, KeptStep(4, FIRST, 0))
            assert book.told()[-2:] == [(3, 1, 3.5), (4, 1, 4.5)] and book.records.recorded == 4
    assert len(new.told()) == 2


def test_where_nothing_is_left_the_lines_begin_behind_the_step_that_is_loaded() -> None:
    book = Book()
    book.records.begin(THIRD, KeptStep(7, SECOND, 0))
    book.hear(THIRD, 8)
    book.records.keep(THIRD, 8)
    assert book.told() == [(8, 3, 8.5)]


def test_a_script_that_begins_anew_records_nothing_twice() -> None:
    book = Book()
    book.records.begin(FIRST, None)
    book.hear(FIRST, 1, 2)
    book.records.keep(FIRST, 2)
    book.records.begin(SECOND, None)
    book.hear(SECOND, 1, 2, 3, plus=0.25)
    book.records.keep(SECOND, 3)
    assert book.told() == [(1, 1, 1.5), (2, 1, 2.5), (3, 2, 3.75)]


def test_a_mean_has_the_same_bits_in_any_order() -> None:
    dice = random.Random(1)
    values = [dice.uniform(-1, 1) * 10 ** dice.randint(-9, 9) for _ in range(50)]
    naive, found = set(), set()
    for _ in range(20):
        dice.shuffle(values)
        naive.add(sum(values) / len(values))
        found.add(mean(values))
    assert len(found) == 1 < len(naive)


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ((1e308, 1e308), math.inf),
        ((math.inf, 1.0), math.inf),
        ((math.inf, -math.inf), math.nan),
        ((math.nan,), math.nan),
    ],
)
def test_a_mean_of_what_is_not_finite_is_one(values: tuple[float, ...], wanted: float) -> None:
    assert str(mean(values)) == str(wanted)
