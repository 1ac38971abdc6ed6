"""tests/gpu/first_contact.py says what is within its limits, and what is not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

from tests.gpu.fake.device import ROOT, FakeDevice

ALL_S = 280.0


def contact(environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.gpu.first_contact"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=ALL_S,
    )


def test_without_a_gpu_it_tries_nothing(device: FakeDevice) -> None:
    done = contact({})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch sees no GPU: nothing was tried" in done.stdout


def test_sound_devices_are_within_all_limits(device: FakeDevice) -> None:
    device.set("devices", 2)
    device.set("meets")
    done = contact(device.environment())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all within their limits" in done.stdout
    assert done.stdout.count("RingBroken") == 4
    assert done.stdout.count("BuildFailed") == 2


def test_what_misses_its_limit_is_named(device: FakeDevice) -> None:
    device.set("meets")
    device.set("abort_ms", 3000)
    done = contact(device.environment())
    assert done.returncode == 1, done.stdout + done.stderr
    assert "an abort does not end NCCL's kernels" in done.stdout
    assert "missed: kill, on one GPU; stop, on one GPU" in done.stdout
