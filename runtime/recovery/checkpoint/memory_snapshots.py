"""Snapshots: frequent checkpoints in this machine's memory, which survive if all workers die but the machine does not.

Each machine that runs workers keeps a complete copy of the state, and needs no other machine to go on. The workers of
the machine divide the state among themselves, whatever members other machines have. A new snapshot is written beside
the last snapshot, which is removed only when the new one is complete. So after the first snapshot the machine always
has a complete one. Snapshots are taken like checkpoints (coordinator.py): at one step boundary, on a wish of rank 0
that a reduction carries. A machine without enough memory takes no snapshots.
"""

from __future__ import annotations

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
from runtime.recovery.checkpoint.content import Content, now
from runtime.recovery.checkpoint.saver import Answer, Saver, SaverTask
from runtime.recovery.checkpoint.stager import Stager
from runtime.recovery.state.available_memory import available_bytes, free_bytes
from runtime.session import LoopPlace, Session

if TYPE_CHECKING:
    from runtime.recovery.state.training_state import Carrier


KEEP = "last 1"
_EVENTS = {
    "checkpoint_part_written": "snapshot_part_written",
    "checkpoint_complete": "snapshot_complete",
    "checkpoint_failed": "snapshot_failed",
    "checkpoints_not_pruned": "snapshots_not_pruned",
}
"""The saver's events -> those of snapshots. That the last snapshot is removed is not journalled."""
OFF = "off"
"""A file in the directory, made by a worker of this machine that has found too little memory, and has reported it."""


class Snapshots:
    """Used by the user's thread only. Raises ConfigError for an interval that is not possible."""

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
        """The largest state, in bytes, for which there was enough memory."""
        self._refused = False
        """Whether snapshots are off for this worker alone, because the directory does not even take a file."""

    @property
    def wishing(self) -> bool:
        """Whether this worker's part of a reduction has to carry the wish for a snapshot."""
        return self._wishing or self._asked  # again, for who copies the state only now

    def ask(self) -> None:
        """A result has carried the wish: all members take a snapshot before the next step."""
        self._asked = True
        self._wishing = False

    def before_step(self, moment: Callable[[], Moment], step: int) -> None:
        """Take a snapshot if it is due: a step is about to begin, and all members have the same state now."""
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
                return True  # a member that had to write a part is gone
            wait_s *= 2  # others are slow, or could not write their parts
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
        """This worker's place among the members on this machine, in the order of their ranks."""
        place, me = self._session.place(), self._session.worker_id
        here = place.beside(me)
        return replace(place, members=here, rank=here.index(me) if me in here else len(here))

    @property
    def _is_off(self) -> bool:
        """Whether there are no snapshots on this machine; true also without the directory."""
        url = self._storage.url
        return self._refused or not os.path.isdir(url) or os.path.exists(os.path.join(url, OFF))

    def _shortage(self, state_bytes: int) -> str:
        """Why there is not enough memory for snapshots of this size; "": there is."""
        if state_bytes <= self._fits:
            return ""
        held = sum(self._storage.files(PERIODIC).values())
        try:
            free, available = free_bytes(self._storage.url), available_bytes()
        except OSError as error:
            return f"{self._storage.url} cannot be used: {error.strerror}"
        because = shortage(state_bytes, held + free, held + available)
        self._fits = state_bytes if not because else 0
        return because

    def _turn_off(self, because: str) -> None:
        """Turn snapshots off on this machine, for the rest of this run; one of its workers reports it."""
        try:
            open(os.path.join(self._storage.url, OFF), "x").close()  # empty, because there may be no free byte
        except FileExistsError:
            return
        except OSError:  # without an inode, or removed just now
            self._refused = True
        self._session.note("snapshots_off", because=because)

    def _note(self, event: str, **fields: object) -> None:
        if event in _EVENTS:
            self._session.note(_EVENTS[event], **fields)


def _alone(series: str, name: EntryName, answer: Answer) -> None:
    """Answer at once: no other machine has this machine's snapshots."""
    answer(True)


class _MemorySaver(Saver):
    """Memory is scarcer than disk: incomplete entries are removed before the next one is written, not only after it."""

    def _write(self, task: SaverTask) -> None:
        if task.place.rank == 0:
            series = Series(self._storage, task.series)
            for found in series.all():
                if found.problem and str(found.name) != str(task.name):
                    series.remove(found.name)
        super()._write(task)


COPIES = 2
"""Copies in memory while a snapshot is written: the new one, and the last one."""

STAGED = 1
"""Copies that all workers of a machine together stage first."""

PART = 0.5
"""The part of the free memory that snapshots may take: the script's processes need memory too, some of it in
/dev/shm."""


def shortage(state_bytes: int, free_bytes: int, available_bytes: int) -> str:
    """Why a state of this size gets no snapshots, as a sentence; "" if there is enough memory.

    free_bytes: free in the file system in memory. available_bytes: memory that processes can get without swapping.
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


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB"
