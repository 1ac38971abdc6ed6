"""Models of Keras on torch in a loop of torch, which docs/decisions/keras.md says run in place, and what does not."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.frameworks.test_hugging_face import SCRIPTS
from tests.live.jobs import Job
from tests.live.test_ddp import digest

KERAS = find_spec("keras")  # not imported: it would choose its backend for this process
pytestmark = pytest.mark.skipif(KERAS is None, reason="frameworks are installed by `make test-frameworks`")

SCRIPT = str(SCRIPTS / "keras_loop.py")


def start(home: Path, name: str, workers: int, *words: str) -> Job:
    options, variables = (
        ("--workers", str(workers), "--ranks", "4"),
        {"KERAS_BACKEND": "torch", "KERAS_HOME": str(home)},
    )
    return Job(home, *options, *words, name=name, environment=variables)


def test_a_death_leaves_no_trace_in_a_loop_of_torch(tmp_path: Path) -> None:
    with start(tmp_path, "quiet", 1, SCRIPT) as job:
        assert job.wait() == 0, job.output
        wanted = digest(job)
    with start(tmp_path, "job", 3, SCRIPT) as job:
        job.pace(0.3)
        job.await_steps(4)
        job.send(job.members()[0])
        job.await_event("member_lost")
        job.pace(0)
        assert job.wait() == 0, job.output
        assert digest(job) == wanted


def test_statistics_of_batches_are_refused_by_name(tmp_path: Path) -> None:
    """They are parameters that are not trained, and nobody could say how those of several ranks become one."""
    with start(tmp_path, "job", 1, "--max-restarts", "0", SCRIPT, "batchnorm") as job:
        assert job.wait() != 0
        assert "StateChanged" in job.output and "batch_normalization/moving_mean" in job.output


def test_keras_still_has_no_distribution_on_torch() -> None:
    """When this fails, its data parallelism is the place for an adapter, and the decision is due again."""
    assert KERAS is not None and KERAS.origin is not None
    torch_backend = Path(KERAS.origin).parent / "src" / "backend" / "torch"
    assert (torch_backend / "trainer.py").exists() and not (torch_backend / "distribution_lib.py").exists()
