"""What undisturbed runs come to, and a directory whose path is short."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live.conftest import quiet
from tests.live.jobs import Job
from tests.slurm.training import SCRIPT, Training

__all__ = ["home", "quiet", "training", "undisturbed"]


@pytest.fixture
def home() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="slurm"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of signalled.py."""
    with Job(tmp_path_factory.mktemp("undisturbed"), "--quiet", "--workers", "2", str(SCRIPT)) as job:
        assert job.wait() == 0
        return str(job.result["digest"])


@pytest.fixture
def training(home: Path, undisturbed: str) -> Training:
    return Training(home, undisturbed)
