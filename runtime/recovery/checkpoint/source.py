"""The checkpoint or snapshot from which a run of the job goes on, read by one worker.

A process that cannot read it ends (Session.unreadable). So new damage costs a start, and never the job: processes that
have read it are members, the others copy the state; and if none could read it, the job goes on from the next best.
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
from runtime.recovery.checkpoint import reader
from runtime.session import Session

TRIES = 2
"""A read may give a wrong byte although the stored byte is right, but not twice."""
TRIES_REMOTE = 5
PAUSE_S = 0.5
"""Seconds before the second try on remote storage; doubles with each try."""

T = TypeVar("T")


class ResumeSource:
    """Used by the user's thread."""

    def __init__(self, session: Session, settings: Settings, storage: Storage) -> None:
        """storage: the storage of the job's checkpoints."""
        self._session = session
        self._settings = settings
        self._storage = storage

    @cached_property
    def manifest(self) -> Manifest | None:
        """The manifest; None: the job begins with its first step. Ends the process if the entry is gone."""
        name = self._name
        if name is None:
            return None
        return self._tried(name, lambda: self._look(name))

    def read(self, manifest: Manifest) -> list[torch.Tensor]:
        """The tensors of the state, with every byte checked. Ends the process if they cannot be read."""
        name = self._name
        assert name is not None
        return self._tried(name, lambda: reader.read(self._series, manifest))

    @property
    def _name(self) -> EntryName | None:
        """The entry that the leader or `elastic run` has named."""
        told = self._session.began or self._settings.resume
        return EntryName.of(told) if told else None

    @cached_property
    def _series(self) -> Series:
        """The series of the entry. A leader's choice is in this machine's memory, or else among the checkpoints."""
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
        """Remove a snapshot, so that no later process of this machine goes on from it. Keep a checkpoint for people to
        examine, and name the one before. Raises what the storage raises."""
        memory = isinstance(self._series.storage, MemoryStorage)
        older = (found.name for found in self._series.all(self._settings.job_id) if not found.problem)
        instead = None if memory else next((other for other in older if other < name), None)
        if memory:
            self._series.remove(name)
        kind = "snapshot_set_aside" if memory else "checkpoint_set_aside"
        self._session.note(kind, entry=str(name), because=because, instead=str(instead or ""))
        self._session.unreadable(name, because, memory=memory, instead=instead)
        raise CheckpointCorrupt(f"{name} cannot be used any more: {because}; start the job again")
