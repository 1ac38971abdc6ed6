"""torchdata's StatefulDataLoader in a script of logical ranks: the batches of torch's DataLoader, through a death."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.live.jobs import ROOT, Job
from tests.live.test_ddp import digest, quiet

pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is installed by `make test-engines`")

SCRIPT = "replica_groups.py"
TORCHDATA = {"LOADER": "torchdata", "NAP": "0.15"}


def start(home: Path, **variables: str) -> Job:
    words = ("--workers", "2", "--ranks", "4", str(ROOT / "tests" / "ddp_scripts" / SCRIPT), "4")
    return Job(home, *words, environment={**TORCHDATA, **variables})


def test_it_gives_what_a_data_loader_gives(tmp_path: Path) -> None:
    with start(tmp_path) as job:
        job.await_steps(4)
        job.send(job.members()[0])
        assert job.wait() == 0, job.output
        assert digest(job) == quiet(tmp_path, SCRIPT, "4")


def test_a_position_that_the_script_has_saved_is_refused(tmp_path: Path) -> None:
    with start(tmp_path, LOADED="1") as job:
        assert job.wait() == 1, job.output
        assert "StatefulDataLoader.load_state_dict() does not work with logical ranks" in job.output
