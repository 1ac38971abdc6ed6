"""How long things may take. Every duration is in seconds of one process's monotonic clock."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from elastic.config.options import option
from elastic.errors import ConfigError

BEAT_PER_AGENT_S = 0.0005
"""Beats of all agents together stay below 2000 a second, and above 1000 agents below 1000 a second."""

LEAST_BEATS = 5
"""Beats become rarer than in proportion to evict_s only as long as this many beats of an agent fit into evict_s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Every deadline of the control plane, in seconds. The relations between them are checked here, once."""

    beat_s: float = 0.25
    """How often an agent reports its workers."""

    suspect_s: float = 1.0
    """Silence after which a worker is suspected. At least 3 * beat_s, so that two lost beats suspect nobody."""

    evict_s: float = 2.5
    """Silence after which a worker is lost; of one that a signal has stopped, 0.3 times as long, and at least
    3 * beat_s. A silent node is lost after twice as long. Above suspect_s, so that a suspect has time to speak."""

    control_silence_s: float = 60.0
    """The same for a node whose ring still steps: the ring is its proof of life. Above evict_s."""

    progress_s: float = 30.0
    """Longest time a worker may stay at one place without moving on before it counts as stuck: in a shard, for which
    all others wait, without using a processor; in a copy of the state; without a beat, using one. A shard gets ten
    times the longest of late, if that is more. Above evict_s."""

    hang_s: float = option(
        "--hang-limit",
        "S",
        600.0,
        "a worker is replaced when its script has made no progress for so many seconds, between two operations or "
        "within one shard; if no worker makes progress, the job goes back to the newest snapshot or checkpoint. With "
        "--restart the round ends when no script has used a processor for so long",
    )
    """The same for a worker that uses a processor in its shard, or is between two operations: a script may compile, or
    write a file on one worker alone. Also for all members together, or the only one, where nobody waits for anybody;
    ten times as long for those that use a processor. At least progress_s."""

    orphan_limit_s: float = 600.0
    """How long a ring steps on, and survivors wait, without any leader. Above control_silence_s."""

    orphan_margin_s: float = 30.0
    """How much longer than orphan_limit_s a leader waits before it takes an unseen ring for parked. At least
    evict_s and 1 % of orphan_limit_s: members notice late, and two clocks do not run alike."""

    join_window_s: float = 30.0
    """How long the first generation waits for `workers` before it starts with `min_workers`. Below these it waits on
    for its agents, and for processes that they have started and that have not announced themselves, up to
    orphan_limit_s."""

    pause_limit_s: float = option(
        "--pause-limit",
        "S",
        600.0,
        "seconds that a job below --min-workers waits, with its state in memory, until it ends with exit code 3",
    )

    join_grace_s: float = 0.1
    """How long a donor waits for the end of a copy; the larger of this and a quarter of a step."""

    build_s: float = 5.0
    """Deadline of one attempt to build a ring."""

    fence_grace_s: float = 10.0
    """How long an expelled worker is left alone, so that it can find itself fenced. Above evict_s."""

    stop_grace_s: float = 3.0
    """Between asking a process to stop and SIGKILL. Below 5: an interrupted job is gone within 5 seconds."""

    backoff_min_s: float = 0.5
    """Wait before the first replacement of a worker; doubles up to backoff_max_s."""

    backoff_max_s: float = 30.0

    uneven_s: float = 30.0
    """How long members must differ in speed before shards are given out anew or a straggler is named, and the least
    time between two such changes."""

    @property
    def stopped_s(self) -> float:
        """Silence after which a worker is lost that is seen to be stopped by a signal: until somebody continues it, it
        cannot speak. Two lost beats suspect nobody."""
        return max(3 * self.beat_s, 0.3 * self.evict_s)

    def __post_init__(self) -> None:
        for spec in fields(self):
            value = getattr(self, spec.name)
            if not math.isfinite(value) or value <= 0:
                raise ConfigError(f"timing.{spec.name}={value} must be a positive number of seconds")
        least_s = 3 * self.beat_s
        rounding = 1 - 1e-9  # scaled() multiplies both sides, and products round
        self._require(self.suspect_s >= least_s * rounding, "suspect_s", ">= 3 * beat_s", least_s)
        self._require(self.evict_s > self.suspect_s, "evict_s", "> suspect_s", 2.5 * self.suspect_s)
        for name in ("control_silence_s", "progress_s", "fence_grace_s"):
            self._require(getattr(self, name) > self.evict_s, name, "> evict_s", 4 * self.evict_s)
        self._require(
            self.orphan_limit_s > self.control_silence_s,
            "orphan_limit_s",
            "> control_silence_s",
            10 * self.control_silence_s,
        )
        self._require(self.hang_s >= self.progress_s, "hang_s", ">= progress_s", 20 * self.progress_s)
        margin_s = max(self.evict_s, self.orphan_limit_s / 100)
        self._require(
            self.orphan_margin_s >= margin_s, "orphan_margin_s", ">= max(evict_s, orphan_limit_s / 100)", margin_s
        )
        self._require(self.stop_grace_s < 5, "stop_grace_s", "< 5", 3)
        self._require(self.backoff_max_s >= self.backoff_min_s, "backoff_max_s", ">= backoff_min_s", self.backoff_min_s)

    def _require(self, holds: bool, name: str, relation: str, fix: float) -> None:
        if not holds:
            raise ConfigError(f"timing.{name}={getattr(self, name)} must be {relation}; set it to {fix:g}")

    def scaled(self, n_agents: int) -> Timing:
        """The timing for that many agents. Above 500 agents (at the default beat) evict_s and whatever must stay above
        it grow by one factor. Beats become rarer by up to twice that factor, and three fit into suspect_s."""
        factor = n_agents * BEAT_PER_AGENT_S / self.beat_s
        if factor <= 1:
            return self
        evict_s = self.evict_s * factor
        beat_s = self.beat_s * factor
        beat_s = max(beat_s, min(beat_s * min(factor, 2.0), evict_s / LEAST_BEATS))
        return replace(
            self,
            beat_s=beat_s,
            suspect_s=max(self.suspect_s * factor, 3 * beat_s),
            evict_s=evict_s,
            control_silence_s=max(self.control_silence_s, 2 * evict_s),
            progress_s=max(self.progress_s, 2 * evict_s),
            hang_s=max(self.hang_s, 2 * evict_s),
            fence_grace_s=max(self.fence_grace_s, 2 * evict_s),
            orphan_limit_s=max(self.orphan_limit_s, 4 * evict_s),
            orphan_margin_s=max(self.orphan_margin_s, evict_s),
        )
