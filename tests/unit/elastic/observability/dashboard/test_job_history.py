"""The document of a job's page, and the events with which a page follows it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.observability.dashboard import job_history
from elastic.observability.dashboard.job_history import JobHistory, PageEvent
from tests.unit.elastic.observability.dashboard.lines import START_S, a_loss, line

LISTS = {"moment": "moments", "generation": "generations", "recovery": "recoveries", "checkpoint": "checkpoints"}


def step(number: int, loss: object = 1.0) -> dict[str, Any]:
    return {"step": number, "scalars": {"loss": loss}, "samples": [[0, 1], [2]]}


def a_job() -> list[dict[str, Any]]:
    members = ["n.0.0", "n.1.0"]
    return [
        line("worker_started", 0.0, "n.0.0"),
        line("committed", 1.0, kind="form", members=members, because="all are there"),
        line("running", 1.1),
        line("steps_planned", 1.2, "n.0.0", total=100, shards=4),
        line("checkpoint_complete", 2.0, "n.0.0", step=4, bytes=1000, series="_periodic", entry="e"),
        *a_loss(3.0, 1, "n.1.0", ["n.0.0"]),
        line("fault_injected", 4.0, "n.0.0", number=1, fault="kill"),
    ]


def replayed(document: dict[str, Any], events: list[PageEvent]) -> dict[str, Any]:
    """What a page shows that had the document, and then got these events."""
    shown: dict[str, Any] = json.loads(json.dumps(document))
    for event in events:
        shown["number"] = event.number
        if event.kind in LISTS:
            shown[LISTS[event.kind]].append(event.data)
        elif event.kind == "fault":
            shown["faults"].append(event.data)
        elif event.kind == "plan":
            shown["plan"] = event.data
        elif event.kind == "steps":
            shown["steps"]["at"] += event.data["at"]
    return shown


def test_the_events_of_a_job_with_short_steps_do_not_take_the_memory_of_its_whole_ledger(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job_history, "KEPT_VALUES", 2000)
    history, kept, steps, looks = JobHistory(), 2000, 20, 500
    for look in range(looks):
        history.applied([step(number) for number in range(look * steps, (look + 1) * steps)], 2.0 * look)
    events = history.after(looks - kept // (2 * steps))
    assert events is not None and sum(2 * len(event.data["at"]) for event in events) == kept
    assert history.after(looks - kept // (2 * steps) - 1) is None, "the page reads the document anew"
    assert history.document()["number"] == history.number == looks


def test_a_job_with_a_loss_in_it_is_told() -> None:
    history = JobHistory()
    for one in a_job():
        history.see(one)
    document = history.document()
    assert [(one["generation"], one["kind"], one["members"]) for one in document["generations"]] == [
        (1, "form", 2),
        (2, "loss", 1),
    ]
    (recovery,) = document["recoveries"]
    assert recovery["lost"] == ["n.1.0"] and recovery["recovery_ms"] == pytest.approx(400)
    said = [one["said"] for one in document["moments"]]
    assert "n.1.0, rank 1, is lost to the job" in said and "generation 2 trains" in said
    assert document["plan"] == {"total": 100, "shards": 4}
    assert document["checkpoints"][0]["step"] == 4 and document["faults"][0]["fault"] == "kill"
    assert history.summary(START_S + 11.1)["time"]["goodput"] == pytest.approx(0.94)


@given(st.integers(0, len(a_job())))
def test_a_page_that_comes_at_any_moment_shows_the_same_as_one_that_comes_later(when: int) -> None:
    history, lines = JobHistory(), a_job()
    for one in lines[:when]:
        history.see(one)
    early = history.document()
    for number, one in enumerate(lines[when:]):
        history.see(one)
        history.applied([step(number)], float(number))
    events = history.after(early["number"])
    assert events is not None
    assert [event.number for event in events] == list(range(early["number"] + 1, history.number + 1))
    late: dict[str, Any] = json.loads(json.dumps(history.document()))
    shown = replayed(early, events)
    for part in ("number", "moments", "generations", "recoveries", "checkpoints", "faults", "plan"):
        assert shown[part] == late[part], part
    assert shown["steps"]["at"] == late["steps"]["at"]


def test_a_page_that_is_too_far_behind_or_of_another_dashboard_reads_the_document_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job_history, "KEPT_EVENTS", 5)
    history = JobHistory()
    assert history.after(0) == [] and history.after(1) is None and history.after(-1) is None
    for number in range(8):
        history.see(line("worker_started", number, f"n.{number}.0"))
    assert history.after(2) is None
    assert [event.number for event in history.after(3) or ()] == [4, 5, 6, 7, 8]
    assert history.after(8) == [] and history.after(9) is None


def test_a_step_that_is_done_again_is_counted_and_shown_once() -> None:
    history = JobHistory()
    history.applied([step(0), step(1)], 0.0)
    history.resumed((1, 1))
    history.applied([step(1), step(2)], 1.0)
    assert history.document()["steps"]["at"] == [0, 1, 2]
    summary = history.summary(0.0)
    assert (summary["steps"], summary["samples"], summary["last_step"]) == (3, 9, 2)


def test_a_loss_that_is_no_number_is_a_gap() -> None:
    history = JobHistory()
    history.applied([step(0, 1.0), step(1, "nan"), step(2, True), step(3, 2)], 0.0)
    assert history.document()["steps"]["values"]["loss"]["mean"] == [1.0, None, None, 2.0]
    assert json.dumps(history.document(), allow_nan=False)


def test_the_rate_falls_to_0_while_no_step_comes_and_ends_with_the_job() -> None:
    history = JobHistory()
    for second in range(3):
        history.tick(second, START_S + second)
        history.applied([step(2 * second), step(2 * second + 1)], second)
    for second in (3, 4):
        history.tick(second, START_S + second)
    rate = history.document()["rate"]
    assert rate["values"]["steps_per_s"]["mean"] == [2.0, 2.0, 2.0, 0.0]
    assert rate["values"]["samples_per_s"]["mean"] == [6.0, 6.0, 6.0, 0.0]
    history.ended(START_S + 4)
    history.tick(9, START_S + 9)
    assert len(history.document()["rate"]["at"]) == 4


def test_what_was_applied_before_the_dashboard_began_has_no_rate() -> None:
    history = JobHistory()
    history.applied([step(number) for number in range(500)], 0.0)
    history.tick(0.0, START_S)
    history.tick(1.0, START_S + 1)
    assert history.document()["rate"]["values"]["steps_per_s"]["mean"] == [0.0]


def test_a_long_job_costs_a_bounded_document() -> None:
    history = JobHistory()
    for number in range(20):
        history.applied([step(one) for one in range(1000 * number, 1000 * number + 1000)], number)
        for one in range(300):
            history.see(line("worker_started", number, f"n.{one}.{number}"))
    document = history.document()
    assert len(document["steps"]["at"]) <= 2000 and document["steps"]["at"][-1] == 19_999
    assert len(document["moments"]) == job_history.KEPT_MOMENTS


def test_values_at_the_ends_of_the_range_of_floats_can_be_shown() -> None:
    history = JobHistory()
    for number in range(2002):
        history.applied([step(number, 1.7e308)], 0.0)
    for number, wrong in enumerate((float("inf"), float("nan"), 10**400, -(10**400)), 2002):
        history.applied([step(number, wrong)], 0.0)
    document = history.document()
    assert document["steps"]["stride"] == 2 and document["steps"]["values"]["loss"]["mean"][0] == 1.7e308
    assert json.dumps([document, *(event.data for event in history.after(0) or ())], allow_nan=False)


def test_a_clock_that_is_set_back_does_not_stop_the_rate() -> None:
    history = JobHistory()
    for second in range(4):
        history.tick(second, START_S + second - (3600 if second > 1 else 0))
        history.applied([step(2 * second), step(2 * second + 1)], second)
    assert history.document()["rate"]["values"]["steps_per_s"]["mean"] == [2.0, 2.0, 2.0]


def test_steps_of_long_ago_are_no_events_and_have_no_rate() -> None:
    history = JobHistory()
    for look in range(3):
        history.applied([step(number) for number in range(20_000 * look, 20_000 * look + 20_000)], 2.0 * look)
        history.tick(2.0 * look, START_S + 2 * look)
    behind = history.number
    history.applied([step(60_000), step(60_001)], 6.0)
    history.tick(6.0, START_S + 6)
    history.applied([step(60_002)], 7.0)
    history.tick(7.0, START_S + 7)
    document = history.document()
    assert document["rate"]["values"]["steps_per_s"]["mean"] == [1.0] and document["steps"]["at"][-1] == 60_002
    assert history.after(0) is None  # a page that was open reads the document anew
    told = [event.data["at"] for event in history.after(behind) or () if event.kind == "steps"]
    assert told == [[60_000, 60_001], [60_002]]


def test_a_page_gets_the_same_scalars_live_as_when_it_is_loaded_anew() -> None:
    history = JobHistory()
    scalars = {f"layer-{number}": 1.0 for number in range(300)}
    history.applied([{"step": 0, "scalars": scalars, "samples": []}], 0.0)
    events = history.after(0)
    assert events is not None and len(events) == 1
    assert events[0].data["scalars"][0].keys() == history.document()["steps"]["values"].keys()


def test_a_job_that_has_gone_on_has_not_ended() -> None:
    history = JobHistory()
    for one in (line("committed", 1.0, kind="form", members=["n.0.0"]), line("running", 1.1)):
        history.see(one)
    history.ended(START_S + 3.1)
    assert history.summary(START_S + 9)["time"]["total_s"] == pytest.approx(2.0)
    history.ended(None)
    assert history.summary(START_S + 11.1)["time"]["total_s"] == pytest.approx(10.0)


def seen_from_afar() -> list[dict[str, Any]]:
    """The lines of a loss without those of workers, which the dashboard of a fleet does not read."""
    return [one for one in a_loss(3.0, 1, "n.1.0", ["n.0.0"]) if one["event"] not in ("ring_up", "op_complete")]


@pytest.mark.parametrize("apart_s", [-3e6, 0.0, 3e6])
def test_the_machines_of_a_fleet_have_clocks_of_their_own(apart_s: float) -> None:
    """The agent, and the leader that takes over when the generation is published, are on other machines."""
    history = JobHistory(leader_only=True)
    for one in [line("running", 0.0), *seen_from_afar()]:
        elsewhere = one["event"] in ("worker_dying", "published", "running")
        history.see({**one, "t_mono_ns": one["t_mono_ns"] + round(elsewhere * apart_s * 1e9)})
    (told,) = history.document()["recoveries"]
    phases = [told[f"{phase}_ms"] for phase in ("detect", "abort", "decide", "build")]
    assert phases == pytest.approx([100, 100, 100, 100], abs=0.01)
    assert history.summary(START_S + 10)["time"]["training_s"] == pytest.approx(9.6)


def test_no_phase_takes_less_than_no_time_where_the_clock_of_a_new_leader_is_slow() -> None:
    history = JobHistory(leader_only=True)
    for one in seen_from_afar():
        slow_s = 0.25 if one["event"] in ("published", "running") else 0.0
        history.see({**one, "t_wall": one["t_wall"] - slow_s})
    (told,) = history.document()["recoveries"]
    assert [round(told[f"{phase}_ms"]) for phase in ("abort", "decide", "build")] == [100, 0, 0]
