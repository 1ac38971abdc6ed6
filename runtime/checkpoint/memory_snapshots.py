"""Snapshots: checkpoints in the memory of this machine, taken often, for the day when all workers die and it does not.

Each machine that runs workers keeps a whole copy of its own, so that it never needs another one to go on: its workers
divide the state among themselves, whoever else is a member. A snapshot is written beside the one before, which goes
when the new one is complete, so a whole one is there at any moment after the first. They are taken as checkpoints are
(coordinator.py): at one step boundary, on a wish of rank 0 that travels with a reduction. Where the machine's memory
has no room for them, none are taken.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from elastic.checkpoints.manifest import Moment
from elastic.checkpoints.naming import PERIODIC, EntryName
from elastic.checkpoints.policy import Every, Unit
from elastic.checkpoints.series import Series
from elastic.checkpoints.settings import Settings
from elastic.checkpoints.storage import MemoryStorage
from elastic.protocol.worker_id import node_of
from runtime.checkpoint.content import Content, now
from runtime.checkpoint.saver import Answer, Saver, SaverTask
from runtime.checkpoint.stager import Stager
from runtime.session import LoopPlace, Session
from runtime.state.available_memory import available_bytes

if TYPE_CHECKING:
    from runtime.state.training_state import Carrier


KEEP = "last 1"
OFF = "off"
"""A file in the directory: one of this machine's workers has found that there is no room, and has said so."""


class Snapshots:
    """Used by the user's thread only. Raises ConfigError for an interval that cannot be."""

    def __init__(self, session: Session, carrier: Carrier, settings: Settings) -> None:
        self._session = session
        self._carrier = carrier
        self._every = Every.parse(settings.snapshot_every if settings.memory else "off")
        self._storage = MemoryStorage(settings.memory)
        self._saver = _MemorySaver(replace(settings, keep=KEEP), self._storage, self._place, self._note, _alone)
        self._stager = Stager()
        self._last_s = time.monotonic()
        self._wishing = False
        self._asked = False
        self._fits = 0
        """The largest state, in bytes, for which there was room."""

    @property
    def wishing(self) -> bool:
        """Whether this worker's part of a reduction has to carry the wish for a snapshot."""
        return self._wishing or self._asked  # again, for who copies the state only now

    def ask(self) -> None:
        """The wish has come with a result: all members take one before the next step."""
        self._asked = True
        self._wishing = False

    def before_step(self, moment: Callable[[], Moment], step: int) -> None:
        """A step is about to begin: everybody's state is the same now, and nobody changes it."""
        if self._asked or self._every.at_step(step):
            self._asked = False
            self._last_s = time.monotonic()
            self._take(moment(), step)
        self._wishing = self._session.rank == 0 and self._wants()

    def _wants(self) -> bool:
        if self._every.unit is Unit.OFF or self._saver.pending:
            return False
        standing = self._saver.standing
        wait_s = self._every.snapshot_wait_s(standing.cost_s)
        if not standing.complete and standing.place is not None:
            if standing.place.token != self._session.place().token:
                return True  # a member is gone that had its part to write
            wait_s *= 2  # others are slow, or could not write theirs
        return time.monotonic() - self._last_s >= wait_s

    def _take(self, moment: Moment, step: int) -> None:
        begun_s, place = time.monotonic(), self._place()
        if self._saver.pending:
            self._session.note("snapshot_skipped", step=step, because="the one before is still being written")
            return
        if place.rank >= place.world or self._is_off:
            return
        content = Content.of(self._carrier)
        if because := self._shortage(sum(content.sizes)):
            self._turn_off(because)
            return
        shares, copied = content.stage(self._stager, [place.rank], place.world)
        self._saver.put(
            SaverTask(
                series=PERIODIC,
                name=EntryName(step, 0, place.generation, place.token),
                place=place,
                moment=moment,
                header=content.header,
                shares=shares,
                copied=copied,
                taken=now(),
                stall_s=time.monotonic() - begun_s,
            )
        )

    def _place(self) -> LoopPlace:
        """Among the members on this machine, in the order of their ranks."""
        place, me = self._session.place(), self._session.worker_id
        here = tuple(member for member in place.members if node_of(member) == node_of(me))
        return replace(place, members=here, rank=here.index(me) if me in here else len(here))

    @property
    def _is_off(self) -> bool:
        """Also on a machine that has no such directory."""
        return not os.path.isdir(self._storage.url) or os.path.exists(os.path.join(self._storage.url, OFF))

    def _shortage(self, state_bytes: int) -> str:
        """Why there can be none of this size; "" if there can."""
        if state_bytes <= self._fits:
            return ""
        held = sum(self._storage.files(PERIODIC).values())
        free, available = free_bytes(self._storage.url), available_bytes()
        because = shortage(state_bytes, held + free, held + available)
        self._fits = state_bytes if not because else 0
        return because

    def _turn_off(self, because: str) -> None:
        """On this machine, for the rest of this run; said by one of its workers."""
        with contextlib.suppress(FileExistsError):
            open(os.path.join(self._storage.url, OFF), "x").close()  # empty: there may be no room for a word
            self._session.note("snapshots_off", because=because)

    def _note(self, event: str, **fields: object) -> None:
        """The saver speaks of checkpoints. Each snapshot removes the one before, which is no news."""
        if event != "checkpoints_pruned":
            self._session.note(event.replace("checkpoint", "snapshot", 1), **fields)


def _alone(series: str, name: EntryName, answer: Answer) -> None:
    """This machine's snapshots are nobody else's."""
    answer(True)


class _MemorySaver(Saver):
    """Memory is scarcer than disk: what is not whole goes before the next one is written, not only after it."""

    def _write(self, task: SaverTask) -> None:
        if task.place.rank == 0:
            series = Series(self._storage, task.series)
            for found in series.all():
                if found.problem and str(found.name) != str(task.name):
                    series.remove(found.name)
        super()._write(task)


COPIES = 2
"""What lies in memory while one is written: it, and the one before."""

STAGED = 1
"""What all workers of a machine together copy aside first."""

PART = 0.5
"""How much of what is left snapshots may take: the script's own processes need memory, and some of them /dev/shm."""


def shortage(state_bytes: int, free_bytes: int, available_bytes: int) -> str:
    """Why a state of this size gets no snapshots, as a sentence; "" if there is room.

    free_bytes: of the file system in memory; available_bytes: of the memory that processes can get without swapping.
    """
    copies, all_bytes = COPIES * state_bytes, (COPIES + STAGED) * state_bytes
    if copies > PART * free_bytes:
        return (
            f"{COPIES} copies of a state of {_megabytes(state_bytes)} would take more than half of the "
            f"{_megabytes(free_bytes)} that are left in /dev/shm (a container is given more by docker run --shm-size)"
        )
    if all_bytes > PART * available_bytes:
        return (
            f"{COPIES + STAGED} copies of a state of {_megabytes(state_bytes)} would take more than half of the "
            f"{_megabytes(available_bytes)} of memory that are left on this machine"
        )
    return ""


def free_bytes(path: str) -> int:
    """How much is free on the file system of that directory. Raises OSError."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB"
