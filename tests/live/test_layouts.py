"""Unchanged torchrun scripts where torch lies elsewhere than in the interpreter's own site directory."""

from __future__ import annotations

import functools
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live import layouts
from tests.live.jobs import ROOT, Job
from tests.live.test_ddp import digest

EXAMPLE = (ROOT / "docs" / "examples" / "train_ddp.py", "--epochs", "2", "--pause", "0.1")
TRAINER = (ROOT / "tests" / "ddp_scripts" / "trainer.py", "8")
SCRIPTS = {"example": EXAMPLE, "trainer": TRAINER}
NAMES = ("plain", "system-site-packages", "pth", "target", "editable")


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory on the file system of the interpreter's packages, so that they can be linked."""
    with tempfile.TemporaryDirectory(prefix="layout-", dir=sys.prefix) as made:
        yield Path(made).resolve()


@functools.cache
def quiet(script: str, home: Path) -> str:
    """The digest of one worker in the environment of the tests."""
    source, *arguments = SCRIPTS[script]
    words = ("--workers", "1", "--ranks", "4", str(source), *map(str, arguments))
    with Job(home, *words, name=f"quiet-{script}") as job:
        assert job.wait() == 0, job.output
        return digest(job)


@pytest.mark.long
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("layout", NAMES)
def test_a_script_survives_the_death_of_rank_0_and_a_join(
    layout: str, script: str, home: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source, *arguments = SCRIPTS[script]
    wanted = quiet(script, tmp_path_factory.getbasetemp())
    here = layouts.make(layout, home)
    shutil.copy(Path(source), here.scripts)
    words = ("--workers", "3", "--ranks", "4", str(here.scripts / Path(source).name), *map(str, arguments))
    with Job(tmp_path, *words, python=here.python, environment={"NAP": "0.1", **here.variables}) as job:
        job.await_steps(3)
        first = str(job.status()["members"][0]["worker_id"])
        job.send(first)
        job.await_event("worker_exited", worker_id=first)
        job.until("full world", lambda: len(job.status()["members"]) == 3)
        assert job.wait() == 0, job.output
        assert digest(job) == wanted
        assert not job.events("script_failed"), job.output
        # A newcomer that misses the end of a short epoch makes way for another one; none is refused.
        assert not [line for line in job.events("worker_exited") if "exited with 1" in line["because"]], job.output
