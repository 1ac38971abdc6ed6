"""A transport over MPI, for the CPUs of workers that have ranks of one mpirun (elastic/agent/process/mpirun.py).

All generations use one communicator, made while all ranks lived. A generation's messages have its number as their tag,
and go between its members only, so a loss needs neither an MPI agreement on the survivors nor a communicator of them:
no call of MPI ever waits for a process that may be gone. A generation with a member that has no rank has no transport:
the mesh carries its tensors (docs/decisions/mpi.md).

mpi4py is imported only if the worker has a rank.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from elastic.agent.worker.mpi_ranks import Ranks
from elastic.errors import ConfigError, RingBroken
from elastic.records.journal import Journal

READY_S = 300.0
"""Seconds to wait for the other workers of the start: their scripts may do anything before elastic.join()."""
_POLL_S = 0.02
_PAUSE_MIN_S = 20e-6
_PAUSE_MAX_S = 1e-3
_SPINS = 100
"""How often other threads and processes get a turn before the first pause: most messages have come by then."""

Communicator: TypeAlias = Any
"""mpi4py.MPI.Intracomm; the package is optional, so its types are too."""

_ENDED_MAX = 64
"""For how many ended generations late messages are looked for; they come within a few generations."""


class MpiWorld:
    """The ranks of mpirun, for one worker."""

    def __init__(self, ranks: Ranks, worker_id: str, journal: Journal) -> None:
        """With a rank, wait for all other workers with ranks, and join them, during which the interpreter stands still.

        Raises ConfigError if a worker ended before, or MPI does not work here. If a worker ends while they join, the
        others wait for ever, and the agent ends them.
        """
        self._ranks = ranks
        self._workers = ranks.workers
        self._me = worker_id
        self._journal = journal
        self._wire: _Wire | None = None
        if worker_id in self._workers:
            self._await_others()
            self._join()

    def _await_others(self) -> None:
        """Wait until all have come, because joining cannot be interrupted."""
        self._ranks.ready(self._workers.index(self._me)).touch()
        deadline_s = time.monotonic() + READY_S
        while late := [n for n in range(len(self._workers)) if not self._ranks.ready(n).exists()]:
            if ended := [worker for n, worker in enumerate(self._workers) if self._ranks.gone(n).exists()]:
                raise ConfigError(f"MPI cannot start: {', '.join(ended)} ended before all had called elastic.join()")
            names = ", ".join(self._workers[n] for n in late)
            if time.monotonic() > deadline_s:
                raise ConfigError(f"MPI cannot start: {names} did not call elastic.join() within {READY_S:g} s")
            time.sleep(_POLL_S)

    def _join(self) -> None:
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False  # finalize waits for all ranks, and some may have died
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise ConfigError(f"mpi4py finds no MPI library: {error}; install the openmpi package beside it") from error
        name, version = MPI.get_vendor()
        if name != "Open MPI" or version < (5, 0, 0):
            raise ConfigError(f"mpi4py uses {name} {version}, and --ring mpi needs Open MPI 5 with ULFM")
        try:
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
            MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)
            self._wire = _Wire(MPI.COMM_WORLD.Dup())
        except MPI.Exception as error:
            raise ConfigError(f"MPI cannot start: {error}; logs/mpirun.log may say why") from error
        self._ranks.joined(self._workers.index(self._me)).touch()

    @contextlib.contextmanager
    def meet(self, generation: int, members: Sequence[str], rank: int) -> Iterator[MpiMeeting]:
        """See transport.Meet."""
        yield MpiMeeting(self, generation, members)

    def objection(self, generation: int, members: Sequence[str]) -> str:
        """Why MPI cannot connect these members, or ""."""
        strangers = [member for member in members if member not in self._workers]
        if not strangers:
            return ""
        because = (
            f"MPI has no rank for {', '.join(strangers)}, because it gives none to a process that starts after mpirun; "
            "spares (--spares) have one from the start"
        )
        if members[0] == self._me:
            self._journal.write("ring_without_mpi", generation=generation, because=because)
        return because

    def connect(self, generation: int, members: Sequence[str]) -> MpiTransport:
        """The transport of members that all have ranks."""
        assert self._wire is not None, "who is no member does not connect"
        ranks = [self._workers.index(member) for member in members]
        self._wire.sweep([rank for rank, member in zip(ranks, members, strict=True) if member != self._me])
        if members[0] == self._me:
            self._journal.write("ring_over_mpi", generation=generation, ranks=ranks)
        return MpiTransport(self._wire, generation, ranks)


class MpiMeeting:
    """See transport.Meeting. There is no offer: a rank identifies its worker."""

    offer = ""

    def __init__(self, world: MpiWorld, generation: int, members: Sequence[str]) -> None:
        self._world, self._generation, self._members = world, generation, members
        self.because = ""

    def connect(self, offer: str) -> MpiTransport | None:
        self.because = self._world.objection(self._generation, self._members)
        return None if self.because else self._world.connect(self._generation, self._members)

    def abort(self) -> None:
        """Do nothing: `connect` waits for nobody."""


class _Wire:
    """The communicator of all ranks, and the requests that failed exchanges have left on it.

    Its calls are made one at a time, and none of them waits: two threads inside Open MPI were seen to crash it.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.calling = threading.Lock()
        """Held around every call of MPI."""
        self._left: list[tuple[list[Any], object]] = []
        """Requests that have not ended, and their memory, which MPI may still use."""
        self._ended: deque[int] = deque(maxlen=_ENDED_MAX)

    def leave(self, requests: list[Any], receives: int, memory: object) -> None:
        """Keep the requests of a failed exchange, of which the first are receives. Messages that never come are not
        waited for; for those that come, the requests end."""
        from mpi4py import MPI

        with self.calling:
            self._left.append((requests, memory))
            for request in requests[:receives]:
                if request:  # the request has not ended
                    with contextlib.suppress(MPI.Exception):  # the request stays, with its memory
                        request.Cancel()

    def end(self, generation: int) -> None:
        """Note that nothing of this generation is received here any more. Returns at once."""
        self._ended.append(generation)

    def sweep(self, ranks: Sequence[int]) -> None:
        """Free what MPI has finished with, and receive what these ranks, which live, have sent for a generation that
        had ended here: until then they have to keep it."""
        from mpi4py import MPI

        with self.calling:
            for rank in ranks:
                with contextlib.suppress(MPI.Exception):  # MPI regards the rank as dead: nothing comes from it any more
                    self._take_in(rank)
            self._left = [row for row in self._left if not all([_has_ended(request) for request in row[0]])]

    def _take_in(self, rank: int) -> None:
        from mpi4py import MPI

        for generation in tuple(self._ended):
            status = MPI.Status()
            while message := self.communicator.Improbe(rank, generation, status):
                room = torch.empty(status.Get_count(MPI.BYTE), dtype=torch.uint8)
                self._left.append(([message.Irecv([room.numpy(), MPI.BYTE])], room))


