"""A transport over a process group of torch.distributed that nobody else has: no global initialisation is touched.

nccl.py makes the groups. What is here needs of one only that all members exchange a tensor each, and that it can be
aborted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from elastic.errors import RingBroken

DRAIN_S = 30.0
"""After an abort the tensors are let go by then, or the device hangs."""
_PAUSE_MIN_S = 20e-6
_PAUSE_MAX_S = 1e-3


class Work(Protocol):
    """As torch.distributed.Work."""

    def is_completed(self) -> bool: ...
    def wait(self) -> bool: ...


class Group(Protocol):
    """What is used of a torch.distributed.ProcessGroup's backend."""

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], /) -> Work:
        """Tensor r of the inputs to rank r, tensor r of the outputs from rank r. All are bytes; empty ones do not
        travel."""
        ...

    def abort(self) -> None:
        """Make all work of the group end soon. Any thread; may take long."""
        ...


class ProcessGroupTransport:
    """Transport (see transport.py). device: where its tensors are."""

    def __init__(self, group: Group, generation: int, rank: int, world_size: int, device: torch.device) -> None:
        self._group: Group | None = group
        self._generation = generation
        self._rank = rank
        self._world_size = world_size
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._using = threading.Lock()
        self._ending = threading.Lock()
        self._aborted = threading.Event()
        self._aborting: threading.Thread | None = None
        self._last: Work | None = None

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """See Transport. On a GPU everything is done by a stream of its own, for which the host waits at the end."""
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
        try:
            work = self._last = self._group.alltoall(outputs, inputs)
            if self._stream is None:
                self._await(work.is_completed)
            work.wait()  # on a GPU the stream waits, not the host
        except RuntimeError as error:
            raise RingBroken(f"generation {self._generation}: {error}") from error

    def abort(self) -> None:
        """See Transport. The group itself is aborted by a thread: that may wait for the device."""
        with self._ending:
            if self._aborted.is_set() or self._group is None:
                return
            self._aborted.set()
            self._aborting = threading.Thread(target=self._group.abort, name="transport-abort", daemon=True)
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
        """Raises RingBroken on an abort."""
        pause_s = _PAUSE_MIN_S
        while not done():
            self._check()
            self._aborted.wait(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    def _drain(self) -> None:
        """Wait until nothing reads or writes the tensors of the broken attempt.

        Raises RuntimeError if that does not come about: then this process cannot go on.
        """
        done = self._stream.query if self._stream is not None else self._last.is_completed if self._last else None
        end_s = time.monotonic() + DRAIN_S
        while done is not None and not done():
            if time.monotonic() > end_s:
                raise RuntimeError(f"{self._device} still runs an exchange {DRAIN_S:g} s after it was aborted")
            time.sleep(_PAUSE_MAX_S)
