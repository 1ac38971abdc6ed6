"""A process that fetches batches for this one: it is asked over its own socket, answers in order, shares no lock.

The processes of torch's DataLoader share locks and queues with the process that made them: if such a process is killed
(out of memory) while it holds a lock, the others wait for that lock for ever. Here the end of a process is an end of
file on its own socket, whatever it was doing.
"""

from __future__ import annotations

import contextlib
import multiprocessing.context
import multiprocessing.popen_fork
import pickle
import select
import signal
import socket
import struct
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from elastic.agent.worker import held_signals
from elastic.process import stop_signals
from runtime.data.shared_memory import receive, send
from runtime.script_end import RAISED_AT, raised_at

END_S = 10.0
"""Seconds until a killed process is gone. Only a process that the kernel holds up, in a file system, takes longer."""

_REQUEST = struct.Struct("<QQQ")

Key = tuple[int, int, int]
"""(epoch, step, shard)."""


@dataclass(frozen=True, slots=True)
class FetchOutcome:
    """The result of a fetch: a value, or what the fetch raised."""

    value: Any = None
    error: BaseException | None = None

    def get(self) -> Any:
        """The value. Raises what the fetch raised."""
        if self.error is not None:
            raise self.error
        return self.value


class FetcherEnded(Exception):
    """The fetching process is gone. The message says how it ended."""


class Fetcher:
    """One fetching process. asked: what it was asked for and has not answered yet, in order."""

    def __init__(self, fetch: Callable[[int, int, int], Any], others: Iterable[Fetcher]) -> None:
        """fetch(epoch, step, shard) runs in the process. others: the fetchers that live already. The new process closes
        their inherited sockets, because they see the end of this process only when no copy of its ends is open."""
        self.asked: deque[Any] = deque()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        inherited = [other._socket for other in others] + [self._socket]
        holds = held_signals.holding()
        words = (fetch, theirs, inherited, torch.get_num_threads(), holds)
        self._process = _Process(target=_serve, args=words, daemon=True)
        starting = stop_signals.blocked() if holds else contextlib.nullcontext()
        with warnings.catch_warnings(), starting:
            # Python warns that threads do not survive a fork. The child runs the dataset, as in a DataLoader, and
            # starts it in a thread of its own (see _serve).
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        theirs.close()

    def ask(self, key: Key, label: Any) -> None:
        """Ask for a batch. label: replaces the key in `asked` and `take`. Raises FetcherEnded."""
        try:
            self._socket.send(_REQUEST.pack(*key))
        except OSError as error:
            raise self._ended() from error
        self.asked.append(label)

    def ready(self) -> bool:
        """Whether `take` would not wait."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def take(self) -> tuple[Any, FetchOutcome]:
        """The first of `asked`, with its outcome; waits for it. Raises FetcherEnded, and OSError (too many open
        files)."""
        label = self.asked.popleft()
        try:
            return label, receive(self._socket)
        except (EOFError, ConnectionError) as error:
            raise self._ended() from error

    def end(self) -> None:
        """Kill the process and wait until it is gone."""
        self._socket.close()
        self._process.kill()
        self._process.join(END_S)

    def _ended(self) -> FetcherEnded:
        self._process.join(END_S)
        code = self._process.exitcode
        if code is not None and code < 0:
            return FetcherEnded(f"process {self._process.pid} was killed by {signal.Signals(-code).name}")
        return FetcherEnded(f"process {self._process.pid} ended with exit code {code}")


class _Popen(multiprocessing.popen_fork.Popen):
    """`terminate` kills the process: the interpreter calls it for its children when it ends, and waits for them."""

    def terminate(self) -> None:
        self.kill()


class _Process(multiprocessing.context.ForkProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> _Popen:
        return _Popen(process_obj)


def _serve(
    fetch: Callable[[int, int, int], Any],
    requests: socket.socket,
    inherited: list[socket.socket],
    threads: int,
    holds: bool,
) -> None:
    """The main function of the process; it ends when its socket is closed. holds: the parent holds signals back."""
    for other in inherited:
        other.close()
    signal.set_wakeup_fd(-1)
    for number in stop_signals.HELD:
        signal.signal(number, signal.SIG_DFL)  # the script's handlers belong to the parent
    if holds:
        held_signals.hold()
    else:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the parent too, which ends this process
    # In a new thread: OpenMP's threads did not survive the fork, but the thread that forked still relies on them.
    serving = threading.Thread(target=_answer_all, args=(fetch, requests, threads))
    serving.start()
    serving.join()


def _answer_all(fetch: Callable[[int, int, int], Any], requests: socket.socket, threads: int) -> None:
    torch.set_num_threads(threads)  # as in the parent, because their number decides bits
    with contextlib.suppress(ConnectionError):
        while request := requests.recv(_REQUEST.size):
            _answer(fetch, requests, *_REQUEST.unpack(request))


def _answer(fetch: Callable[[int, int, int], Any], asker: socket.socket, epoch: int, step: int, shard: int) -> None:
    """Send the outcome of that fetch; it is an error if the batch cannot be sent. Raises ConnectionError."""
    try:
        outcome = FetchOutcome(fetch(epoch, step, shard))
    except Exception as error:
        outcome = FetchOutcome(error=_sendable(error))
    try:
        send(asker, outcome)
    except ConnectionError:
        raise
    except Exception as error:
        send(asker, FetchOutcome(error=_sendable(error)))


def _sendable(error: Exception) -> Exception:
    """The error with its traceback as a note, or an equivalent RuntimeError if it cannot be pickled."""
    error.__dict__[RAISED_AT] = raised_at(error)
    error.add_note(f"In a process that fetches batches:\n{traceback.format_exc()}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        other = RuntimeError(f"{type(error).__name__}: {error}")
        other.add_note("\n".join(error.__notes__))
        other.__dict__[RAISED_AT] = raised_at(error)
        return other
    return error
