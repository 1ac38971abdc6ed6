"""Questions to other members of the job while they train: a request, and its answer, with tensors.

They travel over copy connections (runtime/recovery/transfer), which the listener of each worker accepts from members of
its generation only. A connection is kept for further questions, and aborted when its worker is no member any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence

import torch

from elastic.errors import ConfigError
from runtime.allreduce.reduction.partial_sum import Json
from runtime.recovery.transfer.connection import CopyConnection, CopyFailed
from runtime.worker.worker_session import WorkerSession

FLOAT_BYTES = 4


class MemberCalls:
    """Any thread may ask; one question after the other in each channel."""

    def __init__(self, session: WorkerSession) -> None:
        self._session = session
        self._open: dict[tuple[str, str], CopyConnection] = {}
        self._lock = threading.Lock()
        self._members: Collection[str] | None = None

    def answer_with(self, answer: Callable[[CopyConnection, dict[str, Json]], bool]) -> None:
        """Have the questions of others answered. answer: returns whether it has; raises CopyFailed. Threads of the
        listener call it."""
        self._session.answer_others(answer)

    def ask(
        self,
        channel: str,
        worker: str,
        request: dict[str, Json],
        tensors: Sequence[torch.Tensor],
        within_s: float | None = None,
    ) -> tuple[dict[str, Json], list[torch.Tensor]]:
        """The answer of a member. channel: questions of one channel come from one thread at a time. tensors: float32,
        1-D, contiguous, which do not change meanwhile. within_s: seconds for the answer; None: as long as the worker
        is a member. Raises CopyFailed; then the question may have been heard."""
        key = channel, worker
        with self._lock:
            connection = self._open.get(key)
        if connection is None:
            connection = self._session.call(worker)
            with self._lock:
                gone = self._members is not None and worker not in self._members
                if not gone:
                    self._open[key] = connection
            if gone:
                connection.close()
                raise CopyFailed(f"{worker} is no member any more")
        try:
            connection.send(request)
            connection.send({}, [as_bytes(tensor) for tensor in tensors])
            header, blobs = connection.receive(within_s=within_s)
            return header, [as_floats(blob) for blob in blobs]
        except CopyFailed:
            with self._lock:
                if self._open.get(key) is connection:
                    del self._open[key]
            connection.close()
            raise

    def keep(self, members: Collection[str]) -> None:
        """These are the members now: whoever waits for another worker waits no longer."""
        with self._lock:
            self._members = members
            gone = [connection for (_, worker), connection in self._open.items() if worker not in members]
        for connection in gone:
            connection.abort()

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            connections, self._open = list(self._open.values()), {}
        for connection in connections:
            connection.close()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a float32 vector."""
    return tensor.view(torch.uint8)


def as_floats(blob: torch.Tensor) -> torch.Tensor:
    """Raises CopyFailed for bytes that are no float32 vector."""
    if blob.numel() % FLOAT_BYTES:
        raise CopyFailed(f"{blob.numel()} bytes are no vector of float32")
    try:
        return blob.view(torch.float32)
    except RuntimeError:  # its memory does not begin at a multiple of four bytes
        return blob.clone().view(torch.float32)


def received(connection: CopyConnection, sizes: Sequence[int]) -> list[torch.Tensor]:
    """The tensors of a question, of so many elements each. Raises CopyFailed."""
    _, blobs = connection.receive()
    tensors = [as_floats(blob) for blob in blobs]
    if [tensor.numel() for tensor in tensors] != list(sizes):
        raise CopyFailed(f"vectors of {[tensor.numel() for tensor in tensors]} elements came instead of {list(sizes)}")
    return tensors


def calls_of(session: object) -> MemberCalls | None:
    """None: a job of one, which has nobody to ask. Raises ConfigError for a session without connections."""
    if isinstance(session, WorkerSession):
        return MemberCalls(session)
    if getattr(session, "alone", False):
        return None
    raise ConfigError("asynchronous training needs a worker under `elastic run`, or a script that runs alone")
