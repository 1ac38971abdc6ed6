"""A leader's eye on its agents: who is silent, and how often they have to speak.

Thousands of agents speak less often each, so that their leader has time for something else (Timing.scaled). How many
there are follows from the job's size, which may change while it runs. Each agent is told the interval that its leader
counts with; when that changes, the leader tells all of them, and gives each the time from then on.

Pure: time is an argument.
"""

from __future__ import annotations

from elastic.config import Timing
from elastic.detector import Detector, Health

STEADY = 1.25
"""So many times more or less agents are no reason to tell all of them another interval."""


class Vigil:
    """agents: how many are expected."""

    def __init__(self, timing: Timing, agents: int, now_s: float) -> None:
        self._own = timing
        self._timing = timing.scaled(agents)
        self._detector = Detector(self._timing, now_s)
        self._silent: dict[str, bool] = {}
        """Who is watched -> whether it is given up for now."""

    @property
    def beat_s(self) -> float:
        """How often each agent has to speak."""
        return self._timing.beat_s

    @property
    def silence_s(self) -> float:
        """For how long an agent has been silent, at least, when it is named."""
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
        """Whether agents have to speak at another interval from now on, because of how many are expected."""
        timing = self._own.scaled(agents)
        if self.beat_s / STEADY < timing.beat_s < self.beat_s * STEADY:
            return False
        self._timing, self._detector = timing, Detector(timing, now_s)
        for node in self._silent:
            self._detector.watch(node, now_s)
        return True

    def look(self, now_s: float) -> tuple[dict[str, str], list[str]]:
        """Who has become silent, and why that is thought; and who speaks again. Asked once in beat_s."""
        silent: dict[str, str] = {}
        back = []
        for node, verdict in self._detector.judge(now_s).items():
            if verdict.health is Health.FROZEN and not self._silent[node]:
                silent[node] = verdict.because
            elif verdict.health is Health.ALIVE and self._silent[node]:
                back.append(node)
        self._silent |= dict.fromkeys(silent, True) | dict.fromkeys(back, False)
        return silent, back
