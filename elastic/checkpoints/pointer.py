"""The pointer to the newest complete checkpoint of a series, which the rendezvous keeps in the store.

It is only a fence: a job finds the checkpoint to go on from on the storage (select.py). The worker that has moved the
pointer to an entry may remove older entries; a writer that was frozen, expelled, and woke up cannot move it, and so
removes nothing.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Self

from elastic.checkpoints.naming import EntryName
from elastic.errors import CheckpointCorrupt


@dataclass(frozen=True, slots=True)
class Pointer:
    """holder: the worker that wrote the manifest of `entry`; "" if the pointer was restored from the storage.

    since: the generation in which the entry was taken; 0 if the pointer was restored: numbers of generations begin
    again with a new store, and all later entries are newer.
    """

    entry: str
    holder: str
    since: int

    @property
    def name(self) -> EntryName:
        """The entry's name. Raises CheckpointCorrupt if it is not valid."""
        return EntryName.of(self.entry)

    def is_newer_than(self, other: Pointer | None) -> bool:
        """Compare by generation first: after a return to an older checkpoint, step numbers repeat."""
        if other is None:
            return True
        mine, theirs = self.name, other.name
        return (self.since, mine.step, mine.call) > (other.since, theirs.step, theirs.call)

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def from_json(cls, content: bytes) -> Self:
        """Read a pointer. Raises CheckpointCorrupt."""
        try:
            pointer = cls(**json.loads(content))
            if type(pointer.since) is not int or not isinstance(pointer.holder, str):
                raise CheckpointCorrupt("the pointer to the newest checkpoint in the store is damaged")
            _ = pointer.name
        except (ValueError, TypeError, RecursionError) as error:
            raise CheckpointCorrupt(f"the pointer to the newest checkpoint in the store is damaged: {error}") from error
        return pointer
