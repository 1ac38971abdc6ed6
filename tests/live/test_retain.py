"""A member that missed a result when another died has the bits of the others, whether results are retained or not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.live.jobs import ROOT, Job, run_alone

SCRIPT = ROOT / "tests" / "live" / "scripts" / "half_told.py"


@pytest.mark.parametrize("words", [(), ("--no-retain-results",)], ids=["retained", "computed again"])
@pytest.mark.long
def test_a_member_behind_gets_or_computes_the_result_that_it_missed(words: tuple[str, ...], tmp_path: Path) -> None:
    expected = run_alone(tmp_path, SCRIPT).split()[-1]
    with Job(tmp_path, "--workers", "3", "--no-replace", "--quiet", *words, str(SCRIPT)) as job:
        job.shut("ahead")
        job.until("slot 0 has the result", lambda: any(".0." in worker for worker in job.held_at("ahead")))
        job.send(next(worker for worker in job.workers() if ".2." in worker))
        behind = next(worker for worker in job.workers() if ".1." in worker)
        if words:
            job.until("all shards again", lambda: job.events("op_complete", who=behind, generation=2))
        else:
            job.await_event("result_copied", who=behind)
        job.open("ahead")
        assert job.wait() == 0
        assert job.result["digest"] == expected
        assert bool(job.events("result_copied")) == (not words)
