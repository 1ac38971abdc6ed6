"""Fixtures of the fake device; without torch's CUDA build every test beside this file is skipped, and says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.fake.device import FakeDevice, build, missing


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled library."""
    if because := missing():
        pytest.skip(because)
    return build(tmp_path_factory.mktemp("fake_device"))


@pytest.fixture
def device(library: Path, tmp_path: Path) -> FakeDevice:
    """A fake device without a fault."""
    return FakeDevice.made_in(tmp_path, library)
