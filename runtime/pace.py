"""How long a step of this job takes, to know how long the end of a newcomer's copy may be waited for."""

from __future__ import annotations


class Pace:
    """Told when each step begins, in seconds of one clock."""

    def __init__(self) -> None:
        self.step_s = 0.0
        """Of the last two steps the shorter, without waiting for copies: an evaluation or a checkpoint between two
        steps now and then does not count. 0: not known yet."""
        self._begun_s: float | None = None
        self._took_s = 0.0

    def begin(self, now_s: float) -> None:
        """A step begins."""
        before_s, self._took_s = self._took_s, now_s - self._begun_s if self._begun_s is not None else 0.0
        self.step_s, self._begun_s = min(before_s, self._took_s), now_s

    def waited(self, seconds: float) -> None:
        """In the step that is in progress, for the end of a copy."""
        if self._begun_s is not None:
            self._begun_s += seconds
