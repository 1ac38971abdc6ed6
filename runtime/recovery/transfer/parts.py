"""Which donor sends which part of a state. Pure: each is asked for one part at a time, so faster donors send more.

A part is a sequence of slices of blobs. A part that was lost with its donor is given to another donor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from runtime.recovery.state.host_bytes import Part


class Parts:
    """The parts that are still to be asked for, and those that donors have been asked for."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._todo = deque(parts)
        self._asked: dict[str, Part] = {}

    def take(self, donor: str) -> Part | None:
        """The part that this donor is to send next; None: there is none to ask for at present."""
        if not self._todo:
            return None
        self._asked[donor] = self._todo.popleft()
        return self._asked[donor]

    def done(self, donor: str) -> None:
        """The part that this donor was asked for is here, and verified."""
        del self._asked[donor]

    def lost(self, donor: str) -> None:
        """This donor will send nothing more; its part goes to another donor."""
        if (part := self._asked.pop(donor, None)) is not None:
            self._todo.appendleft(part)

    @property
    def under_way(self) -> bool:
        return bool(self._asked)

    @property
    def complete(self) -> bool:
        return not self._todo and not self._asked
