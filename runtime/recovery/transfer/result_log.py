"""Results of consecutive operations, kept for newcomers whose copy of the state is older than the present one.

Nothing is kept while no newcomer follows. What is given is held, not copied: its memory is not reused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

from runtime.allreduce.reduction.partial_sum import Partial
from runtime.recovery.state.host_bytes import DONE, StreamMark
from runtime.session import Op

ENTRY_BYTES = 1024
"""Bytes that an entry counts besides its tensors, so that operations without tensors are bounded too."""


@dataclass(frozen=True, slots=True)
class LoggedResult:
    """One operation as its members had it. fingerprint: see Session.begin. mark: where the result is complete
    on the GPUs."""

    number: int
    op: Op
    fingerprint: dict[str, str]
    result: Partial
    mark: StreamMark = DONE

    @property
    def nbytes(self) -> int:
        return ENTRY_BYTES + sum(tensor.nbytes for tensor in self.result.flats.values())


class ResultLog:
    """Not thread-safe: guarded by its owner's lock."""

    def __init__(self) -> None:
        self._entries: deque[LoggedResult] = deque()
        self._needs: dict[Hashable, int] = {}
        self._nbytes = 0
        self._limit_bytes = 0

    def follow(self, follower: Hashable, number: int, limit_bytes: int) -> None:
        """Keep the results from operation ``number`` on; its result is held, or it is in progress.

        limit_bytes: the most bytes of the whole log; the largest limit of all present followers counts.
        """
        self._limit_bytes = max(self._limit_bytes, limit_bytes)
        self._needs[follower] = number

    @property
    def is_followed(self) -> bool:
        return bool(self._needs)

    def is_followed_by(self, follower: Hashable) -> bool:
        return follower in self._needs

    def leave(self, follower: Hashable) -> None:
        """End a follower's interest; unknown followers are ignored."""
        if self._needs.pop(follower, None) is not None:
            self._trim()

    def append(self, entry: LoggedResult) -> bool:
        """Add an entry. Whether it is held now. Beyond the limit all followers have to begin again."""
        if not self._needs:
            return False
        self._entries.append(entry)
        self._nbytes += entry.nbytes
        if self._nbytes > self._limit_bytes:
            self._needs.clear()
            self._trim()
        return bool(self._entries)

    def since(self, follower: Hashable, number: int, most_bytes: int) -> list[LoggedResult]:
        """A follower's next results, from operation ``number`` on: at least one, more while they fit; [] if not held.

        Frees the results before ``number``, unless another follower needs them.
        """
        if follower not in self._needs:
            return []
        self._needs[follower] = number
        self._trim()
        found: list[LoggedResult] = []
        for entry in self._entries:
            if entry.number >= number and (not found or most_bytes >= entry.nbytes):
                found.append(entry)
                most_bytes -= entry.nbytes
            elif found:
                break
        return found if found and found[0].number == number else []

    def holds_all_since(self, number: int) -> bool:
        """Whether another newcomer may follow from this operation on."""
        return number in self._needs.values()

    def _trim(self) -> None:
        if not self._needs:
            self._limit_bytes = 0
        while self._entries and (not self._needs or self._entries[0].number < min(self._needs.values())):
            self._nbytes -= self._entries.popleft().nbytes
