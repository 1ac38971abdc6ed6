"""A job of one that computes each shard in a process of its own, a copy of this one from when the pass began.

No shard sees what another one left, as if each had a worker to itself. `elastic doctor --exact` uses it: a script whose
bits differ from those of a plain job of one depends on which shards its process has computed before.
"""

from __future__ import annotations

import os
import socket
import sys
import warnings

import torch

from elastic.errors import ConfigError
from runtime.allreduce.reduction.partial_sum import Partial
from runtime.data.shared_memory import receive, send
from runtime.script_end import exit_now
from runtime.session import OpKind
from runtime.worker.single import SingleSession


class IsolatedSession(SingleSession):
    """Session (see runtime/session.py). Parts of an evaluation have processes of their own too."""

    def __init__(self) -> None:
        super().__init__()
        self._parent: socket.socket | None = None
        """In a shard's process: the socket to which its leaf goes."""

    def next_unit(self) -> int | None:
        if self._op is None or self._op.kind not in (OpKind.PASS, OpKind.EVALUATE):
            return super().next_unit()
        while (unit := super().next_unit()) is not None:
            if torch.cuda.is_initialized():
                raise ConfigError(
                    "a process that uses CUDA cannot be copied; examine the script on the CPU: CUDA_VISIBLE_DEVICES="
                )
            sys.stdout.flush()
            sys.stderr.flush()
            ours, theirs = socket.socketpair()
            with warnings.catch_warnings():
                # Python warns that threads do not survive a fork; the script's body does not run in them.
                warnings.simplefilter("ignore", DeprecationWarning)
                child = os.fork()
            if child == 0:
                ours.close()
                self._parent = theirs
                return unit
            theirs.close()
            with ours:
                super().unit_done(_received(ours, child))
        return None

    def unit_done(self, leaf: Partial) -> None:
        if self._parent is None:
            super().unit_done(leaf)
            return
        leaf.settle()  # so that only its own values are sent
        send(self._parent, leaf)
        exit_now(0)


def _received(ours: socket.socket, child: int) -> Partial:
    """The leaf of that process. If it failed, its traceback is on stderr already, and this process ends alike."""
    try:
        leaf = receive(ours)
    except EOFError:
        exit_now(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) or 1)
    os.waitpid(child, 0)
    assert isinstance(leaf, Partial)
    return leaf
