"""What `make bench-kept` computes and prints, on figures that can be checked by hand."""

from __future__ import annotations

from tests.bench import kept
from tests.bench.launchers import OURS, TORCHRUN
from tests.bench.storms import QUIET, Leg


def leg(samples: int, again: int = 0) -> Leg:
    return Leg(10.0, samples // 8, samples, 0, again, 0.5, 0.1, 5)


def test_goodput_is_that_of_the_launchers_own_quiet_leg_and_a_median_over_runs() -> None:
    runs = [
        {
            OURS: {QUIET: leg(800), kept.DEATHS: leg(720 + 8 * n, again=1)},
            TORCHRUN: {QUIET: leg(1000), kept.DEATHS: leg(500, again=30 + n)},
        }
        for n in range(3)
    ]
    assert kept.summary(runs) == f"kept: {OURS}=0.91 {TORCHRUN}=0.50"
    rows = {row.what: row for row in kept.rows_of(runs, 20.0)}
    assert rows[f"{OURS}: goodput"].figure == "0.91" and rows[f"{OURS}: goodput"].spread == "0.90 to 0.92"
    died = rows[f"{TORCHRUN}, a death each 20 s: steps/s"]
    assert died.figure == "6.20" and "30 to 32 steps again" in died.spread and "5 deaths" in died.spread
