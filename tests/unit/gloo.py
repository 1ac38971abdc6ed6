"""Transports over gloo: what NCCL does between GPUs, done between the CPUs of one machine by the same code."""

from __future__ import annotations

import os
import socket
import stat
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, ProcessGroupGloo, Store

from runtime.allreduce.ring.process_group import PendingWork

TIMEOUT = timedelta(seconds=8)
"""What begins after a connection has gone may end by this alone, so it must be well below process_group.DRAIN_S."""


class GlooGroup:
    """process_group.Group over gloo, which has no uneven exchange of lists, and whose abort does nothing.

    Its connections are found by their address: each generation has one of its own on the loopback.
    """

    def __init__(self, store: Store, rank: int, world_size: int, generation: int, device: torch.device) -> None:
        self._address = f"127.{64 + generation // 250 % 64}.{generation % 250}.9"
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._timeout = TIMEOUT
        options._devices = [gloo.create_device(hostname=self._address)]
        self._gloo = gloo(store, rank, world_size, options)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], /) -> PendingWork:
        into = torch.cat([torch.empty_like(output) for output in outputs])
        work = self._gloo.alltoall_base(
            into, torch.cat(inputs), [len(output) for output in outputs], [len(each) for each in inputs]
        )
        return _Unpacked(work, into, outputs)

    def allreduce(self, tensors: list[Tensor], options: AllreduceOptions, /) -> PendingWork:
        work: PendingWork = self._gloo.allreduce(tensors, options)
        return work

    def abort(self) -> None:
        """Shut its connections down: whatever waits on one ends."""
        for name in os.listdir("/proc/self/fd"):
            try:
                if stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                    with socket.socket(fileno=os.dup(int(name))) as sock:
                        self._shut_down(sock)
            except OSError:  # it is closed already, or was never connected
                continue

    def _shut_down(self, sock: socket.socket) -> None:
        if sock.family != socket.AF_INET or sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return
        if self._address in (sock.getsockname()[0], sock.getpeername()[0]):
            sock.shutdown(socket.SHUT_RDWR)


class _Unpacked:
    def __init__(self, work: PendingWork, into: Tensor, outputs: list[Tensor]) -> None:
        self._work, self._into, self._outputs = work, into, outputs

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> bool:
        self._work.wait()
        for output, part in zip(self._outputs, self._into.split([len(each) for each in self._outputs]), strict=True):
            output.copy_(part)
        return True
