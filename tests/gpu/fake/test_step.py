"""What a step asks of a GPU does not grow with the model, but for what the script itself asks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.fake.device import DEADLINE_S, ROOT, FakeDevice
from tests.live.jobs import Job

SCRIPT = Path(__file__).parent / "step.py"
FEW, MANY = 4, 16
SHARDS = 4


def counted(output: str) -> dict[str, int]:
    (line,) = [line for line in output.splitlines() if line.startswith('{"launches"')]
    found: dict[str, int] = json.loads(line)
    return found


def plain(device: FakeDevice, layers: int) -> dict[str, int]:
    words = [sys.executable, str(SCRIPT), "plain", str(layers)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **device.environment()}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    return counted(done.stdout)


def elastic(device: FakeDevice, home: Path, ring: str, layers: int) -> dict[str, int]:
    words = ("--workers", "1", "--ring", ring, "--snapshot-every", "off", str(SCRIPT), "elastic", str(layers))
    with Job(home, *words, name=f"{ring}{layers}", environment=device.environment()) as job:
        assert job.wait() == 0, job.output
        return counted(job.output)


@pytest.mark.parametrize(("ring", "waits", "copies_a_layer"), [("nccl", 9, 0), ("tcp", 15, 4 * SHARDS)])
def test_a_deeper_model_costs_a_step_no_more_waits_and_kernels_than_its_own(
    ring: str, waits: int, copies_a_layer: int, device: FakeDevice, tmp_path: Path
) -> None:
    """copies_a_layer: with sums on the CPU each gradient and each buffer of a shard is copied there."""
    device.set("reads_zeros")
    few, many = (elastic(device, tmp_path, ring, layers) for layers in (FEW, MANY))
    own = {name: value - plain(device, FEW)[name] for name, value in plain(device, MANY).items()}
    assert few["waits"] <= waits and many["waits"] <= waits
    assert many["launches"] - few["launches"] <= own["launches"]
    assert few["launches"] <= plain(device, FEW)["launches"] + 40
    assert many["copies"] - few["copies"] <= copies_a_layer * (MANY - FEW)
    assert few["copies"] - copies_a_layer * FEW <= 32
    for step in (few, many):
        assert step["streams"] == step["host_allocations"] == step["allocations"] == 0
