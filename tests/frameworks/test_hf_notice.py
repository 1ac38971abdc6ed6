"""Trainer on a machine that has to go: callbacks can ask, and `enable_jit_checkpoint` saves once."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest

from tests.frameworks.test_hugging_face import OFFLINE, SCRIPTS
from tests.live.jobs import Job
from tests.live.test_ddp import digest
from tests.live.test_last_node import give_notice
from tests.live.test_notice import answers

pytest.importorskip("transformers", reason="frameworks are installed by `make test-frameworks`")

STEPS = 60


def start(home: Path, name: str, *options: str) -> Job:
    words = (*options, "--ranks", "2", str(SCRIPTS / "hf_notice.py"), str(home / f"{name}.output"))
    return Job(home, *words, name=name, environment={**OFFLINE, "STEPS": str(STEPS)})


def snapshots(home: Path, name: str) -> list[Path]:
    return sorted((home / f"{name}.output").glob("checkpoint-*"))


def test_a_notice_is_told_to_callbacks_and_saves_once(tmp_path: Path) -> None:
    with start(tmp_path, "quiet", "--workers", "1") as job:
        assert job.wait() == 0, job.output
        wanted = digest(job)
    assert snapshots(tmp_path, "quiet") == []
    with start(tmp_path, "job", "--workers", "2", "--notices", f"file:{tmp_path / 'notice'}") as job:
        job.pace(0.2)
        job.await_world(2)
        notice = give_notice(job, 300.0)
        job.until("a snapshot", lambda: snapshots(tmp_path, "job"))
        job.await_steps(len(job.steps()) + 3)
        notice.unlink()
        workers = ("local.0.0", "local.1.0")
        job.until("it was taken back", lambda: all(not answers(job.gates, worker)[-1] for worker in workers))
        job.pace(0)
        assert job.wait() == 0, job.output
        assert digest(job) == wanted
        saved = snapshots(tmp_path, "job")
        assert len(saved) == 1 and (saved[0] / "model.safetensors").exists()
        said = ["reclaim", "rack 7 is switched off", f"file {notice}"]
        for worker in workers:
            heard = [answer and answer[:3] for answer in answers(job.gates, worker)]
            assert [one for one, _ in groupby(heard)] == [None, said, None]
            assert (job.gates / f"drained.{worker}").read_text() == "rack 7 is switched off\n"
