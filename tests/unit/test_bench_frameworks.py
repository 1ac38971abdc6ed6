"""What `make bench-frameworks` computes and prints, on figures that can be checked by hand."""

from __future__ import annotations

import pytest

from tests.bench import frameworks, report
from tests.bench.frameworks import AGAIN, IN_PLACE, TORCHRUN


def measured(in_place_s: float) -> dict[str, list[float]]:
    return {TORCHRUN: [0.2] * 6, AGAIN: [0.2] * 6, IN_PLACE: [in_place_s] * 6}


def test_the_ratio_is_judged_and_is_the_last_figure() -> None:
    assert report.missed(frameworks.rows_of("hf", measured(0.209))) == []
    (missed,) = report.missed(frameworks.rows_of("hf", measured(0.22)))
    assert (missed.what, missed.figure) == ("hf: in place / torchrun", "1.100")
    assert frameworks.ratio(measured(0.22)) == pytest.approx(1.1)
