"""Who is alive, who is suspect, who is frozen: the agent's eye on its workers, and the leader's on its agents.

You watch lit windows across the street. Each tenant waves now and then. As long as they wave, all is well. One has
not waved for a while: you look closer (suspect). Still no wave; is anything moving behind the curtain? A still
shadow means they have stopped (frozen). A moving one means they are busy and cannot come to the window: give them
longer, but not for ever. And if *you* dozed off, you have missed waves: start counting anew before you judge.

A wave is a *beat*. The shadow is CPU time read from /proc. A worker stopped by a signal (state T) is told apart from
one which computes in C with the interpreter locked: neither beats, only the second uses CPU.

Refused on purpose: learned thresholds (phi accrual, Hayashibara et al. 2004). Pauses of a loaded machine are not
from one distribution, and a rule that people can recompute by hand explains itself in the journal.

Pure: time and facts are arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from elastic.config import Timing


class Health(StrEnum):
    ALIVE = "alive"
    SUSPECT = "suspect"
    FROZEN = "frozen"


@dataclass(frozen=True, slots=True)
class Facts:
    """What /proc says of a process. state: its letter. cpu_ticks: user and system time so far, in clock ticks."""

    state: str
    cpu_ticks: int


@dataclass(frozen=True, slots=True)
class Verdict:
    health: Health
    because: str


STOPPED = frozenset("Tt")
_ALIVE = Verdict(Health.ALIVE, "beats arrive")


@dataclass(slots=True)
class _Pulse:
    """What is known of one watched process.

    ticks: CPU time when it became suspect; None before. What it used between its last beat and then says nothing,
    because it was still allowed to be silent.
    """

    beat_s: float
    state: str = ""
    ticks: int | None = None
    moved: bool = False


class Detector:
    """Watches any number of processes by name. One owner; judge it at least every suspect_s."""

    def __init__(self, timing: Timing, now_s: float) -> None:
        self._timing = timing
        self._pulses: dict[str, _Pulse] = {}
        self._judged_s = now_s

    def watch(self, name: str, now_s: float) -> None:
        """Begin, as if it had just beaten."""
        self._pulses[name] = _Pulse(now_s)

    def forget(self, name: str) -> None:
        self._pulses.pop(name, None)

    def beat(self, name: str, now_s: float) -> None:
        """A sign of life. Ignored for a process which is not watched."""
        if name in self._pulses:
            self._pulses[name] = _Pulse(now_s)

    def suspects(self, now_s: float) -> tuple[str, ...]:
        """Whose facts are worth reading: those silent for suspect_s."""
        return tuple(n for n, pulse in self._pulses.items() if now_s - pulse.beat_s >= self._timing.suspect_s)

    def look(self, name: str, facts: Facts) -> None:
        """Facts of a suspect. Ignored for a process which is not watched."""
        pulse = self._pulses.get(name)
        if pulse is None:
            return
        pulse.state = facts.state
        if pulse.ticks is None:
            pulse.ticks = facts.cpu_ticks
        elif facts.cpu_ticks != pulse.ticks:
            pulse.moved = True

    def judge(self, now_s: float) -> dict[str, Verdict]:
        """A verdict for each. If the caller itself paused for suspect_s, all timers start anew: while it slept,
        beats could not be heard."""
        if now_s - self._judged_s >= self._timing.suspect_s:
            for name in self._pulses:
                self._pulses[name] = _Pulse(now_s)
        self._judged_s = now_s
        return {name: self._verdict(pulse, now_s - pulse.beat_s) for name, pulse in self._pulses.items()}

    def _verdict(self, pulse: _Pulse, silent_s: float) -> Verdict:
        timing = self._timing
        if silent_s < timing.suspect_s:
            return _ALIVE
        if silent_s < timing.evict_s:
            return Verdict(Health.SUSPECT, f"no beat for {silent_s:.1f} s")
        if pulse.state in STOPPED:
            return Verdict(Health.FROZEN, f"no beat for {silent_s:.1f} s, stopped by a signal (state {pulse.state})")
        if not pulse.moved:
            return Verdict(Health.FROZEN, f"no beat for {silent_s:.1f} s and no CPU used meanwhile")
        if silent_s < timing.progress_s:
            return Verdict(Health.SUSPECT, f"no beat for {silent_s:.1f} s, but it uses CPU")
        return Verdict(Health.FROZEN, f"no beat for {silent_s:.1f} s although it uses CPU: over progress_s")
