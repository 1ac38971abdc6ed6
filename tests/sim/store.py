"""The durable truth as the leader's shell uses it: who leads, one record per generation number, and the pointer to the
newest checkpoint."""

from __future__ import annotations

from elastic.checkpoints.pointer import Pointer
from elastic.protocol.messages import Generation, Kind


class Records:
    """The transaction of a commit: compared with the election and with the highest committed number."""

    def __init__(self) -> None:
        self.term = 0
        self.all: dict[int, Generation] = {}
        self.pointer: Pointer | None = None

    @property
    def top(self) -> int:
        return max(self.all, default=0)

    def elect(self) -> int:
        self.term += 1
        return self.term

    def commit(self, term: int, record: Generation) -> bool:
        if term != self.term or record.number != self.top + 1:
            return False
        self.all[record.number] = record
        return True

    def point(self, term: int, pointer: Pointer) -> Pointer | None:
        """Where it is then; None: refused."""
        if term != self.term:
            return None
        if pointer.is_newer_than(self.pointer):
            self.pointer = pointer
        return self.pointer

    def chain(self) -> tuple[Generation, ...]:
        """From the last form or loss generation to the highest."""
        records = [self.all[number] for number in sorted(self.all)]
        start = max((i for i, record in enumerate(records) if record.kind is not Kind.PLANNED), default=0)
        return tuple(records[start:])

    @property
    def base(self) -> Generation | None:
        chain = self.chain()
        return chain[0] if chain else None
