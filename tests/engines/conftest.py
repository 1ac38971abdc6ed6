"""What the tests of engines have in common: one function that trains, and its undisturbed run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import elastic
from chaos_tests.support.processes import MARK, await_exits, kill_if_there, living, new_mark
from tests.engines.training import Course, train
from tests.live.jobs import ROOT


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of an engine and whatever it starts; nothing of it is left."""
    mark = new_mark()
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    yield mark
    left = await_exits(living(mark), 30.0)
    for pid in left:
        kill_if_there(pid)
    assert not left


@pytest.fixture(scope="session")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the function that nobody disturbs."""
    home = tmp_path_factory.mktemp("quiet")
    Course(home).pace(0.0)
    digest, _ = elastic.launch(train, str(home), {}, workers=1, job_dir=home / "job", quiet=True)
    return str(digest)


@pytest.fixture
def course(tmp_path: Path) -> Course:
    return Course(tmp_path)
