"""What `make bench-goodput` computes and prints, on figures that can be checked by hand."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest

from tests.bench import goodput, legs, report
from tests.bench.goodput import KILLS, MIXED, QUIET, THEIR_KILLS, THEIRS, Measured, Sizes
from tests.bench.legs import DRAIN, FREEZE, KILL, Leg, Recipe
from tests.bench.stamps import Stamp

S = 1_000_000_000


def stamp(t_s: float, step: int) -> Stamp:
    return Stamp(int(t_s * S), step, 1, 1, 3, 0.0)


def test_faults_come_in_the_middle_of_their_periods() -> None:
    assert legs.plan(Recipe(15.0), 60.0, seed=1) == [(7.5, KILL), (22.5, KILL), (37.5, KILL), (52.5, KILL)]
    assert len(legs.plan(Recipe(15.0), 300.0, seed=1)) == 20
    assert legs.plan(Recipe(), 300.0, seed=1) == []


def test_kinds_come_in_turn_in_an_order_of_the_seed() -> None:
    recipe = Recipe(29.0, (KILL, FREEZE, DRAIN))
    kinds = [kind for _, kind in legs.plan(recipe, 300.0, seed=1)]
    assert len(kinds) == 10
    assert all(Counter(kinds[n : n + 3]) == Counter(recipe.kinds) for n in (0, 3, 6))
    assert len({tuple(legs.plan(recipe, 300.0, seed)) for seed in range(20)}) > 1


def test_steps_that_were_lost_with_a_restart_do_not_count() -> None:
    of = {"rank0-1": [stamp(t, t) for t in range(17)], "rank0-2": [stamp(20 + n, 10 + n) for n in range(5)]}
    assert legs.progress(of, -1) == 0
    assert legs.progress(of, 16 * S) == 17
    assert legs.progress(of, 19 * S) == 17
    assert legs.progress(of, 24 * S) == 15


def loss() -> list[dict[str, Any]]:
    """c is killed at 0 s; the others are connected after 0.25 s, and complete their step 0.5 s later."""
    heads: list[tuple[float, str, str, dict[str, Any]]] = [
        (0.00, "fault_injected", "c", {"fault": KILL}),
        (0.01, "member_lost", "c", {}),
        (0.02, "quiesce_started", "", {"because": "c exited"}),
        (0.05, "quiesce_complete", "", {}),
        (0.06, "committed", "", {"kind": "loss", "members": ["a", "b"]}),
        (0.07, "published", "", {"kind": "loss"}),
        (0.20, "ring_up", "a", {}),
        (0.25, "ring_up", "b", {}),
        (0.26, "redo_started", "a", {}),
        (0.70, "op_complete", "a", {}),
        (0.75, "op_complete", "b", {}),
    ]
    base = {"generation": 2}
    return [{**base, "t_mono_ns": int(t * S), "event": e, "worker_id": w, **more} for t, e, w, more in heads]


def test_the_loss_is_split_as_the_journals_tell_it() -> None:
    stall_s, redo_s = legs.split(loss(), ["c"])
    assert (stall_s, redo_s) == pytest.approx((0.25, 0.5))


def test_a_fault_of_which_the_journals_do_not_tell_is_an_error() -> None:
    with pytest.raises(AssertionError, match="the loss of \\['d'\\]"):
        legs.split(loss(), ["c", "d"])


def measured(kill_steps: int = 90, stall_s: float = 1.0) -> Measured:
    """Three rounds; the middle one is the median. The undisturbed legs make 100 steps in 100 s, torchrun's 50."""
    found = {
        QUIET: [Leg(100.0, 100)] * 3,
        KILLS: [Leg(100.0, n, {KILL: 6}, stall_s, 2.0, 3.0) for n in (kill_steps - 30, kill_steps, kill_steps + 5)],
        MIXED: [Leg(200.0, 180, {FREEZE: 3}, 4.0)] * 3,
        THEIRS: [Leg(100.0, 50)] * 3,
        THEIR_KILLS: [Leg(100.0, 20, {KILL: 6})] * 3,
    }
    return Measured(Sizes(), found)


def test_the_last_line_has_medians_against_the_undisturbed_run_of_the_same_launcher() -> None:
    line = "goodput: kill15=0.900 mixed29=0.900 stall15=0.010 stall29=0.020 torchrun15=0.400"
    assert goodput.summary(measured()) == line


def test_one_recipe_alone_has_its_rows_and_its_figures() -> None:
    found = measured()
    alone = Measured(found.sizes, {name: found.legs[name] for name in (QUIET, MIXED)}, "no root")
    assert goodput.summary(alone) == "goodput: mixed29=0.900 stall29=0.020"
    whats = [row.what for row in goodput.rows_of(alone)]
    assert whats[:3] == [
        "quiet: samples",
        "mixed29: samples",
        "kill, freeze or drain every 29 s: samples / undisturbed",
    ]
    assert not any("SIGKILL" in what or "torchrun" in what for what in whats)
    assert any("Partitions are left out: no root." in note for note in goodput.notes(alone))
    assert "kill, freeze, partition or drain every 29 s: nobody computes (stall)" in [
        row.what for row in goodput.rows_of(found)
    ]


def test_what_no_part_explains_is_shown_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert goodput.rest(measured(), KILLS)[1] == pytest.approx(0.1 - 0.01 - 0.02 - 0.015)


def test_targets_are_of_samples_and_of_stall() -> None:
    assert report.missed(goodput.rows_of(measured())) == []
    (row,) = report.missed(goodput.rows_of(measured(kill_steps=84)))
    assert row.what == "a SIGKILL every 15 s: samples / undisturbed"
    (row,) = report.missed(goodput.rows_of(measured(stall_s=1.1)))
    assert row.what == "a SIGKILL every 15 s: nobody computes (stall)"
