"""A transport over a private process group of torch.distributed, without any global initialisation.

nccl.py makes the groups. This module only needs a group that exchanges a tensor between all members and can be aborted.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, PrefixStore, ReduceOp, Store, TCPStore

from elastic.agent.worker.nccl_environment import connect_s
from elastic.errors import BuildFailed, DeviceHung, RingBroken
from runtime.allreduce.ring.transport import Meet, Meeting, Transport
from runtime.script_end import TorchThread

QUEUED_MAX = 64
"""Exchanges that a GPU may be behind the host; a full queue would block a thread that no abort can reach."""
DRAIN_S = 30.0
"""Seconds after an abort until the tensors are free; after that the device hangs."""
_PAUSE_MIN_S = 20e-6
_PAUSE_MAX_S = 1e-3


class PendingWork(Protocol):
    """The interface of torch.distributed.Work."""

    def is_completed(self) -> bool: ...
    def wait(self) -> bool: ...


class TransportGroup(Protocol):
    """The used part of a torch.distributed.ProcessGroup's backend."""

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], /) -> PendingWork:
        """Send inputs[r] to rank r, and receive outputs[r] from rank r, for every r, this rank too. All are bytes. An
        empty tensor moves nothing, but torch calls NCCL for it, too."""

    def allreduce(self, tensors: list[Tensor], options: AllreduceOptions, /) -> PendingWork:
        """Replace the one tensor by the sum, or the maximum, of all members'."""

    def abort(self) -> None:
        """Make all work of the group end soon. Any thread; may take long."""


def store_on(host: str) -> TCPStore:
    """A store that listens at this address of the machine, on a port that was free. Raises OSError and RuntimeError."""
    # If the server chose a port itself, it would listen on every address of the machine.
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    with socket.create_server((host, 0), family=family) as listening:
        port = listening.getsockname()[1]
        return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


MakeGroup = Callable[[Store, int, int, int, torch.device], TransportGroup]
"""Makes the group from (store, rank, world size, generation, device), on all members at once. Raises RuntimeError."""


def meeting(make: MakeGroup, host: str, device: torch.device, *, sums: bool = False) -> Meet:
    """Meetings at a store that rank 0 opens on this address of its machine, and that lives as long as the meeting.
    sums: whether the transports are going to add up."""

    @contextmanager
    def meet(generation: int, members: Sequence[str], rank: int) -> Iterator[Meeting]:
        place = _Place(make, generation, rank, len(members), device, sums)
        if rank == 0:
            try:
                place.open(host)
            except (OSError, RuntimeError) as error:
                raise BuildFailed(f"generation {generation}: no store on {host}: {error}") from error
        try:
            yield place
        finally:
            place.server = None

    return meet


@dataclass(slots=True)
class _Place:
    """A transport.Meeting at a store."""

    make: MakeGroup
    generation: int
    rank: int
    world_size: int
    device: torch.device
    sums: bool
    offer: str = ""
    because: str = ""
    server: TCPStore | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    greeting: ProcessGroupTransport | None = None

    def open(self, host: str) -> None:
        self.server = store_on(host)
        self.offer = f"{host} {self.server.port}"

    def connect(self, offer: str) -> Transport:
        try:
            if self.device.type == "cuda":
                _check_device(self.device)
            host, port = offer.split()
            within = timedelta(seconds=connect_s(self.world_size))
            store = TCPStore(host, int(port), timeout=within, wait_for_workers=False)
            group = self.make(
                PrefixStore(f"{self.generation}", store), self.rank, self.world_size, self.generation, self.device
            )
            transport = ProcessGroupTransport(group, self.generation, self.rank, self.world_size, self.device)
        except (RuntimeError, ValueError) as error:
            raise BuildFailed(f"generation {self.generation}: {error}") from error
        self.greeting = transport
        if self.ended.is_set():
            transport.abort()
        try:
            transport.greet(self.sums)
        except (RingBroken, RuntimeError) as error:
            transport.close()
            within_s = connect_s(self.world_size)
            raise BuildFailed(f"{error}; not all members were connected within {within_s:g} s") from error
        return transport

    def abort(self) -> None:
        """See transport.Meeting. A member that still waits for the store is freed when rank 0 has left the meeting, and
        the server with it; after connect_s if rank 0 is frozen."""
        self.ended.set()
        if self.greeting is not None:
            self.greeting.abort()


@cache
def _stream_on(device: torch.device, what: Literal["greetings", "reductions"]) -> torch.cuda.Stream:
    """One stream for all generations: torch keeps the memory that was used on a stream for that stream alone. But two
    generations meet where one greets while the other trains, and on one stream members could then wait for each other:
    one has the greeting first, another one the exchange."""
    return torch.cuda.Stream(device)


def _check_device(device: torch.device) -> None:
    """Raise DeviceHung unless a kernel that is launched now ends soon. An abort may hurt devices: its own, and those of
    the machine's other members, whose memory it has used."""
    stream = _stream_on(device, "greetings")
    with torch.cuda.device(device), torch.cuda.stream(stream), _hung_if_it_fails(device):
        torch.ones(1, device=device)
    _await_rest(device, stream.query, time.monotonic() + DRAIN_S)


def _await_rest(device: torch.device, at_rest: Callable[[], bool], end_s: float) -> None:
    """Wait for what the device does. Raises DeviceHung at end_s, and if the device reports an error."""
    while True:
        with _hung_if_it_fails(device):
            if at_rest():
                return
        if time.monotonic() > end_s:
            raise DeviceHung(f"{device} still runs an exchange {DRAIN_S:g} s after it was aborted")
        time.sleep(_PAUSE_MAX_S)


