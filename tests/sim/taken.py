"""Which arms of the machines (arms.py) a unit test takes: a plugin of pytest, and a run of it beside a search.

python -m pytest -p tests.sim.taken --taken FILE tests/unit/elastic/protocol/test_recovery_plan.py

FILE: {"elastic/protocol/test_recovery_plan.py::test": ["arm", ...]}
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.sim import arms

UNIT = Path(__file__).parents[1] / "unit"

_taken: dict[str, list[str]] = {}


class Tests:
    """Some of tests/unit, as in elastic/protocol/test_recovery_plan.py::test. They run in a process of their own,
    because what they import must be marked first."""

    def __init__(self, tests: Sequence[str]) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="elastic-sim-")
        self._file = Path(self._directory.name, "taken.json")
        runner = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", __name__, "--taken"]
        command = [*runner, str(self._file), *(f"{UNIT}/{test}" for test in tests)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def taken(self) -> dict[str, list[str]]:
        """Test -> arms. Raises RuntimeError if one of them fails, or does not exist."""
        with self._directory:
            said, _ = self._process.communicate()
            if self._process.returncode:
                raise RuntimeError(f"the tests that take what is excluded fail:\n{said}")
            taken: dict[str, list[str]] = json.loads(self._file.read_text(encoding="utf-8"))
            return taken


# -------------------------------------------------------------------------------------------------- the plugin


def pytest_addoption(parser: pytest.Parser) -> None:
    arms.install()  # before any test is imported
    parser.addoption("--taken", type=Path, required=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    arms.forget()
    yield
    test = item.nodeid.rpartition("unit/")[2].partition("[")[0]
    _taken[test] = sorted({*_taken.get(test, ()), *arms.taken()})


def pytest_sessionfinish(session: pytest.Session) -> None:
    file: Path = session.config.getoption("--taken")
    file.write_text(json.dumps(_taken), encoding="utf-8")
