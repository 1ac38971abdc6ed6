from __future__ import annotations

import gc
import os

import pytest
from hypothesis import HealthCheck, settings

# A machine that is busy for a moment is not what is tested, and what is found can be found again. The same examples
# each time, because a change is to be told what it broke; `make fuzz` looks for new ones.
settings.register_profile(
    "patient",
    deadline=None,
    derandomize="FUZZ" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("patient")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="record what the machines answer now; read the diff")


def pytest_collection_finish() -> None:
    """What torch and the tests have made when they were imported stays: no collection looks through it again."""
    gc.collect()
    gc.freeze()
