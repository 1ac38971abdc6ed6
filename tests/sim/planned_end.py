"""How scripts of a round end behind one step when workers join or leave as planned: agreed_end.py in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.recovery.kept import agreed_end

POLL_S = 0.1
ASKED_LATE_S = 4.0
"""Of a worker that the machine does not let run."""
LAST_STEPS = 6
"""As of supervisor.py."""


@dataclass
class PlannedEnd:
    """What the store of a round has. upsets: how many troubles there had been when the first script was asked."""

    world: int
    upsets: int
    seen: set[str] = field(default_factory=set)
    there: set[str] = field(default_factory=set)
    last: int | None = None

    def is_last(self, name: str, step: int) -> bool:
        """Whether a script that was asked has to end behind this step."""
        self.seen.add(name)
        if self.last is None:
            self.last = agreed_end.last_step(len(self.seen), self.world, step)
        return step == self.last

    @property
    def reached(self) -> bool:
        return len(self.there) == self.world
