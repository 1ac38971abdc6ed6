"""What `make bench-tiny` computes and prints, on figures that can be checked by hand, and one smoke run."""

from __future__ import annotations

import pytest

from tests.bench import report, tiny
from tests.bench.tiny import DDP, DEEP, EXACT, PLAIN, TINY, Figures


def figures(tiny_s: float, deep_s: float) -> dict[str, Figures]:
    """Six pairs, so that the interval is from the least to the greatest."""
    return {
        TINY: {PLAIN: [0.001] * 6, DDP: [0.002] * 6, EXACT: [tiny_s] * 6},
        DEEP: {PLAIN: [0.040] * 6, DDP: [0.050] * 6, EXACT: [deep_s] * 6},
    }


@pytest.mark.parametrize(
    ("tiny_s", "deep_s", "missed", "line"),
    [
        (0.0024, 0.0512, [], "tiny=1.200 tensors300=1.20"),
        (0.0030, 0.0512, [f"{TINY}: {EXACT} / {DDP}"], "tiny=1.500 tensors300=1.20"),
        (0.0024, 0.0520, [f"{DEEP}: {EXACT} - {DDP}"], "tiny=1.200 tensors300=2.00"),
    ],
)
def test_a_shard_and_a_tensor_are_judged_beside_ddp(tiny_s: float, deep_s: float, missed: list[str], line: str) -> None:
    rows = tiny.rows_of(figures(tiny_s, deep_s))
    assert [row.what for row in report.missed(rows)] == missed
    assert tiny.summary(rows) == line


@pytest.mark.long
def test_all_three_train_the_same() -> None:
    assert tiny.main(["--small"]) == 0
