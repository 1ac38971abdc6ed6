"""torchtitan's own trainer with the lines of docs/keep.md, under `elastic run --restart --ranks N`: after kills and
joins the weights have the bits of a quiet torchrun with N processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.test_hugging_face import OFFLINE, SCRIPTS
from tests.frameworks.test_kept_trainer import RANKS, kill_behind, under_torchrun
from tests.live.jobs import Job

pytest.importorskip("torchtitan")
KIND = "torchtitan_llama"


def test_kills_and_joins_leave_no_trace(tmp_path: Path) -> None:
    """Before and behind its own first checkpoint."""
    quiet, output = tmp_path / "quiet", tmp_path / "output"
    under_torchrun(KIND, quiet)
    words = ("--workers", "3", "--restart", "--ranks", str(RANKS), str(SCRIPTS / f"{KIND}.py"), str(output))
    with Job(tmp_path, *words, environment=OFFLINE) as job:
        job.pace(0.5)
        for step in (3, 12):
            kill_behind(job, step, workers=3)
        job.pace(0.0)
        assert job.wait() == 0, job.story()
        assert not job.events("script_failed"), job.output
    assert (output / "digest").read_text() == (quiet / "digest").read_text()
