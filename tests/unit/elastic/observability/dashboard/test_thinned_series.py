"""Values in a bounded number of points."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic.observability.dashboard.thinned_series import NAMES, ThinnedSeries


def test_few_values_are_kept_as_they_are() -> None:
    series = ThinnedSeries(points=2)
    for at in range(3):
        series.add(at, {"loss": at / 2})
    assert series.document() == {"stride": 1, "at": [0, 1, 2], "values": {"loss": {"mean": [0.0, 0.5, 1.0]}}}


def test_a_spike_is_still_seen_when_neighbours_have_become_one_point() -> None:
    series = ThinnedSeries(points=2)
    for at, value in enumerate([1.0, 1.0, 1.0, 9.0, 1.0]):
        series.add(at, {"loss": value})
    document = series.document()
    assert document["stride"] == 2 and document["at"] == [1, 3, 4]
    assert document["values"]["loss"] == {"mean": [1.0, 5.0, 1.0], "min": [1.0, 1.0, 1.0], "max": [1.0, 9.0, 1.0]}


def test_steps_without_a_value_are_a_gap_and_a_name_that_comes_late_has_one_before() -> None:
    series = ThinnedSeries(points=4)
    series.add(0, {"loss": 1.0})
    series.add(1, {})
    series.add(2, {"loss": 3.0, "accuracy": 0.5})
    values = series.document()["values"]
    assert values["loss"]["mean"] == [1.0, None, 3.0] and values["accuracy"]["mean"] == [None, None, 0.5]


def test_a_script_that_logs_any_number_of_names_costs_a_bounded_one() -> None:
    series = ThinnedSeries(points=4)
    for at in range(10):
        series.add(at, {f"name-{at}-{number}": 0.0 for number in range(20)})
    assert len(series.document()["values"]) == NAMES


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400), st.integers(1, 7))
def test_whatever_comes_the_points_are_bounded_and_hold_all_values(values: list[float], points: int) -> None:
    series = ThinnedSeries(points)
    for at, value in enumerate(values):
        series.add(at, {"x": value})
    document = series.document()
    stride, at = document["stride"], document["at"]
    assert len(series) == len(at) <= 2 * points
    assert at[-1] == len(values) - 1 and at == sorted(at)
    groups = [values[begin : begin + stride] for begin in range(0, len(values), stride)]
    assert [last + 1 for last in at] == [sum(map(len, groups[: count + 1])) for count in range(len(groups))]
    if stride > 1:
        assert document["values"]["x"]["min"] == [min(group) for group in groups]
        assert document["values"]["x"]["max"] == [max(group) for group in groups]
