"""Which workers are alive, suspect or frozen, for their agent; and which agents are silent, for the leader.

A worker sends beats. A worker that has sent no beat for suspect_s is suspect. After evict_s without a beat, the CPU
time of its process, read from /proc, decides: if it stands still, the process is stopped or hangs (frozen); if it
grows, the worker is busy and cannot send, and has until progress_s. An observer that was itself stopped has missed
beats; it restarts all timers before it judges. A worker stopped by a signal (state T) differs from a worker that
computes in C with the interpreter locked: neither beats, and only the second uses CPU. A worker that is seen stopped at
two looks in a row, and was silent for stopped_s, is frozen without a further wait.

Refused on purpose: learned thresholds (phi accrual, Hayashibara et al. 2004). Pauses of a loaded machine are not
from one distribution, and a rule that people can recompute by hand explains itself in the journal.

A leader decides which agents are silent, and how often an agent has to speak. Each of thousands of agents speaks less
often, so that the leader has time for other work (Timing.scaled). The number of agents follows from the job's size,
which may change while it runs. When the interval changes, the leader tells all agents, and restarts their timers.

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
    """What /proc says of a process. state: its state letter. cpu_ticks: user and system time so far, in clock ticks."""

    state: str
    cpu_ticks: int


@dataclass(frozen=True, slots=True)
class HealthVerdict:
    health: Health
    because: str


STOPPED = frozenset("Tt")
STOPPED_LOOKS = 2
_ALIVE = HealthVerdict(Health.ALIVE, "beats arrive")


@dataclass(slots=True)
class _Pulse:
    """What is known of one watched process.

    ticks: its CPU time at the first look after suspect_s; None before. CPU time used before that look says nothing,
    because the process was still allowed to be silent. stopped: number of looks in a row at which the process was
    stopped by a signal and had used no CPU since the look before. seen: its CPU time at the last look. moved: whether
    it has used CPU since `ticks` was taken.
    """

    beat_s: float
    state: str = ""
    stopped: int = 0
    seen: int = -1
    ticks: int | None = None
    moved: bool = False


class Detector:
    """Watches any number of processes by name. It has one owner, which calls `judge` at least every suspect_s."""

    def __init__(self, timing: Timing, now_s: float) -> None:
        self._timing = timing
        self._pulses: dict[str, _Pulse] = {}
        self._judged_s = now_s

    def watch(self, name: str, now_s: float) -> None:
        """Begin to watch a process, as if it had just beaten."""
        self._pulses[name] = _Pulse(now_s)

    def forget(self, name: str) -> None:
        self._pulses.pop(name, None)

    def beat(self, name: str, now_s: float) -> None:
        """Note a sign of life. A process that is not watched is ignored."""
        if name in self._pulses:
            self._pulses[name] = _Pulse(now_s)

    def suspects(self, now_s: float) -> tuple[str, ...]:
        """The processes whose facts are worth reading: silent for suspect_s, or for nearly stopped_s."""
        least_s = min(self._timing.suspect_s, self._timing.stopped_s - self._timing.beat_s)
        return tuple(n for n, pulse in self._pulses.items() if now_s - pulse.beat_s >= least_s)

    def look(self, name: str, facts: Facts, now_s: float) -> None:
        """Note the facts of a suspect. A process that is not watched is ignored."""
        pulse = self._pulses.get(name)
        if pulse is None:
            return
        pulse.state = facts.state
        if facts.state not in STOPPED or facts.cpu_ticks != pulse.seen:  # the process has run since the last look
            pulse.stopped = 0
        pulse.stopped += facts.state in STOPPED
        pulse.seen = facts.cpu_ticks
        if now_s - pulse.beat_s < self._timing.suspect_s:
            return
        if pulse.ticks is None:
            pulse.ticks = facts.cpu_ticks
        elif facts.cpu_ticks != pulse.ticks:
            pulse.moved = True

    def judge(self, now_s: float) -> dict[str, HealthVerdict]:
        """A verdict for each process. If the caller itself paused for suspect_s, it missed beats, and all timers
        restart."""
        if now_s - self._judged_s >= self._timing.suspect_s:
            for name in self._pulses:
                self._pulses[name] = _Pulse(now_s)
        self._judged_s = now_s
        return {name: self._verdict(pulse, now_s - pulse.beat_s) for name, pulse in self._pulses.items()}

    def _verdict(self, pulse: _Pulse, silent_s: float) -> HealthVerdict:
        timing = self._timing
        if pulse.stopped >= STOPPED_LOOKS and silent_s >= timing.stopped_s:
            return HealthVerdict(
                Health.FROZEN, f"no beat for {silent_s:.1f} s, stopped by a signal (state {pulse.state})"
            )
        if silent_s < timing.suspect_s:
            return _ALIVE
        if silent_s < timing.evict_s:
            return HealthVerdict(Health.SUSPECT, f"no beat for {silent_s:.1f} s")
        if not pulse.moved:
            return HealthVerdict(Health.FROZEN, f"no beat for {silent_s:.1f} s and no CPU used meanwhile")
        if silent_s < timing.progress_s:
            return HealthVerdict(Health.SUSPECT, f"no beat for {silent_s:.1f} s, but it uses CPU")
        return HealthVerdict(Health.FROZEN, f"no beat for {silent_s:.1f} s although it uses CPU: over progress_s")


STEADY = 1.25
"""The interval of beats stays as it is until it would change by this factor."""


LOOKS = 10
"""Every agent is judged at least this many times within evict_s, also where beats are rarer."""


class AgentMonitor:
    """Decides which agents are silent. agents: how many agents are expected."""

    def __init__(self, timing: Timing, agents: int, now_s: float) -> None:
        self._own = timing
        self._timing = timing.scaled(agents)
        self._detector = Detector(self._timing, now_s)
        self._silent: dict[str, bool] = {}
        """Watched node -> whether its agent counts as silent."""

    @property
    def beat_s(self) -> float:
        """How often each agent has to speak, in seconds."""
        return self._timing.beat_s

    @property
    def look_s(self) -> float:
        """How often `look` has to be called, in seconds: an agent is named silent so much too late at most."""
        return min(self._timing.beat_s, self._timing.evict_s / LOOKS)

    @property
    def silence_s(self) -> float:
        """The silence, in seconds, after which an agent is named silent."""
        return self._timing.evict_s

    def watch(self, node: str, now_s: float) -> None:
        self._detector.watch(node, now_s)
        self._silent[node] = False

    def forget(self, node: str) -> None:
        self._detector.forget(node)
        self._silent.pop(node, None)

    def beat(self, node: str, now_s: float) -> None:
        self._detector.beat(node, now_s)

    def follow(self, agents: int, now_s: float) -> bool:
        """Take the number of expected agents. Whether agents have to speak at another interval from now on."""
        timing = self._own.scaled(agents)
        if self.beat_s / STEADY < timing.beat_s < self.beat_s * STEADY:
            return False
        self._timing, self._detector = timing, Detector(timing, now_s)
        for node in self._silent:
            self._detector.watch(node, now_s)
        return True

    def look(self, now_s: float) -> tuple[dict[str, str], list[str]]:
        """(agents that have become silent -> why, agents that speak again). Call it every look_s."""
        silent: dict[str, str] = {}
        back = []
        for node, verdict in self._detector.judge(now_s).items():
            if verdict.health is Health.FROZEN and not self._silent[node]:
                silent[node] = verdict.because
            elif verdict.health is Health.ALIVE and self._silent[node]:
                back.append(node)
        self._silent |= dict.fromkeys(silent, True) | dict.fromkeys(back, False)
        return silent, back
