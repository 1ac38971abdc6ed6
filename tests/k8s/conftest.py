"""What an undisturbed run comes to, and a directory whose path is short."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live.conftest import quiet

__all__ = ["home", "quiet"]


@pytest.fixture
def home() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="k8s"))
    yield directory
    shutil.rmtree(directory)
