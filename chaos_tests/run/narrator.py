"""Tells a run as it happens: one line for each event a person wants to know of, and the steps in between."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any


class Narrator:
    """steps: how many there will be, 0 if that is not known."""

    PROGRESS_S = 5.0

    def __init__(self, steps: int = 0) -> None:
        self._steps = steps
        self._begun_s = time.monotonic()
        self._progress_s = self._begun_s
        self._lost_ns = 0

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._begun_s:7.2f} s  {text}", flush=True)

    def hear(self, lines: Iterable[dict[str, Any]], steps: Sequence[dict[str, Any]]) -> None:
        """New journal lines, and the ledger so far."""
        for line in lines:
            if (text := self._sentence(line)) is not None:
                self.say(text)
        if steps and time.monotonic() - self._progress_s >= self.PROGRESS_S:
            self._progress_s = time.monotonic()
            last = steps[-1]
            loss = f", loss {last['scalars']['loss']:.3f}" if isinstance(last["scalars"].get("loss"), float) else ""
            of = f" of {self._steps}" if self._steps else ""
            self.say(f"step {len(steps)}{of}{loss}, {last['world_size']} workers")

    def _sentence(self, line: dict[str, Any]) -> str | None:
        number, worker = line["generation"], line["worker_id"]
        match line["event"]:
            case "worker_started" if line.get("restarted"):
                return f"{worker} starts, a new process (pid {line['pid']})"
            case "member_lost":
                self._lost_ns = line["t_mono_ns"]
                return f"{worker} is lost: {line['because']}"
            case "committed" if line["kind"] == "loss":
                return f"generation {number}: {', '.join(line['members'])}; they keep their processes and their step"
            case "committed" if line["kind"] == "planned":
                return f"generation {number} is planned: {', '.join(line['members'])}"
            case "running" if self._lost_ns:
                after_ms, self._lost_ns = (line["t_mono_ns"] - self._lost_ns) / 1e6, 0
                return f"the ring is up again, {after_ms:.0f} ms after the loss"
            case "joined":
                return f"{worker} has copied the state while the others stepped, and joins in generation {number}"
            case "finished":
                return f"{worker} ends with state {line['digest'][:16]}"
        return None
