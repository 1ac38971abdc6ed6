"""Where the time of a job went: into training, or into what losses, pauses and resumes cost. Pure.

The one definition of the goodput: the metric and the dashboard show what is computed here.
"""

from __future__ import annotations

from typing import Any

from elastic.records.journal import PHASES, Line

PARTS = (*PHASES, "paused", "resuming", "repeating")
"""detect to redo: the phases of losses (elastic/records/journal.py). paused: below the quorum, or for a newcomer.
resuming: from the start of a resumed run until it trains. repeating: steps that a resume does again."""


class TimeSpent:
    """Takes the lines of journals by time. Times are seconds since 1970, as lines of several runs, and boots, differ in
    their monotonic clocks."""

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._seen_s = 0.0
        self._away_s = 0.0
        """Between runs: nothing ran, so that nothing was lost."""
        self._parts = dict.fromkeys(PARTS, 0.0)
        self._paused_s: float | None = None
        self._resuming_s: float | None = None
        self._between = False
        self.redone_steps = 0

    def run_begins(self, redone_steps: int) -> None:
        """The lines that follow are those of another run of the job. redone_steps: which it does once more."""
        self._between = self._began_s is not None
        self._paused_s = None
        self.redone_steps += redone_steps

    def see(self, line: Line, recovery: Line | None) -> None:
        """recovery: which ends with this line (elastic.records.journal.Recoveries)."""
        now_s = float(line["t_wall"])
        if self._between:
            self._away_s += max(0.0, now_s - self._seen_s)
            self._resuming_s, self._between = now_s, False
        self._seen_s = max(self._seen_s, now_s)
        match line:
            case {"event": "running"}:
                self._began_s = now_s if self._began_s is None else self._began_s
                if self._resuming_s is not None:
                    self._parts["resuming"] += max(0.0, now_s - self._resuming_s)
                    self._resuming_s = None
            case {"event": "state", "state": "paused"}:
                self._paused_s = now_s if self._paused_s is None else self._paused_s
            case {"event": "state"} if self._paused_s is not None:
                self._parts["paused"] += max(0.0, now_s - self._paused_s)
                # A job that waits for more members does so in the phase in which the next generation is decided.
                self._parts["decide"] -= max(0.0, now_s - self._paused_s)
                self._paused_s = None
        if recovery is not None:
            for phase in PHASES:
                self._parts[phase] += recovery[f"{phase}_ms"] / 1e3

    def document(self, now_s: float, applied: int) -> dict[str, Any]:
        """{"total_s", "training_s", "goodput", "redone_steps", "parts": {part: seconds}} since the job has first
        trained, without times between runs. goodput, the part of training in it: None before that.

        now_s: the job's end, or now. applied: the steps of that time, each once. No file says when a step was done
        again, so those take the part of the steps' time that is theirs by number.
        """
        if self._began_s is None:
            return {"total_s": 0.0, "training_s": 0.0, "goodput": None, "redone_steps": 0, "parts": {}}
        parts = {name: max(0.0, spent_s) for name, spent_s in self._parts.items()}
        if self._paused_s is not None:
            parts["paused"] += max(0.0, now_s - self._paused_s)
        total_s = max(0.0, now_s - self._began_s - self._away_s)
        stepping_s = max(0.0, total_s - sum(parts.values()))
        if self.redone_steps:
            parts["repeating"] = stepping_s * self.redone_steps / (self.redone_steps + applied)
        training_s = stepping_s - parts["repeating"]
        return {
            "total_s": total_s,
            "training_s": training_s,
            "goodput": training_s / total_s if total_s > 0 else None,
            "redone_steps": self.redone_steps,
            "parts": parts,
        }
