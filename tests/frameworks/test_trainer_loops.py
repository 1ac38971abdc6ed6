"""Scripts with several train() of transformers.Trainer, or several fit() of Lightning, one after the other: deaths,
joins and resumed runs in any of them leave no trace."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.frameworks import test_hugging_face as trainer
from tests.frameworks import test_lightning as lightning
from tests.frameworks.fates import everything_killed, two_deaths_and_two_joins
from tests.frameworks.test_hugging_face import OFFLINE, home
from tests.live.jobs import Job

__all__ = ["home"]

KINDS = [pytest.param(trainer, "hf_loops", id="trainer"), pytest.param(lightning, "lightning_loops", id="lightning")]


@pytest.mark.parametrize(("of", "kind"), KINDS)
@pytest.mark.parametrize("steps", [(3, 26), pytest.param((28, 58), marks=pytest.mark.long)], ids=str)
def test_two_deaths_and_two_joins_leave_no_trace(
    of: ModuleType, kind: str, steps: tuple[int, ...], home: Path, tmp_path: Path
) -> None:
    wanted, output = of.quiet(kind, home), tmp_path / "output"
    with Job(tmp_path, *of.words(kind, 3, output), environment=OFFLINE) as job:
        two_deaths_and_two_joins(job, *steps)
        of.same(of.ended(job, output), wanted, output, home / kind)
        assert not job.events("script_failed"), job.output


@pytest.mark.parametrize(("of", "kind"), KINDS)
@pytest.mark.parametrize("step", [17, 58])
def test_a_run_goes_on_when_everything_was_killed(
    of: ModuleType, kind: str, step: int, home: Path, tmp_path: Path
) -> None:
    wanted, output = of.quiet(kind, home), tmp_path / "output"
    with Job(tmp_path, *of.words(kind, 2, output), environment=OFFLINE) as job:
        everything_killed(job, step)
    with Job(tmp_path, *of.words(kind, 3, output), environment=OFFLINE) as job:
        job.pace(0)
        of.same(of.ended(job, output), wanted, output, home / kind)
