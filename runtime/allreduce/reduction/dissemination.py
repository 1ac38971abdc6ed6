"""All members get a few bytes of every member, in O(log P) messages of each.

Bruck's all-gather (Bruck et al. 1997) with radix RADIX. After the stage of distance d a member has the entries of the
RADIX * d ranks from its own on, with wrap-around: it gets them from the ranks d, 2 * d, ... above its own, each of
which sends the d entries from its own on. No member hears from another twice.

Pure: what is to be sent comes back from `begin` and `take`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache

RADIX = 8
"""Up to so many members send each other their entries directly. Each member sends about 2.3 * log2(P) messages."""

Message = tuple[int, bytes]
"""The receiver's rank, and entries."""

_Stage = tuple[tuple[int, int, int], ...]
"""For each message: the rank that sends it here, the rank to which this one sends its own, the number of entries."""


class Dissemination:
    """One member's part. own: its entry."""

    def __init__(self, rank: int, world_size: int, own: bytes) -> None:
        self._rank, self._world_size = rank, world_size
        self._stages = _stages(rank, world_size)
        self._awaited = {sender: count for stage in self._stages for sender, _, count in stage}
        self.to_send = {to for stage in self._stages for _, to, _ in stage}
        """The ranks to which this member has still to send a message."""
        self._done = 0
        self.entries: dict[int, bytes] = {rank: own}
        """By rank."""

    @property
    def complete(self) -> bool:
        return not self._awaited

    def awaits(self, sender: int) -> bool:
        """Whether the message of this rank has still to come."""
        return sender in self._awaited

    def awaits_first(self, sender: int) -> bool:
        """Whether the message has still to come, and is the first thing that this rank sends."""
        return sender in self._awaited and any(sender == other for other, _, _ in self._stages[0])

    def begin(self) -> list[Message]:
        """What this member sends first."""
        return self._messages(0)

    def take(self, sender: int, message: bytes | memoryview) -> tuple[list[int], list[Message]]:
        """Take the message of a rank. Returns the ranks whose entries it had, and what this member sends now. Raises
        ValueError if it is not what was awaited."""
        count = self._awaited.get(sender, 0)
        if not count:
            raise ValueError("no headers of it were expected")
        lengths = _lengths(count)
        begin = lengths.size
        sizes = lengths.unpack_from(message) if len(message) >= begin else ()
        if not sizes or len(message) != begin + sum(sizes):
            raise ValueError(f"{len(message)} bytes for {count} headers of {sizes} bytes")
        ranks = [(sender + number) % self._world_size for number in range(count)]
        whole = bytes(message)
        for rank, size in zip(ranks, sizes, strict=True):
            self.entries[rank] = whole[begin : begin + size]
            begin += size
        del self._awaited[sender]
        messages: list[Message] = []
        while self._done < len(self._stages) and not any(
            other in self._awaited for other, _, _ in self._stages[self._done]
        ):
            self._done += 1
            messages += self._messages(self._done)
        return ranks, messages

    def _messages(self, stage: int) -> list[Message]:
        if stage >= len(self._stages):
            return []
        messages = []
        for _, to, count in self._stages[stage]:
            own = [self.entries[(self._rank + number) % self._world_size] for number in range(count)]
            messages.append((to, encode(own)))
            self.to_send.discard(to)
        return messages


@lru_cache(maxsize=16)
def _stages(rank: int, world_size: int) -> tuple[_Stage, ...]:
    stages = []
    distance = 1
    while distance < world_size:
        offsets = range(distance, min(RADIX * distance, world_size), distance)
        stages.append(
            tuple(
                ((rank + offset) % world_size, (rank - offset) % world_size, min(distance, world_size - offset))
                for offset in offsets
            )
        )
        distance *= RADIX
    return tuple(stages)


@lru_cache(maxsize=64)
def _lengths(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}I")


def encode(entries: Sequence[bytes]) -> bytes:
    """The message with these entries."""
    return _lengths(len(entries)).pack(*map(len, entries)) + b"".join(entries)
