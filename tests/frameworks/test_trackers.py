"""Files of TensorBoard that frameworks write: what it shows of a run with deaths, joins and a resume is what it shows
of the quiet run, but for times."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.frameworks.events import Point, shown
from tests.frameworks.fates import everything_killed, two_deaths_and_two_joins
from tests.frameworks.test_hugging_face import OFFLINE, TIMES, words
from tests.live.jobs import Job

for package in ("tensorboard", "transformers", "lightning"):
    pytest.importorskip(package, reason="frameworks are installed by `make test-frameworks`")

KINDS = ("hf_language_model", "lightning_language_model", "accelerate_language_model")
TRACKED = {**OFFLINE, "REPORT_TO": "tensorboard", "LOG_EVERY": "1"}
"""Each step is logged, so each death comes beside a row."""


def points(job: Job, output: Path) -> dict[str, list[Point]]:
    """By the name of what was logged. A Trainer's directory has the time in its name; there is one of each run."""
    assert job.wait() == 0, job.output
    found = {where: those for where, those in shown(output).items() if not any(part in where for part in TIMES)}
    assert len({where.split(": ")[0] for where in found}) == 1, found.keys()
    return {where.split(": ")[1]: those for where, those in found.items()}


@functools.cache
def quiet(kind: str, home: Path) -> dict[str, list[Point]]:
    with Job(home, *words(kind, 1, home / kind), name=f"quiet-{kind}", environment=TRACKED) as job:
        found = points(job, home / kind)
    assert max(map(len, found.values())) >= 40
    return found


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quiet-trackers")


@pytest.mark.parametrize("kind", KINDS)
def test_two_deaths_and_two_joins_leave_no_trace(kind: str, home: Path, tmp_path: Path) -> None:
    wanted, output = quiet(kind, home), tmp_path / "output"
    with Job(tmp_path, *words(kind, 3, output), environment=TRACKED) as job:
        two_deaths_and_two_joins(job, 3, 12)
        assert points(job, output) == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_when_everything_was_killed(kind: str, home: Path, tmp_path: Path) -> None:
    """Steps behind the last checkpoint are logged a second time."""
    wanted, output = quiet(kind, home), tmp_path / "output"
    with Job(tmp_path, *words(kind, 2, output), environment=TRACKED) as job:
        everything_killed(job, 18)
    with Job(tmp_path, *words(kind, 3, output), environment=TRACKED) as job:
        job.pace(0)
        assert points(job, output) == wanted
