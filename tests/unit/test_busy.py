"""How a saturated run is judged, without a job."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.soak.busy import DUTIES, WORKERS, BusyOutcome, SeenWorkers

WELL = BusyOutcome(60.0, 0.001, 90, 4, WORKERS, Counter(DUTIES), ())


def test_a_run_in_which_nobody_was_expelled_has_no_faults() -> None:
    assert WELL.faults() == []


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"lost": ("member_lost a.0.0: silent for 2.5 s",)}, "member_lost a.0.0"),
        ({"workers": WORKERS + 1}, "4 processes of workers"),
        ({"done": Counter(DUTIES[1:])}, f"has {DUTIES[0]} nothing"),
        ({"checkpoints": 0}, "no checkpoint"),
        ({"idle": 0.3}, "idle for 30%"),
    ],
)
def test_whoever_was_expelled_and_whatever_was_not_done_is_a_fault(fields: dict[str, Any], fault: str) -> None:
    [found] = replace(WELL, **fields).faults()
    assert fault in found


def test_what_ends_with_the_job_is_no_loss_and_what_ends_before_is_one() -> None:
    seen = SeenWorkers()
    for slot in range(WORKERS):
        seen.feed({"event": "worker_started", "worker_id": f"a.{slot}.0", "pid": 100 + slot})
    seen.feed({"event": "checkpoint_complete", "worker_id": "a.0.0"})
    seen.feed({"event": "expelled", "worker_id": "a.1.0", "because": "silent for 2.6 s"})
    seen.ending = True
    seen.feed({"event": "worker_exited", "worker_id": "a.0.0", "because": "exit 0"})
    assert seen.lost == ["expelled a.1.0: silent for 2.6 s"]
    assert (len(seen.pids), seen.checkpoints) == (WORKERS, 1)