@contextmanager
def _hung_if_it_fails(device: torch.device) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise DeviceHung(f"{device}: {error}") from error


class ProcessGroupTransport:
    """Transport (see transport.py). device: the device of its tensors."""

    adds = True

    def __init__(
        self, group: TransportGroup, generation: int, rank: int, world_size: int, device: torch.device
    ) -> None:
        self._group: TransportGroup | None = group
        self._generation = generation
        self._rank = rank
        self._world_size = world_size
        self._device = device
        self._stream = _stream_on(device, "greetings") if device.type == "cuda" else None
        self._using = threading.Lock()
        self._ending = threading.Lock()
        self._aborted = threading.Event()
        self._aborting: threading.Thread | None = None
        self._last: PendingWork | None = None
        self._queued = 0

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """See Transport. On a GPU all work is on a stream of its own, for which the host waits at the end."""
        with self._using:
            self._check()
            try:
                if self._stream is None:
                    yield
                else:
                    with torch.cuda.device(self._device):
                        self._stream.wait_stream(torch.cuda.current_stream(self._device))
                        with torch.cuda.stream(self._stream):
                            yield
                        self._await(self._stream.query)
                self._check()
            except BaseException:
                self.abort()
                self._drain()
                raise
            finally:
                self._last = None

    def greet(self, sums: bool) -> None:
        """Exchange a byte with every member, and with `sums` add up a number, so that all connections are made now:
        later nobody has as much time for them. Raises RingBroken."""
        timer = threading.Timer(connect_s(self._world_size), self.abort)
        timer.daemon = True  # a process that ends does not wait for the timer
        timer.start()
        try:
            with self.attempt():
                others = [rank for rank in range(self._world_size) if rank != self._rank]
                byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
                self.exchange(dict.fromkeys(others, byte), {rank: torch.empty_like(byte) for rank in others})
                if sums:
                    self.add_up([torch.zeros(1, dtype=torch.int32, device=self._device)])
        finally:
            timer.cancel()
        if self._stream is not None:
            self._stream = _stream_on(self._device, "reductions")

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        """See Transport."""
        self._check()
        assert self._group is not None
        nothing = torch.empty(0, dtype=torch.uint8, device=self._device)
        outputs, inputs = [nothing] * self._world_size, [nothing] * self._world_size
        # As bytes, because in one exchange the pieces of two members may be of different groups.
        for rank, tensor in receives.items():
            outputs[rank] = tensor.view(torch.uint8)
        for rank, tensor in sends.items():
            inputs[rank] = tensor.view(torch.uint8)
        group = self._group
        self._finish(lambda: group.alltoall(outputs, inputs))

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """See Transport: the group's own allreduce, which chooses its way by itself."""
        self._check()
        assert self._group is not None
        group = self._group
        for tensor in tensors:
            options = AllreduceOptions()
            options.reduceOp = ReduceOp(ReduceOp.MAX if tensor.dtype is torch.int16 else ReduceOp.SUM)
            # Neither NCCL nor gloo knows int16.
            values = tensor.to(torch.int32) if tensor.dtype is torch.int16 else tensor
            self._finish(partial(group.allreduce, [values], options))
            if values is not tensor:
                tensor.copy_(values)

    def _finish(self, start: Callable[[], PendingWork]) -> None:
        """Start work and wait until it is done, or, on a GPU, until the stream waits for it. Raises RingBroken."""
        try:
            work = self._last = start()
            if self._stream is None:
                self._await(work.is_completed)
            work.wait()  # on a GPU the stream waits, not the host
            self._queued += 1
            if self._stream is not None and self._queued % QUEUED_MAX == 0:
                self._await(self._stream.query)
        except torch.OutOfMemoryError:
            raise  # another generation would not help
        except RuntimeError as error:
            raise RingBroken(f"generation {self._generation}: {error}") from error

    def abort(self) -> None:
        """See Transport. A thread aborts the group itself, because that may wait for the device."""
        with self._ending:
            if self._aborted.is_set() or self._group is None:
                return
            self._aborted.set()
            self._aborting = TorchThread(target=self._group.abort, name="transport-abort")
            self._aborting.start()

    def close(self) -> None:
        """See Transport."""
        self.abort()
        if self._aborting is not None:
            self._aborting.join()
        with self._using:
            self._group = None

    def _check(self) -> None:
        if self._aborted.is_set():
            raise RingBroken(f"the transport of generation {self._generation} was aborted")

    def _await(self, done: Callable[[], bool]) -> None:
        """Wait until done. Raises RingBroken on an abort."""
        pause_s = _PAUSE_MIN_S
        while not done():
            self._check()
            self._aborted.wait(pause_s)
            pause_s = min(1.1 * pause_s, _PAUSE_MAX_S)  # so it is late by a tenth of the time at most

    def _drain(self) -> None:
        """Wait until nothing reads or writes the tensors of the broken attempt.

        Raises DeviceHung after DRAIN_S: then this process cannot go on.
        """
        end_s = time.monotonic() + DRAIN_S
        at_rest = self._stream.query if self._stream is not None else self._last.is_completed if self._last else None
        if at_rest is not None:
            _await_rest(self._device, at_rest, end_s)
        if (aborting := self._aborting) is not None:  # NCCL has a stream of its own, for which ours may not wait yet
            _await_rest(self._device, lambda: not aborting.is_alive(), end_s)
