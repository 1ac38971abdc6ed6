"""What `make bench-ranks` computes and prints, on figures that can be checked by hand."""

from __future__ import annotations

from tests.bench import ranks, report
from tests.bench.healthy import BASELINE, KEEPING, NULL
from tests.bench.kills import Kill
from tests.bench.ranks import RANKS, STEPS


def killed(of_ranks_s: float) -> dict[str, list[Kill]]:
    """Six pairs, so that the interval is from the least to the greatest."""
    return {name: [Kill("w", 0.2, to_s, 1.0, 0.3, 0)] * 6 for name, to_s in ((STEPS, 0.1), (RANKS, of_ranks_s))}


def healthy(of_ranks_s: float) -> dict[str, list[float]]:
    return {BASELINE: [1.0] * 6, NULL: [1.0] * 6, KEEPING: [0.8] * 6, STEPS: [0.8] * 6, RANKS: [of_ranks_s] * 6}


def test_ratios_are_judged_beside_those_of_steps() -> None:
    assert report.missed([*ranks.step_rows(healthy(0.83)), *ranks.kill_rows(killed(0.119))]) == []
    (missed,) = report.missed(ranks.step_rows(healthy(0.85)))
    assert (missed.what, missed.figure) == ("--ranks / job.steps()", "1.062")
    (missed,) = report.missed(ranks.kill_rows(killed(0.13)))
    assert (missed.what, missed.figure) == ("kill -> next step, --ranks / job.steps()", "1.300")
