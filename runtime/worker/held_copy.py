"""A copy of the state that a donor holds, to send it to newcomers while training changes the state itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from elastic.errors import NoMemory
from elastic.records.journal import Journal
from runtime.allreduce.reduction.flat_pool import room_for
from runtime.allreduce.reduction.partial_sum import Json
from runtime.recovery.state.available_memory import available_bytes
from runtime.recovery.state.host_bytes import HostBytes
from runtime.recovery.transfer.connection import CopyConnection
from runtime.recovery.transfer.result_log import ResultLog
from runtime.worker.copy_window import LATER_S, CopyWindow
from runtime.worker.state_owner import SharedWorkerState

HOLD_BYTES_PER_S = 1 << 30
"""The speed at which a slow machine copies within its memory."""

PART = 0.5
"""The part of the available memory that a copy may take, and the part of the rest that results may take."""

LOG_BYTES_MIN = 64 << 20
LOG_STATES = 2
"""The log of results may take this many times the bytes of the state. A step exchanges its gradients at about the speed
of the copy, so results of about the state's size arrive while it is copied."""

Describe = Callable[[], tuple[dict[str, Json], dict[str, Json], HostBytes]]
"""Returns what is said of the operation in progress, and header and bytes of its state."""


def log_bytes(state_bytes: int) -> int:
    """The most bytes that the log of results may take for one newcomer, with a state of this size."""
    return max(LOG_BYTES_MIN, min(LOG_STATES * state_bytes, int(PART * available_bytes())))


class Room:
    """Memory for one copy, taken before it is needed: new pages cost more time than the copy itself."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """sizes: bytes of every tensor."""
        self.sizes = list(sizes)
        self.nbytes = sum(sizes)
        self._tensors = room_for(sizes)
        for tensor in self._tensors:
            tensor.zero_()
        self.log_bytes = log_bytes(self.nbytes)
        """The bytes that are left for results beside this copy."""

    def fill(self, state: HostBytes) -> list[torch.Tensor]:
        """A copy of a state of these sizes in this memory, as its blobs."""
        state.copy_to(self._tensors)
        return self._tensors


@dataclass(frozen=True, slots=True)
class HeldCopy:
    """What a donor sends: the state when operation ``number`` was handed out."""

    number: int
    about: dict[str, Json]
    header: dict[str, Json]
    blobs: list[torch.Tensor]


class CopyHolder:
    """Holds one copy at a time, as long as a connection reads it. Called by the threads of requests."""

    def __init__(self, shared: SharedWorkerState, window: CopyWindow, log: ResultLog, journal: Journal) -> None:
        self._shared = shared
        self._window = window
        self._log = log
        self._journal = journal
        self._making = False
        self._held: HeldCopy | None = None
        self._readers = 0
        self._told = False
        self.has_memory = True
        """Whether there was enough memory when a copy was last wanted."""

    @contextmanager
    def copy(self, reader: CopyConnection, wanted: Callable[[], bool], describe: Describe) -> Iterator[HeldCopy | None]:
        """A copy to send: the one that others read, or a new one. The reader follows the log from its operation on.

        wanted: whether the state of the operation in progress is wanted. None: there was no window in time or no
        memory, or the held copy is too old by now.
        """
        changed = self._shared.changed
        with changed:
            changed.wait_for(lambda: not self._making, LATER_S)
            held = self._share(reader)
            make = held is None and self._held is None and not self._making
            self._making = self._making or make  # another reader may still be making one, and has all the memory
        if make:
            try:
                held = self._make(reader, wanted, describe)
            finally:
                with changed:
                    self._held, self._readers, self._making = held, int(held is not None), False
                    changed.notify_all()
        try:
            yield held
        finally:
            with changed:
                self._readers -= held is not None
                if not self._readers:
                    self._held = None

    def _share(self, reader: CopyConnection) -> HeldCopy | None:
        held = self._held
        if held is not None and self._log.holds_all_since(held.number):
            self._log.follow(reader, held.number, LOG_BYTES_MIN)
            self._readers += 1
            return held
        return None

    def _make(self, reader: CopyConnection, wanted: Callable[[], bool], describe: Describe) -> HeldCopy | None:
        """Make a copy inside a window, whose end waits for it: not near the end, unless windows are too short for it.

        A first window tells how much memory the copy takes.
        """
        room: Room | None = None
        while True:
            seen = self._window.opened

            def ready(seen: int = seen, room: Room | None = room) -> bool:
                if room is None or seen < self._window.opened:
                    return wanted()
                return wanted() and self._window.lasts_from_now(room.nbytes / HOLD_BYTES_PER_S)

            def begin(number: int, room: Room | None = room) -> None:
                if room is not None:
                    self._log.follow(reader, number, room.log_bytes)
                    self._window.state_given = True

            with self._window.reading(ready, begin) as number:
                if number is None:
                    return None
                begun_s = time.monotonic()
                about, header, state = describe()
                if room is not None and room.sizes == state.sizes:  # else the state has grown since
                    held = HeldCopy(number, about, header, room.fill(state))
                    ms = round(1000 * (time.monotonic() - begun_s), 1)
                    self._journal.write("state_held", op=number, bytes=room.nbytes, ms=ms)
                    return held
            with self._shared.changed:
                self._log.leave(reader)
            made = self._room(state.sizes)
            if made is None:
                return None
            room = made

    def _room(self, sizes: Sequence[int]) -> Room | None:
        nbytes, available, room = sum(sizes), available_bytes(), None
        because = f"more than half of the {available / 1e6:.0f} MB of memory that are left here"
        if nbytes <= PART * available:
            try:
                room = Room(sizes)
            except NoMemory:
                because = "more than the system gives this process"
        self.has_memory = room is not None
        if room is None and not self._told:
            self._told = True
            takes = f"it takes longer than a step, a copy to send meanwhile takes {nbytes / 1e6:.0f} MB"
            self._journal.write("state_not_held", because=f"{takes}, and that is {because}")
        return room
