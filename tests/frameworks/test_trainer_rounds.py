"""transformers.Trainer in two rounds, in one process: what its arguments and its log may be."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.frameworks.test_hugging_face import OFFLINE, SCRIPTS
from tests.live.jobs import DEADLINE_S, ROOT


def lines(*names: str) -> tuple[list[list[str]], str]:
    """What the program prints, and its stderr."""
    command = [sys.executable, str(SCRIPTS / "trainer_rounds.py"), *names]
    environment = {**os.environ, **OFFLINE, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S, env=environment)
    assert done.returncode == 0, done.stderr
    return [line.split(" ", 2) for line in done.stdout.splitlines() if line.startswith(names)], done.stderr


def test_a_round_goes_on_in_the_epoch_with_ignore_data_skip_and_scalars_in_the_log() -> None:
    (quiet, two), _ = lines("quiet", "two")
    assert two[1:] == quiet[1:]
    assert [row.get("loss") is not None for row in json.loads(quiet[2])].count(True) == 7


def test_a_log_that_json_cannot_have_is_named_and_training_goes_on() -> None:
    ((_, _, log),), said = lines("odd")
    assert "the state is not kept in memory: what Trainer's state or log has cannot be written as JSON: Tensor" in said
    assert len(json.loads(log)) == 8
