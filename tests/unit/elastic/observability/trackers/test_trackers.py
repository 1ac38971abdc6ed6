"""What is said to the libraries, and what their files say."""

from __future__ import annotations

import struct

import pytest

from elastic.observability.trackers.mlflow_tracker import METRICS_MAX, metric_name
from elastic.observability.trackers.mlflow_tracker import _requests as requests
from elastic.observability.trackers.process import StepPoints
from elastic.observability.trackers.wandb_files import BLOCK, HEADER, records
from tests.unit.elastic.observability.trackers import LIBRARIES


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("loss", "loss"),
        ("val/top-1 acc.", "val/top-1 acc."),
        ("loss(a, b)", "loss_a_ b_"),
        ("a//b/../c", "a/c"),
        ("../a", "a"),
        (".", "_"),
    ],
)
def test_names_as_mlflow_allows_them(name: str, allowed: str) -> None:
    assert metric_name(name) == allowed


def test_a_name_that_is_too_long_for_mlflow_is_cut_and_stays_another_than_the_others() -> None:
    names = ["x" * 250, "x" * 251, "x" * 251 + "y", "x" * 251 + "z", "a/" * 200 + "b", "a/" * 200 + "c"]
    cut = [metric_name(name) for name in names]
    assert cut[0] == names[0] and len(set(cut)) == len(names)
    assert {len(name) for name in cut} == {250}
    assert [metric_name(name) for name in cut] == cut, "MLflow allows them"


def test_a_request_has_whole_steps_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(LIBRARIES)
    small = [StepPoints(number, {"a": 0.0, "b": 1.0}) for number in range(500)]
    huge = StepPoints(500, {f"layer {n}": 0.0 for n in range(2500)})
    found = list(requests([*small, huge, StepPoints(501, {})]))
    assert all(len(request) <= METRICS_MAX for request in found)
    assert sum(map(len, found)) == 500 * 3 + 2501 + 1
    assert {metric.step for metric in found[0]} == set(range(333))
    last = [metric for request in found for metric in request if metric.step == 500][-1]
    assert (last.key, last.value) == ("elastic/step", 500.0), "only then the run has the step"


def piece(kind: int, text: bytes) -> bytes:
    return struct.pack("<IHB", 0, len(text), kind) + text


def test_records_of_a_log_through_blocks_and_to_a_torn_end() -> None:
    whole = bytes(HEADER) + piece(1, b"one")
    first = b"x" * (BLOCK - len(whole) - 7)
    content = whole + piece(2, first) + piece(3, b"y" * (BLOCK - 7)) + piece(4, b"z")
    assert list(records(content)) == [b"one", first + b"y" * (BLOCK - 7) + b"z"]
    assert list(records(content[:-1])) == [b"one"]
    assert list(records(content[: BLOCK + 100])) == [b"one"]
    assert list(records(b":W&B")) == []


def test_a_block_whose_end_is_too_short_for_a_piece_is_filled_up() -> None:
    text = b"x" * (BLOCK - HEADER - 7 - 3)
    content = bytes(HEADER) + piece(1, text) + bytes(3) + piece(1, b"next")
    assert list(records(content)) == [text, b"next"]


def test_zeros_behind_the_records_are_none() -> None:
    assert list(records(bytes(HEADER) + piece(1, b"one") + bytes(200))) == [b"one"]
