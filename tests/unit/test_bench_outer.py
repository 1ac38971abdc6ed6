"""What `make bench-outer` computes and prints, on figures that can be checked by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench import outer, outer_work, report
from tests.bench.launchers import NODES, OURS, TORCHFT
from tests.bench.outer import QUIET, STORM, Found, Leg, Records, judge
from tests.bench.outer_work import Mark
from tests.bench.stamps import Stamp

S = 1_000_000_000
EACH = outer_work.SEQUENCES


def stamp(t_s: float, step: int, inner_steps: int, loss: float = 1.0) -> Stamp:
    return Stamp(int(t_s * S), step, inner_steps, 1, 3, loss)


def test_a_round_counts_once_though_each_worker_stamps_it() -> None:
    told = {"a": [stamp(t, t, 60) for t in range(1, 5)], "b": [stamp(t + 0.1, t, 60) for t in range(1, 5)]}
    leg = judge(told, 300, int(1.05 * S), 8 * S, own_parts=False)
    assert (leg.rounds, leg.samples, leg.dropped) == (3, 180 * EACH, 120 * EACH), "round 1 was before"
    assert round(leg.stop_s, 3) == 3.9, "after the last round"


def test_parts_of_processes_add_up() -> None:
    told = {"a": [stamp(1, 0, 20), stamp(3, 1, 20)], "b": [stamp(1.1, 0, 20), stamp(3.2, 1, 0)]}
    leg = judge(told, 80, 0, 4 * S, own_parts=True)
    assert (leg.rounds, leg.samples, leg.dropped, leg.stop_s) == (2, 60 * EACH, 20 * EACH, 1.9)


def test_rounds_that_are_made_again_do_not_count() -> None:
    told = {"a": [stamp(1, 0, 20), stamp(2, 1, 20)], "b": [stamp(3, 0, 20), stamp(4, 1, 20), stamp(5, 2, 20)]}
    leg = judge(told, 100, 0, 6 * S, own_parts=False)
    assert (leg.rounds, leg.samples, leg.dropped, leg.stop_s) == (3, 60 * EACH, 40 * EACH, 1.0)
    assert judge(told, 100, 0, 6 * S, own_parts=True) == leg


def test_faults_are_spread_over_the_time_and_the_same_for_the_same_dice() -> None:
    planned = outer.moments(64, 2700.0, random.Random(49))
    assert planned == outer.moments(64, 2700.0, random.Random(49))
    assert [int(at_s / (2700 / 64)) for at_s, _ in planned] == list(range(64))
    assert {node for _, node in planned} == set(NODES)


def test_a_loss_as_of_fresh_weights_is_found() -> None:
    losses = [5.5, 4.0, *[2.5] * 60]
    good = {"a": [stamp(t, t, 60, loss) for t, loss in enumerate(losses)]}
    assert outer.fell_back(good) is None
    spoiled = [*good["a"][:55], replace(good["a"][55], loss=4.8), *good["a"][56:]]
    assert outer.fell_back({"a": spoiled}) == 55


def test_workers_with_different_states_are_found() -> None:
    one, other = Mark(25, 2.5, "d"), Mark(25, 2.5, "e")
    assert outer.agreed({25: [one, one], 50: [replace(one, rounds=50)]}) == [one, replace(one, rounds=50)]
    with pytest.raises(AssertionError, match="after 25 rounds"):
        outer.agreed({25: [one, other]})


def found(loss: float) -> Found:
    quiet, storm = Leg(10.0, 5, 600, 0, 2.5), Leg(20.0, 8, 900, 40, 4.0, 3)
    legs = {name: {QUIET: quiet, STORM: storm} for name in (OURS, TORCHFT)}
    jobs = [[Mark(25, 2.5 + seed / 10, ""), Mark(50, 2.0 + seed / 10, "")] for seed in range(3)]
    return Found(legs, [Mark(25, 2.4, ""), Mark(50, loss, ""), Mark(75, 1.0, "")], jobs)


def test_rows_have_rates_shares_and_the_loss_after_the_last_common_rounds() -> None:
    rows = outer.rows_of([found(2.1)])
    assert len(rows) == 5 and rows[0].what == f"{QUIET}, {OURS}: samples/s" and rows[0].figure == "60.0"
    assert rows[2].figure == "45.0" and "0.75 of undisturbed, 3 killed" in rows[2].spread
    assert rows[4].what.startswith("held-out loss after 50 rounds") and rows[4].figure == "2.1000"
    assert rows[4].spread.startswith("2.0000 to 2.2000") and not report.missed(rows)
    assert report.missed(outer.rows_of([found(2.3)]))


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    records = Records({"date": "today"}, "python", [found(2.1)])
    records.write(tmp_path / "a" / "b.json")
    assert Records.read(tmp_path / "a" / "b.json") == records
