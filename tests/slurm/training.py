"""`elastic run` of a script in batch jobs of Slurm, one after the other, as a test sees it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from chaos_tests.cluster import sturdy_binary
from tests.live.jobs import ROOT, SCRIPTS

SCRIPT = SCRIPTS / "signalled.py"
STEPS = 400
BIN = Path(sys.executable).parent
ENVIRONMENT = {
    "PATH": os.pathsep.join([str(BIN), str(Path(sturdy_binary() or BIN).parent), os.environ["PATH"]]),
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
}


class Training:
    """Its job directory, and how fast it goes. undisturbed: the digest without Slurm."""

    def __init__(self, home: Path, undisturbed: str) -> None:
        self.dir = home / "job"
        self._undisturbed = undisturbed
        self._gates = home / "gates"
        self._gates.mkdir()
        self.environment = {**ENVIRONMENT, "LIVE_GATES": str(self._gates)}
        self.pace(0.05)

    def command(self, *options: str) -> str:
        return " ".join(["exec elastic run --workers 2 --quiet --job-dir", str(self.dir), *options, str(SCRIPT)])

    def pace(self, seconds: float) -> None:
        (self._gates / "pace.new").write_text(str(seconds))
        (self._gates / "pace.new").rename(self._gates / "pace")

    @property
    def steps(self) -> list[int]:
        path = self.dir / "steps.jsonl"
        return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def exit_code(self) -> int | None:
        """Of the newest run; None while there is none."""
        result = self.dir / "result.json"
        return json.loads(result.read_text())["exit_code"] if result.exists() else None

    def events(self, event: str) -> list[dict[str, Any]]:
        lines = [line for path in (self.dir / "journal").glob("*.jsonl") for line in path.read_text().splitlines()]
        return [told for line in lines if (told := json.loads(line))["event"] == event]

    def check(self, begun_again_with: int) -> None:
        """It is complete, it went on from that step, no signal ended a worker, and every step was done once."""
        assert {line["step"] for line in self.events("state_restored")} == {begun_again_with}
        assert not [line for line in self.events("worker_exited") if line["because"].startswith("killed")]
        assert self.steps == list(range(STEPS))
        assert json.loads((self.dir / "result.json").read_text())["digest"] == self._undisturbed
