"""Which words of an agent wait for its next beat, where a job is so large that beats are rare. Pure.

Progress and RingUp are said again with each beat of a worker, so only the newest of each worker counts.
"""

from __future__ import annotations

from elastic.agent.standing_words import StandingWords
from elastic.config import JobSpec
from elastic.protocol.messages import Progress, Report, RingUp, Word


class RareBeats:
    """every: how many times beat_s is between two beats. count: beats from here on are counted from this number."""

    def __init__(self, every: int, standing: StandingWords, count: int = 0) -> None:
        self.every = every
        self.infers_rings = False
        """Whether the leader takes a Progress for a RingUp of the same generation."""
        self._standing = standing
        self._count = count
        self._progress: dict[str, Progress] = {}
        self._rings: dict[str, RingUp] = {}

    def take(self, word: Word) -> list[Word]:
        """The words to be sent now, in this order. Any word sends those that its worker has waiting first, but a
        Report, which makes a RingUp untrue, and to which no Progress adds anything."""
        worker_id = getattr(word, "worker_id", "")
        if self.every > 1:
            match word:
                case Progress():
                    self._progress[worker_id] = word
                    return []
                case RingUp():
                    self._rings[worker_id] = word
                    return []
                case Report():
                    self._rings.pop(worker_id, None)
                    return [word]
        held = (self._rings.pop(worker_id, None), self._progress.pop(worker_id, None))
        return [*(one for one in held if one is not None), word]

    def due(self) -> list[Word] | None:
        """To be called every beat_s. The words that have waited for this beat; None: it is none."""
        self._count += 1
        if self._count % self.every:
            return None
        found: list[Word] = [ring for ring in self._rings.values() if not self._is_inferred(ring)]
        found += self._progress.values()
        self._rings, self._progress = {}, {}
        return found

    def _is_inferred(self, ring: RingUp) -> bool:
        said = self._progress.get(ring.worker_id)
        return bool(self.infers_rings and said and said.generation == ring.generation and self._standing.shows(said))


def beats_between(spec: JobSpec, slots: int) -> int:
    """Number of beat_s between two beats of an agent with this many slots, until the leader says the interval: a job
    with many agents needs rarer beats."""
    return whole_beats(spec.timing.scaled(spec.workers // max(1, slots)).beat_s, spec)


def patience(beat_every: int) -> int:
    """How many times less often an agent that sends one of so many beats asks its leader for signs of life, or tries to
    reach it: from a job of thousands of agents, more would fill the leader's core."""
    return max(1, beat_every // 2)


def whole_beats(interval_s: float, spec: JobSpec) -> int:
    """Number of beat_s in an interval, rounded down."""
    return max(1, int(interval_s / spec.timing.beat_s))
