"""What `make bench-step` computes and prints, on figures that can be checked by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runtime.allreduce.ring.frames import SendQueue
from tests.bench import overlap, report, sent, step, work
from tests.bench.healthy import BASELINE, KEEPING, NULL
from tests.bench.step import EXACT, NATIVE, Measured, Part


def part(model: str, workers: int, exact: float) -> Part:
    """Six blocks, so that the interval is from the least to the greatest; DDP takes 1 s."""
    step_s = {BASELINE: [1.0] * 6, NULL: [1.0] * 6, KEEPING: [0.8] * 6, EXACT: [exact] * 6, NATIVE: [0.9] * 6}
    gradients = {BASELINE: 5.0, NULL: 5.0, KEEPING: 4.5, EXACT: 9.0, NATIVE: 9.0}
    peak_bytes = {name: int(count * 4 * step.ELEMENTS[model]) for name, count in gradients.items()}
    return Part(model, workers, 8, step_s, peak_bytes, {EXACT: 41e6, NATIVE: 41e6})


def measured(exact: float) -> Measured:
    compared = [part("mlp", 2, exact), part("transformer", 2, 0.5), part("mlp", 4, 9.0)]
    ways = {overlap.AFTERWARDS: [0.2] * 6, overlap.OVERLAPPED: [0.15] * 6, overlap.AGAIN: [0.2] * 6}
    buckets = Part("mlp", 2, 8, {"DDP, buckets of 1 MB": [1.0] * 6}, {"DDP, buckets of 1 MB": 38 << 20}, {})
    return Measured(compared, buckets, [part("mlp", 3, 1.0)], {"mlp": ways})


def test_the_last_line_is_of_the_worse_model_with_two_workers() -> None:
    assert step.summary(measured(1.02)) == "step: exact=1.020 allreduce=0.900"


def test_bars_are_judged_with_two_workers_only() -> None:
    assert report.missed(step.rows_of(measured(1.05))) == []
    (missed,) = report.missed(step.rows_of(measured(1.06)))
    assert (missed.what, missed.figure) == ("MLP, 2 workers: elastic exact / torch DDP", "1.060")


@pytest.mark.parametrize("workers, shown", [(2, "1.0229"), (4, "0.6819")])
def test_bytes_are_shown_against_the_bound_of_every_algorithm(workers: int, shown: str) -> None:
    row = step.sent_row("", part("mlp", workers, 1.0), EXACT)
    assert row.figure == "41.00 MB"
    assert row.spread.startswith(f"{shown} of")


@pytest.mark.parametrize(("shards", "gradients"), [(1, 6), (2, 6), (4, 7), (8, 8)])
def test_memory_is_shown_beside_the_formula_of_the_documentation(shards: int, gradients: float) -> None:
    """Momentum, two gradients, a partial sum for each level of the tree but at least one, two results."""
    assert step.needed(shards) == gradients
    shown = {row.what.rpartition(": ")[2]: row.spread for row in step.memory_rows(part("mlp", 2, 1.0))}
    assert shown[EXACT] == "9.0 N, N = 38 MiB; formula 7 N, with DDP's rest 8.5 N"
    assert shown[BASELINE] == "5.0 N, N = 38 MiB"


def test_memory_is_shown_for_every_number_of_workers_and_bucket_size() -> None:
    shown = {row.what: row.spread for row in step.rows_of(measured(1.0))}
    assert shown["MLP, 4 workers: peak memory of a worker: elastic exact"].endswith(
        "formula 6 N, with DDP's rest 7.5 N"
    )
    assert shown["MLP, 2 workers: DDP, buckets of 1 MB"] == "1000 to 1000 ms; peak memory 38 MiB"


def test_the_overlaps_gain_is_shown_with_it_on_and_off() -> None:
    shown = {row.what: row.figure for row in step.rows_of(measured(1.0)) if "bare ring" in row.what}
    assert shown == {
        "MLP, 2 workers, bare ring: reduction after backward, as it is": "200 ms",
        "MLP, 2 workers, bare ring: reduction overlapped with backward": "150 ms",
        "MLP, 2 workers, bare ring: overlapped / after": "0.750",
        "MLP, 2 workers, bare ring: after again / after": "1.000",
    }


@pytest.mark.parametrize("model", step.ELEMENTS)
def test_n_is_the_size_of_the_model_that_is_trained(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "MODEL", model)
    trained, _ = work.build()
    assert sum(parameter.numel() for parameter in trained.parameters()) == step.ELEMENTS[model]
    assert all(parameter.dtype is torch.float32 for parameter in trained.parameters())


def test_bytes_are_counted_where_they_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SendQueue, "drop_sent", lambda queue, count: None)
    counter = sent.Sent(tmp_path, "w")
    SendQueue.drop_sent(None, 70)  # type: ignore[arg-type]
    counter.write()
    SendQueue.drop_sent(None, 30)  # type: ignore[arg-type]
    counter.write()
    assert sent.read(tmp_path) == {"w": (2, 100)}
