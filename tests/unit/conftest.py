from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# A machine that is busy for a moment is not what is tested, and what is found can be found again.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("patient")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="record what the machines answer now; read the diff")
