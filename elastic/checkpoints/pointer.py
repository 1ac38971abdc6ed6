"""The pointer to the newest complete checkpoint of a series, which the rendezvous keeps in the store.

It is a fence and not the truth: what a job goes on from is found on the storage (select.py). Whoever has moved the
pointer to an entry may remove what is older than that entry; a writer that was frozen, expelled, and woke up cannot
move it, and so removes nothing.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Self

from elastic.checkpoints.naming import EntryName
from elastic.errors import CheckpointCorrupt


@dataclass(frozen=True, slots=True)
class Pointer:
    """holder: the worker that wrote the manifest of `entry`; "" where the pointer was made anew from the storage.

    since: the generation in which the entry was taken. 0 where it was made anew: numbers of generations begin again
    with a new store, and whatever is taken from then on is newer.
    """

    entry: str
    holder: str
    since: int

    @property
    def name(self) -> EntryName:
        """Raises CheckpointCorrupt for a name that is none."""
        name = EntryName.parse(self.entry)
        if name is None:
            raise CheckpointCorrupt(f"{self.entry!r} is no name of a checkpoint")
        return name

    def is_newer_than(self, other: Pointer | None) -> bool:
        """By generation first: after a return to an older checkpoint, steps begin again below those of before."""
        if other is None:
            return True
        mine, theirs = self.name, other.name
        return (self.since, mine.step, mine.call) > (other.since, theirs.step, theirs.call)

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def from_json(cls, content: bytes) -> Self:
        """Raises CheckpointCorrupt."""
        try:
            pointer = cls(**json.loads(content))
            if type(pointer.since) is not int or not isinstance(pointer.holder, str):
                raise CheckpointCorrupt("the pointer to the newest checkpoint in the store is damaged")
            _ = pointer.name
        except (ValueError, TypeError, RecursionError) as error:
            raise CheckpointCorrupt(f"the pointer to the newest checkpoint in the store is damaged: {error}") from error
        return pointer
