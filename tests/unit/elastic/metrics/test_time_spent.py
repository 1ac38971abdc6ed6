"""Where the time of a job went."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.metrics.time_spent import TimeSpent
from elastic.records.journal import Recoveries
from tests.unit.elastic.observability.dashboard.lines import START_S, a_loss, line

UNSPENT = ("paused", "resuming", "repeating")


def spent(lines: list[dict[str, Any]], spent: TimeSpent | None = None) -> TimeSpent:
    recoveries, spent = Recoveries(), spent or TimeSpent()
    for one in lines:
        spent.see(one, recoveries.see(one))
    return spent


def test_nothing_is_lost_before_a_job_has_trained() -> None:
    assert spent([line("leading", 0.0)]).document(START_S + 100, 10)["goodput"] is None


def test_a_loss_costs_what_its_phases_took() -> None:
    document = spent([line("running", 10.0), *a_loss(15.0, 1, "n.1.0", ["n.0.0"])]).document(START_S + 20, 10)
    assert document["total_s"] == pytest.approx(10.0)
    assert document["parts"] == pytest.approx(
        {"detect": 0.1, "abort": 0.1, "decide": 0.1, "build": 0.1, "sync": 0, "redo": 0.2, **dict.fromkeys(UNSPENT, 0)}
    )
    assert document["training_s"] == pytest.approx(9.4) and document["goodput"] == pytest.approx(0.94)


def test_a_pause_is_no_part_of_the_decision_that_ends_it() -> None:
    lines = a_loss(15.0, 1, "n.1.0", ["n.0.0"])
    lines[5:5] = [line("state", 15.2, state="paused", because="1 of 2")]
    for one in lines[6:]:
        one["t_mono_ns"] += 30_000_000_000
        one["t_wall"] += 30
    lines[6:6] = [line("state", 45.25, state="rebuilding", because="")]
    parts = spent([line("running", 10.0), *lines]).document(START_S + 50, 10)["parts"]
    assert parts["paused"] == pytest.approx(30.05) and parts["decide"] == pytest.approx(0.05)


def test_a_pause_that_lasts_counts_until_now() -> None:
    lines = [line("running", 0.0), line("state", 10.0, state="paused", because="1 of 2")]
    document = spent(lines).document(START_S + 40, 10)
    assert document["goodput"] == pytest.approx(0.25)


def test_between_two_runs_nothing_is_lost_and_the_start_of_the_second_is() -> None:
    first = spent([line("running", 0.0), line("job_ended", 10.0)])
    first.run_begins(3)
    document = spent([line("leading", 1000.0), line("running", 1004.0)], first).document(START_S + 1010, 10)
    assert document["total_s"] == pytest.approx(20.0) and document["redone_steps"] == 3
    assert document["parts"]["resuming"] == pytest.approx(4.0)
    assert document["parts"]["repeating"] == pytest.approx(16 * 3 / 13), "3 of 13 steps"
    assert document["goodput"] == pytest.approx(16 * 10 / 13 / 20)
