"""What `make bench-storms` computes and prints, on figures that can be checked by hand."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from tests.bench import report, storms, work
from tests.bench.launchers import OURS, TORCHFT
from tests.bench.stamps import Stamp
from tests.bench.storms import QUIET, Leg, judge

S = 1_000_000_000
BATCH = work.MICRO_BATCH


def stamp(t_s: float, step: int, *, began: int = 0, group: int = 1) -> Stamp:
    return Stamp(int(t_s * S), step, began, group, 3, 1 / (1 + step))


def test_samples_count_once_and_the_longest_stop_is_found() -> None:
    told = {"a": [stamp(t, t) for t in range(1, 5)], "b": [stamp(t + 0.1, t) for t in range(1, 5)]}
    leg = judge(told, S // 2, 8 * S, own_parts=False)
    assert (leg.steps, leg.samples, leg.dropped, leg.again) == (5, 5 * work.SHARDS * BATCH, 0, 0)
    assert round(leg.stop_s, 3) == 3.9 and leg.loss == 0.2, "after the last step"


def test_steps_behind_a_checkpoint_are_done_again() -> None:
    told = {"r-1": [stamp(t, t) for t in range(14)], "r-2": [stamp(20 + n, 10 + n, group=2) for n in range(6)]}
    leg = judge(told, 0, 30 * S, own_parts=False)
    assert (leg.steps, leg.again) == (15, 3), "10, 11 and 12; 13 was the newest"


def test_what_a_step_was_committed_without_is_dropped() -> None:
    told = {"a": [stamp(t, t - 1, began=2) for t in range(1, 5)], "b": [stamp(1, 0, began=3), stamp(4, 3, began=0)]}
    leg = judge(told, 0, 5 * S, own_parts=True)
    assert (leg.steps, leg.samples) == (4, (4 * 2 + 3) * BATCH)
    assert leg.dropped == (4 * work.SHARDS - 11) * BATCH


def test_each_instant_of_a_trace_with_a_loss_takes_a_node_that_is_there() -> None:
    gone = storms.planned("bamboo-p3", 60.0, 120.0)
    assert len(gone) >= 8 and {one.slot for one in gone} == {0, 1}
    for slot in (0, 1):
        own = [one for one in gone if one.slot == slot]
        assert all(one.at_s + one.for_s <= later.at_s for one, later in pairwise(own))


def leg(samples: int, again: int = 0) -> Leg:
    return Leg(10.0, samples // 8, samples, 0, again, 0.5, 0.1)


def test_rows_have_medians_and_ranges_of_the_runs_and_shares_of_the_launchers_own_quiet_leg() -> None:
    runs = [
        {OURS: {QUIET: leg(800), "t": leg(quiet)}, TORCHFT: {QUIET: leg(400), "t": leg(100, again=quiet)}}
        for quiet in (720, 640, 800)
    ]
    assert storms.summary(runs) == f"storms: {TORCHFT}:t=7.20"
    row = storms.row_of(OURS, "t", [run[OURS] for run in runs])
    assert row.figure == "72" and row.spread.startswith("64 to 80 (3 times), 0.90 of undisturbed")
    assert "640 to 800 steps again" in report.table(storms.rows_of(runs))


def test_a_later_run_may_have_other_traces() -> None:
    ended = {QUIET: leg(400), "t": leg(80)}  # and did not come to "u"
    runs = [{OURS: {QUIET: leg(800), "t": leg(720)}, TORCHFT: ended}, {OURS: {QUIET: leg(800), "u": leg(80)}}]
    runs[1][TORCHFT] = ended
    assert storms.summary(runs) == f"storms: {TORCHFT}:t=9.00"
    assert [row.what.partition(",")[0] for row in storms.rows_of(runs)] == [QUIET, QUIET, "t", "t", "u"]


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    records = storms.Records({"date": "today"}, 1.0, 60.0, [{OURS: {QUIET: leg(800)}}], [7])
    records.write(tmp_path / "a" / "b.json")
    assert storms.Records.read(tmp_path / "a" / "b.json") == records


def test_losses_that_workers_have_of_one_step_are_all_kept() -> None:
    told = {"a": [stamp(1, 0), stamp(2, 1)], "b": [stamp(1, 0)]}
    assert storms.by_step(told) == {0: {1.0}, 1: {0.5}}
