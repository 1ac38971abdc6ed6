"""TensorBoard: every logged scalar and every learning rate over the steps. Needs the package tensorboard."""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path
from typing import Any

from elastic.errors import ConfigError
from runtime.loop.hooks.leader_hooks import JobView
from runtime.loop.sinks.trackers import points
from runtime.session import StepRecord

FLUSH_S = 10.0
"""Seconds between two flushes. The next leader writes again what a dead leader has not flushed."""


class TensorBoard:
    """Event files below a directory that every worker sees. Raises ConfigError if tensorboard is not installed.

    The file `next-step` beside them says which steps are surely on file. A new leader writes from there on, and
    TensorBoard hides what an old event file has from that step on (its `purge_step`), so no point is shown twice.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise ConfigError("job.log_to(TensorBoard(...)) needs the package tensorboard: pip install tensorboard")
        self._directory = Path(directory)
        self._mark = self._directory / "next-step"
        self._writer: Any = None
        self._next = 0
        self._flushed_s = 0.0

    def __str__(self) -> str:
        return str(self._directory)

    def open(self, job: JobView) -> int:
        """Raises OSError if the directory cannot be written, ConfigError if `next-step` holds anything else."""
        from torch.utils.tensorboard import SummaryWriter

        self._directory.mkdir(parents=True, exist_ok=True)
        text = self._mark.read_text(encoding="ascii") if self._mark.exists() else "0"
        if not text.isdecimal():
            raise ConfigError(f"{self._mark} holds {text[:40]!r}, no step; give job.log_to another directory")
        self._next = int(text)
        # No automatic flush: only what `_flush` has marked counts.
        self._writer = SummaryWriter(str(self._directory), purge_step=self._next, flush_secs=1 << 20)
        self._flushed_s = time.monotonic()
        return self._next

    def write(self, record: StepRecord) -> None:
        """Add the record's points; wait for nothing but a flush every FLUSH_S."""
        for name, value in points(record).items():
            self._writer.add_scalar(name, value, record.step)
        self._next = record.step + 1
        if time.monotonic() - self._flushed_s >= FLUSH_S:
            self._flush()

    def close(self) -> None:
        """Flush the rest and close."""
        if self._writer is not None:
            self._flush()
            self._writer.close()
            self._writer = None

    def _flush(self) -> None:
        self._writer.flush()
        new = self._mark.with_name("next-step.new")
        new.write_text(str(self._next), encoding="ascii")
        new.replace(self._mark)
        self._flushed_s = time.monotonic()
