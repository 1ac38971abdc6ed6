"""That a machine has much more to do than it can is no reason to take anybody for dead; `make soak` does it longer."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.soak import busy

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler, and there is none"),
]

SECONDS = 60.0
BUSY_S = 8.0
"""Three times as long as a worker may be silent, and with a third of a processor three times that."""


def test_nobody_is_expelled_while_all_processors_are_saturated(tmp_path: Path) -> None:
    outcome = busy.saturate(tmp_path, SECONDS, BUSY_S)
    assert outcome.faults() == []
