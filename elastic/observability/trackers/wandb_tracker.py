"""A run of Weights & Biases. Offline, each leader writes a file of its own, and none of its steps is in another one."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from elastic.observability.trackers.process import StepPoints, Superseded
from elastic.observability.trackers.wandb_files import held, segments

SETTLE_S = 3.0
"""A file that has not grown for so many seconds has no writer: the service process ends with the one that started
it."""


class WandBTracker:
    """See Tracker. run: the id of the run. directory: all nodes see it. token: of this writer."""

    def __init__(self, project: str, run: str, directory: str, *, offline: bool, token: str) -> None:
        self._project, self._run, self._directory = project, run, Path(directory)
        self._offline, self._token = offline, token
        self._writer = self._directory / f"writer-{run}"
        """Says which process sends the steps of the run."""
        self._log: Any = None

    def connect(self) -> int:
        import wandb

        self._directory.mkdir(parents=True, exist_ok=True)
        new = self._writer.with_name(f"{self._writer.name}.{self._token}")
        new.write_text(self._token, encoding="ascii")
        new.replace(self._writer)
        on_file = self._next_on_file() if self._offline else 0
        self._log = wandb.init(
            project=self._project,
            id=self._run,
            name=self._run,
            dir=str(self._directory),
            mode="offline" if self._offline else "online",
            resume=None if self._offline else "allow",
            settings=wandb.Settings(console="off", disable_git=True, save_code=False, x_disable_stats=True),
        )
        return on_file if self._offline else int(self._log.step)

    def _next_on_file(self) -> int:
        """The step after the last one in any of the files. Their names have times of several machines, so they tell no
        order."""
        sizes: dict[Path, int] | None = None
        while True:
            found = {path: held(path) for path in segments(self._directory, self._run)}
            now = {path: path.stat().st_size for path, one in found.items() if not one.ended}
            if not now or now == sizes:
                return max((step for one in found.values() for step in one.steps), default=-1) + 1
            sizes = now
            time.sleep(SETTLE_S)

    def send(self, steps: list[StepPoints]) -> None:
        if self._writer.read_text(encoding="ascii") != self._token:
            raise Superseded
        for step in steps:
            if step.number >= self._log.step:  # a batch that is tried again
                self._log.log(dict(step.points), step=step.number, commit=True)

    def finish(self, *, complete: bool) -> None:
        if self._log is not None:
            self._log.finish(exit_code=0 if complete else os.EX_TEMPFAIL)