class MpiTransport:
    """Transport (see transport.py) between these ranks of MPI, by rank of the ring.

    Messages pass through memory of the transport's own. MPI cannot cancel a message: with a peer that was frozen it
    goes on when the peer thaws, reading the memory to send and writing the memory to receive. By then the tensors hold
    other values, and the peer must not get a result made of those.
    """

    adds = False
    """A collective operation of MPI would wait for ranks that may be gone."""

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """See Transport."""
        raise NotImplementedError

    def __init__(self, wire: _Wire, generation: int, ranks: Sequence[int]) -> None:
        self._wire = wire
        self._generation = generation
        self._ranks = ranks
        self._using = threading.Lock()
        self._ending = threading.Lock()
        self._aborted = threading.Event()
        self._rooms: dict[tuple[str, int], Tensor] = {}

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """See Transport."""
        with self._using:
            self._check()
            try:
                yield
                self._check()
            except BaseException:
                self.abort()
                raise

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        """See Transport. At most one message per pair and call; MPI keeps the messages of a pair in order."""
        from mpi4py import MPI

        self._check()
        requests: list[Any] = []
        landed: list[tuple[Tensor, Tensor]] = []
        communicator, tag = self._wire.communicator, self._generation
        try:
            for rank, tensor in receives.items():
                room = self._room("from", rank, tensor)
                landed.append((tensor, room))
                with self._wire.calling:
                    requests.append(communicator.Irecv([room.numpy(), MPI.BYTE], self._ranks[rank], tag))
            for rank, tensor in sends.items():
                room = self._room("to", rank, tensor).copy_(tensor.view(torch.uint8))
                with self._wire.calling:
                    requests.append(communicator.Isend([room.numpy(), MPI.BYTE], self._ranks[rank], tag))
            self._await(lambda: self._test(requests))
        except BaseException as error:
            self.abort()
            self._wire.leave(requests, min(len(receives), len(requests)), self._rooms)
            self._rooms = {}
            if isinstance(error, MPI.Exception):
                raise RingBroken(f"generation {self._generation}: MPI: {error}") from error
            raise
        for tensor, room in landed:
            tensor.copy_(room.view(tensor.dtype))

    def abort(self) -> None:
        """See Transport."""
        with self._ending:
            if self._aborted.is_set():
                return
            self._aborted.set()
        self._wire.end(self._generation)

    def close(self) -> None:
        """See Transport."""
        self.abort()
        with self._using:
            self._rooms = {}

    def _room(self, way: str, rank: int, tensor: Tensor) -> Tensor:
        """Bytes for this tensor on its way to or from this rank, reused by the next exchange."""
        size = tensor.numel() * tensor.itemsize
        held = self._rooms.get((way, rank))
        if held is None or len(held) < size:
            held = self._rooms[way, rank] = torch.empty(size, dtype=torch.uint8)
        return held[:size]

    def _test(self, requests: list[Any]) -> bool:
        from mpi4py import MPI

        with self._wire.calling:
            return bool(MPI.Request.Testall(requests))

    def _check(self) -> None:
        if self._aborted.is_set():
            raise RingBroken(f"the transport of generation {self._generation} was aborted")

    def _await(self, done: Callable[[], bool]) -> None:
        """Wait until done. Raises RingBroken on an abort."""
        pause_s, turns = _PAUSE_MIN_S, 0
        while not done():
            self._check()
            turns += 1
            if turns < _SPINS:
                time.sleep(0)
            else:
                self._aborted.wait(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_MAX_S)


def _has_ended(request: Any) -> bool:
    """Whether the request has ended, well or not: then MPI does not use its memory any more."""
    from mpi4py import MPI

    try:
        return bool(request.Test())
    except MPI.Exception:
        return True
