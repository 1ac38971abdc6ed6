"""What a run of the job goes on from, as one worker reads it.

A process that cannot read it ends (Session.unreadable). So damage that nobody has seen before costs a start, and never
the job: whoever has read it is a member, the others copy the state; and if nobody could, the next best is gone on from.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property
from typing import NoReturn, TypeVar

import torch

from elastic.checkpoints.manifest import Manifest
from elastic.checkpoints.naming import EntryName
from elastic.checkpoints.series import Series, newest_in_memory
from elastic.checkpoints.settings import Settings
from elastic.checkpoints.storage import MemoryStorage, Storage
from elastic.errors import CheckpointCorrupt
from runtime.session import Session

TRIES = 2
"""A byte may come out wrong although it lies there right; then it does not come out wrong twice."""
TRIES_REMOTE = 5
PAUSE_S = 0.5
"""Before the second try on a storage that is elsewhere; doubles."""

T = TypeVar("T")


class ResumeSource:
    """Used by the user's thread."""

    def __init__(self, session: Session, settings: Settings, storage: Storage) -> None:
        """storage: of the job's checkpoints."""
        self._session = session
        self._settings = settings
        self._storage = storage

    @cached_property
    def manifest(self) -> Manifest | None:
        """None: the job begins with its first step. Ends the process if it is not there any more."""
        name = self._name
        if name is None:
            return None
        return self._tried(name, lambda: self._look(name))

    def read(self, manifest: Manifest) -> list[torch.Tensor]:
        """The tensors of the state, every byte of them checked. Ends the process if they cannot be read."""
        # torch.distributed.checkpoint takes a second to import, and only those who resume need it.
        from runtime.checkpoint import reader

        name = self._name
        assert name is not None
        return self._tried(name, lambda: reader.read(self._series, manifest))

    @property
    def _name(self) -> EntryName | None:
        """The entry that the leader or `elastic run` has named."""
        told = self._session.began or self._settings.resume
        name = EntryName.parse(told)
        if told and name is None:
            raise CheckpointCorrupt(f"{told:.64} is no name of a checkpoint")
        return name

    @cached_property
    def _series(self) -> Series:
        """Where it lies. Of a leader's choice: in this machine's memory, or else among the checkpoints."""
        if self._session.began:
            in_memory = newest_in_memory(self._settings) == self._session.began
            return Series(MemoryStorage(self._settings.memory)) if in_memory else Series(self._storage)
        memory = self._settings.resume_from
        return Series(MemoryStorage(memory) if memory else self._storage)

    def _look(self, name: EntryName) -> Manifest:
        found = self._series.look(name, self._settings.job_id)
        if found.manifest is None or found.problem:
            raise CheckpointCorrupt(found.problem)
        return found.manifest

    def _tried(self, name: EntryName, act: Callable[[], T]) -> T:
        remote = "://" in self._series.storage.url
        tries, pause_s, because = TRIES_REMOTE if remote else TRIES, PAUSE_S, ""
        for _ in range(tries):
            if because and remote:
                time.sleep(pause_s)
                pause_s *= 2
            try:
                return act()
            except (CheckpointCorrupt, OSError) as error:
                because = str(error)
                self._session.note("read_again", entry=str(name), because=because)
        self._give_up(name, because)

    def _give_up(self, name: EntryName, because: str) -> NoReturn:
        """A snapshot goes, so that no later process of this machine goes on from it. A checkpoint stays for people to
        look at; the one before is named. Raises what it raises if not even that can be seen."""
        memory = isinstance(self._series.storage, MemoryStorage)
        older = (found.name for found in self._series.all(self._settings.job_id) if not found.problem)
        instead = None if memory else next((other for other in older if other < name), None)
        if memory:
            self._series.remove(name)
        kind = "snapshot_set_aside" if memory else "checkpoint_set_aside"
        self._session.note(kind, entry=str(name), because=because, instead=str(instead or ""))
        self._session.unreadable(name, because, memory=memory, instead=instead)
        raise CheckpointCorrupt(f"{name} cannot be used any more: {because}; start the job again")
