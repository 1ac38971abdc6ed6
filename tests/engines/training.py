"""What the tests of Ray and Spark train: a function, and the files by which a test sets its pace and sees its world."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEADLINE_S = 400.0
STEPS = 300

SOON_ORPHANS = {"control_silence_s": 6.0, "orphan_limit_s": 45.0, "orphan_margin_s": 5.0}
"""Until a leader takes members that it does not hear for gone: ten minutes, where nobody says otherwise. Workers have
orphan_limit_s to start in, too, and need it on a busy machine."""


class Course:
    """How fast the function goes, and what it has written. home: a directory of the test."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.pace(0.02)

    def pace(self, seconds: float) -> None:
        """That each shard takes; 0: to its end."""
        temporary = self.home / "pace.new"
        temporary.write_text(str(seconds))
        temporary.rename(self.home / "pace")

    @property
    def worlds(self) -> list[tuple[int, int]]:
        """(step, number of workers) as rank 0 has seen them, oldest first."""
        path = self.home / "worlds"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(step), int(world)) for step, world in map(str.split, lines)]

    def await_world(self, workers: int, what: str = "") -> None:
        """Until so many workers have done a step from now on."""
        begun = len(self.worlds)
        self.until(f"{workers} workers {what}", lambda: workers in {world for _, world in self.worlds[begun:]})

    def until(self, what: str, reached: Callable[[], Any]) -> Any:
        deadline_s = time.monotonic() + DEADLINE_S
        while not (value := reached()):
            assert time.monotonic() < deadline_s, f"not within {DEADLINE_S} s: {what}; worlds {self.worlds[-20:]}"
            time.sleep(0.05)  # files of other processes: there is nothing to wait on
        return value


def train(home: str, config: dict[str, Any]) -> tuple[str, int]:
    """The digest, and the rank that has returned it. config: lr, steps, fails (in which step)."""
    import torch

    import elastic

    job = elastic.join(seed=3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.get("lr", 1e-3))
    job.register(model=model, optimizer=optimizer)
    files = Path(home)
    for step in job.steps(shards=8, total=config.get("steps", STEPS)):
        for _ in step:
            time.sleep(float((files / "pace").read_text()))
            loss = model(torch.randn(16, 8)).square().mean()
            loss.backward()
            step.log(loss=loss)
        if step.index == config.get("fails"):
            raise ArithmeticError("the step is too much")
        optimizer.step()
        optimizer.zero_grad()
        if job.is_leader:
            with (files / "worlds").open("a") as worlds:
                worlds.write(f"{step.index} {job.world_size}\n")
    job.print("trained by a function")
    return job.digest(), job.rank
