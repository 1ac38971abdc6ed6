"""The headers of one operation: what each member brings, and what all have to agree on.

All members get the entry of every member (entries.py, dissemination.py). Fields on which members normally agree travel
as a digest of their JSON. Only if the digests differ, everybody sends these fields in full, so that all can say who
differs in what.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from typing import TypeAlias

from elastic.errors import RingBroken
from runtime.allreduce.reduction.dissemination import Dissemination
from runtime.allreduce.reduction.entries import MAX_HEADER_BYTES, Said, decode, digest, encode, encoded_json
from runtime.allreduce.reduction.partial_sum import Json, Partial
from runtime.allreduce.ring.frames import Frame, FrameKind, LinkError
from runtime.allreduce.ring.ring import PARTS, Ring

Headers: TypeAlias = dict[str, dict[str, Json]]


class HeaderExchange:
    """One member's part. agreed: the fields that should be the same on all members; fields: the others, with worker_id;
    roots, leaves: what it brings, as in over_mesh.exchange.

    sent: called with each rank to which this member has queued its message of the first stage.
    """

    def __init__(
        self,
        ring: Ring,
        op: int,
        agreed: dict[str, Json],
        fields: dict[str, Json],
        roots: Sequence[Partial],
        leaves: Sequence[int] | None,
        sent: Callable[[int], None],
    ) -> None:
        self._ring, self._op, self._sent = ring, op, sent
        self._agreed, self._in_full = agreed, encoded_json(agreed)
        self._digest = digest(self._in_full)
        self.disagree = False
        """Whether members are known to differ in what they should agree on."""
        self._over = False
        self.ranks = {member: rank for rank, member in enumerate(ring.members)}
        self.said: dict[int, Said] = ring.said.setdefault(op % PARTS, {})
        own = encode(self._digest, fields, roots, leaves, self.said.get(ring.rank))
        self._digests: dict[int, bytes] = {}
        self.numbers: dict[int, Sequence[float]] = {}
        """By rank. All members must fold the same values, so this one reads its own entry as the others do."""
        self._read(ring.rank, own)
        self._words = Dissemination(ring.rank, ring.world_size, own)

    def begin(self) -> None:
        self._send(self._words.begin())

    @property
    def uninformed(self) -> set[int]:
        """The ranks to which this member has still to queue a message."""
        return self._words.to_send

    @property
    def complete(self) -> bool:
        return self._words.complete

    def awaits(self, peer: str) -> bool:
        return self._words.awaits(self.ranks[peer])

    def awaits_first(self, peer: str) -> bool:
        """Whether the first frame of this peer has still to come, and has to be a header."""
        return not self.disagree and self._words.awaits_first(self.ranks[peer])

    def accept(self, peer: str, frame: Frame) -> memoryview | None:
        """See FrameSink.accept."""
        awaited = self.awaits(peer)
        if not awaited and frame.term == 1 and not self.disagree and not self._over:
            return None  # that member knows already that some do not agree
        if frame.term != self.disagree or not awaited or frame.length > self._ring.world_size * MAX_HEADER_BYTES:
            raise LinkError(f"{peer} sent a header of {frame.length} bytes that was not expected")
        return memoryview(bytearray(frame.length))

    def take(self, peer: str, payload: memoryview) -> list[tuple[str, bool, Said]]:
        """Take a message. Returns (worker id, whether it agrees, what it said) of each member whose entry is in it.

        Raises LinkError.
        """
        found: list[tuple[str, bool, Said]] = []
        try:
            ranks, messages = self._words.take(self.ranks[peer], payload)
            for rank in () if self.disagree else ranks:
                said = self._read(rank, self._words.entries[rank])
                worker = self._ring.members[rank]
                if said.fields["worker_id"] != worker:
                    raise ValueError(f"the header of {worker} speaks for another worker")
                found.append((worker, self._digests[rank] == self._digest, said))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, struct.error) as error:
            raise LinkError(f"{peer} sent a malformed header: {error}") from error
        self._send(messages)
        return found

    def _read(self, rank: int, entry: bytes) -> Said:
        self._digests[rank], said, self.numbers[rank] = decode(entry, self.said.get(rank))
        self.said[rank] = said
        return said

    def everybodys(self) -> Headers | None:
        """All headers, in rank order, once `complete`; None if members disagree, and have begun to say so in full.

        Raises RingBroken for what is no header.
        """
        if not self.disagree and any(other != self._digest for other in self._digests.values()):
            self.disagree = True
            self._words = Dissemination(self._ring.rank, self._ring.world_size, self._in_full)
            self._send(self._words.begin())
            return None
        self._over = True
        headers: Headers = {}
        for rank, worker in enumerate(self._ring.members):
            agreed = self._parse(worker, self._words.entries[rank]) if self.disagree else self._agreed
            headers[worker] = {**agreed, **self.said[rank].fields}
        return headers

    def _parse(self, worker: str, entry: bytes) -> dict[str, Json]:
        try:
            agreed: dict[str, Json] = json.loads(entry)
            if not agreed.keys() >= self._agreed.keys():
                raise ValueError(f"it has the fields {sorted(agreed)}")
            return agreed
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise RingBroken(f"{worker} sent a malformed header: {error}", peer=worker) from error

    def _send(self, messages: list[tuple[int, bytes]]) -> None:
        for rank, message in messages:
            frame = Frame(FrameKind.HEADER, self._ring.generation, self._op, len(message), int(self.disagree))
            self._ring.links[self._ring.members[rank]].send(frame, message)
            self._sent(rank)
