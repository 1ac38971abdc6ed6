"""A transport over MPI, for the CPUs of workers that have ranks of one mpirun (elastic/mpirun.py).

Everything is done with sessions (MPI-4.0, section 11), which need no world communicator: a generation's communicator is
made of exactly its members' ranks, whoever else lives, so a loss needs no agreement on who is left. An abort revokes
the communicator (ULFM), which ends its receives. A generation with a member that has no rank has no transport: the mesh
carries its tensors (docs/decisions/mpi.md).

mpi4py is imported when a worker has a rank, and nowhere else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from elastic.errors import BuildFailed, ConfigError, RingBroken
from elastic.journal import Journal
from elastic.ranks import Ranks

READY_S = 300.0
"""How long a worker waits for the others of the start: their scripts may do anything before elastic.join()."""
ALONE_S = 20.0
"""The communicator is made in milliseconds once all members are there; who is not by then has frozen in between."""
_POLL_S = 0.02
_PAUSE_MIN_S = 20e-6
_PAUSE_MAX_S = 1e-3
_SPINS = 100
"""So often other threads and processes get a turn before the first pause: most messages are here by then."""

Communicator: TypeAlias = Any
"""mpi4py.MPI.Intracomm; the package is optional, so its types are too."""

_abandoned: list[tuple[list[Any], object]] = []
"""The requests of exchanges that failed, and their memory: MPI may still touch it."""
_abandoning = threading.Lock()


class World:
    """The ranks of mpirun, as one worker knows them."""

    def __init__(self, ranks: Ranks, worker_id: str, journal: Journal) -> None:
        """With a rank: waits for all others that have one, and joins them; the interpreter stands still meanwhile.

        Raises ConfigError if one of them ended before, or MPI does not work here. If one ends while they join, the
        others wait for ever, and the agent ends them.
        """
        self._ranks = ranks
        self._workers = ranks.workers
        self._me = worker_id
        self._journal = journal
        self._group: Any = None
        if worker_id in self._workers:
            self._await_others()
            self._join()

    def _await_others(self) -> None:
        """Joining cannot be interrupted, so nobody begins before all have come."""
        self._ranks.ready(self._workers.index(self._me)).touch()
        deadline_s = time.monotonic() + READY_S
        while late := [n for n in range(len(self._workers)) if not self._ranks.ready(n).exists()]:
            if ended := [worker for n, worker in enumerate(self._workers) if self._ranks.gone(n).exists()]:
                raise ConfigError(f"MPI cannot start: {', '.join(ended)} ended before all had come to elastic.join()")
            names = ", ".join(self._workers[n] for n in late)
            if time.monotonic() > deadline_s:
                raise ConfigError(f"MPI cannot start: {names} did not call elastic.join() within {READY_S:g} s")
            time.sleep(_POLL_S)

    def _join(self) -> None:
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False  # it waits for all ranks, and some may have died
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise ConfigError(f"mpi4py finds no MPI library: {error}; install the openmpi package beside it") from error
        name, version = MPI.get_vendor()
        if name != "Open MPI" or version < (5, 0, 0):
            raise ConfigError(f"mpi4py uses {name} {version}, and --ring mpi needs Open MPI 5 with ULFM")
        try:
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
            session = MPI.Session.Init(errhandler=MPI.ERRORS_RETURN)
            self._group = session.Create_group("mpi://WORLD")
        except MPI.Exception as error:
            raise ConfigError(f"MPI cannot start: {error}; logs/mpirun.log may say why") from error
        self._session = session
        self._ranks.joined(self._workers.index(self._me)).touch()

    @contextmanager
    def meet(self, generation: int, members: Sequence[str], rank: int) -> Iterator[Meeting]:
        """See transport.Meet."""
        yield Meeting(self, generation, members)

    def objection(self, generation: int, members: Sequence[str]) -> str:
        """Why these members cannot be connected by MPI, or empty."""
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

    def connect(self, generation: int, members: Sequence[str], ended: threading.Event) -> MpiTransport:
        """Once all members, which have ranks, are about to. ended: set by whoever wants it to give
        up, and by this, when there is nothing to wait for any more. Raises BuildFailed."""
        _sweep()
        ranks = [self._workers.index(member) for member in members]
        made: list[Communicator] = []
        failed: list[BaseException] = []

        def make() -> None:
            from mpi4py import MPI

            try:
                group = self._group.Incl(ranks)
                made.append(
                    MPI.Intracomm.Create_from_group(group, f"elastic-{generation}", errhandler=MPI.ERRORS_RETURN)
                )
            except MPI.Exception as error:
                failed.append(error)
            ended.set()

        # It returns only when every member has called it, and nothing can interrupt it.
        threading.Thread(target=make, name=f"mpi-{generation}", daemon=True).start()
        ended.wait(ALONE_S)
        if not made:
            because = str(failed[0]) if failed else f"not all members came within {ALONE_S:g} s"
            raise BuildFailed(f"MPI does not connect generation {generation}: {because}", unreachable=())
        if members[0] == self._me:
            self._journal.write("ring_over_mpi", generation=generation, ranks=ranks)
        return MpiTransport(made[0], generation)


class Meeting:
    """See transport.Meeting. There is nothing to offer: whoever has a rank is known by it."""

    offer = ""

    def __init__(self, world: World, generation: int, members: Sequence[str]) -> None:
        self._world, self._generation, self._members = world, generation, members
        self._ended = threading.Event()
        self.because = ""

    def connect(self, offer: str) -> MpiTransport | None:
        self.because = self._world.objection(self._generation, self._members)
        return None if self.because else self._world.connect(self._generation, self._members, self._ended)

    def abort(self) -> None:
        self._ended.set()


class MpiTransport:
    """Transport (see transport.py) over a communicator whose ranks are the ring's; ours from here on.

    What is sent and received passes through memory of the transport's own. An exchange with a peer that is frozen ends
    neither by an abort nor by a revocation: MPI goes on when the peer thaws, reading what was to be sent and writing
    what was to be received. By then the tensors hold something else, and the peer must not get a result made of that.
    The communicator is never freed, because that would wait for all members.
    """

    def __init__(self, communicator: Communicator, generation: int) -> None:
        self._communicator = communicator
        self._generation = generation
        self._using = threading.Lock()
        self._ending = threading.Lock()
        self._aborted = threading.Event()
        self._rooms: dict[tuple[str, int], Tensor] = {}

    @contextmanager
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
        """See Transport. At most one message a pair and call; MPI keeps those of a pair in order."""
        from mpi4py import MPI

        self._check()
        requests: list[Any] = []
        landed: list[tuple[Tensor, Tensor]] = []
        try:
            for rank, tensor in receives.items():
                room = self._room("from", rank, tensor)
                landed.append((tensor, room))
                requests.append(self._communicator.Irecv([room.numpy(), MPI.BYTE], source=rank))
            for rank, tensor in sends.items():
                room = self._room("to", rank, tensor).copy_(tensor.view(torch.uint8))
                requests.append(self._communicator.Isend([room.numpy(), MPI.BYTE], dest=rank))
            self._await(lambda: MPI.Request.Testall(requests))
        except BaseException as error:
            self.abort()
            with _abandoning:
                _abandoned.append((requests, self._rooms))
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
            self._communicator.Revoke()

    def close(self) -> None:
        """See Transport."""
        self.abort()
        with self._using:
            self._rooms = {}

    def _room(self, way: str, rank: int, tensor: Tensor) -> Tensor:
        """Bytes for this tensor on its way to or from this rank, used again by the next exchange."""
        size = tensor.numel() * tensor.itemsize
        held = self._rooms.get((way, rank))
        if held is None or len(held) < size:
            held = self._rooms[way, rank] = torch.empty(size, dtype=torch.uint8)
        return held[:size]

    def _check(self) -> None:
        if self._aborted.is_set():
            raise RingBroken(f"the transport of generation {self._generation} was aborted")

    def _await(self, done: Callable[[], bool]) -> None:
        """Raises RingBroken on an abort."""
        pause_s, turns = _PAUSE_MIN_S, 0
        while not done():
            self._check()
            turns += 1
            if turns < _SPINS:
                time.sleep(0)
            else:
                self._aborted.wait(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_MAX_S)


def _sweep() -> None:
    """Let go of what MPI has finished with."""
    with _abandoning:
        _abandoned[:] = [row for row in _abandoned if not all([_has_ended(request) for request in row[0]])]


def _has_ended(request: Any) -> bool:
    """Well or not: either way MPI does not touch its memory any more."""
    from mpi4py import MPI

    try:
        return bool(request.Test())
    except MPI.Exception:
        return True
