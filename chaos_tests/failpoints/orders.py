"""The harness's side: orders are files in a directory, one for each, and what was done is a line in another."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from chaos_tests.scenario.failpoints import ANYBODY, DONE, FAILPOINTS_VARIABLE, FailpointOrder
from chaos_tests.support.json_lines import Tail
from elastic.records.files import write_atomically

SITE = str(Path(__file__).resolve().parent / "site")
ROOT = str(Path(__file__).resolve().parents[2])
"""Where this package is; the site imports it, also in an interpreter that would not find it."""


class FailpointOrders:
    """directory: its own, which the job's processes know by the variable of injected.py."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._pending = directory / "pending"
        self._pending.mkdir(parents=True)
        self._done = Tail(directory / DONE, json.loads)

    def environment(self, python_path: str) -> dict[str, str]:
        """The variables of the processes that are to look for orders. python_path: as they have it otherwise."""
        return {
            FAILPOINTS_VARIABLE: str(self._directory),
            "PYTHONPATH": os.pathsep.join(filter(None, (SITE, ROOT, python_path))),
        }

    def give(self, order: FailpointOrder, worker: str = ANYBODY) -> None:
        """For this worker, or for the worker that comes to the point first."""
        write_atomically(self._path(order, worker), order.to_json())

    def withdraw(self, order: FailpointOrder, worker: str = ANYBODY) -> bool:
        """False if it is too late: somebody has taken it."""
        try:
            self._path(order, worker).unlink()
        except FileNotFoundError:
            return False
        return True

    def carried_out(self) -> list[dict[str, Any]]:
        """Since the last call: number, worker_id, pid, t_mono_ns of each."""
        return self._done.lines()

    def _path(self, order: FailpointOrder, worker: str) -> Path:
        return self._pending / f"{worker}-{order.number}"
