"""A worker's stream to its agent.

`AgentClient` is in the training process: one stream on the agent's unix socket, served by daemon threads, so that the
training loop never waits. Words are sent in order; of consecutive Progress words only the newest is queued. Step
records follow the words and are kept until the agent acknowledges them.

There is no keepalive on this stream: the socket closes with the agent's process, and a worker need not stop because its
agent is frozen or slow. For the same reason the stream survives a freeze of this worker.
"""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

# gRPC's fork handlers would log in every forked DataLoader worker. grpc reads the variable when it is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")

import grpc

from elastic.agent.worker.step_spool import StepSpool, spill_path
from elastic.errors import ElasticError
from elastic.protocol.messages import Finished, Order, Progress, Word
from elastic.rendezvous.operator_client import CHANNEL_OPTIONS, said_by
from elastic.wire import codec
from elastic.wire import elastic_pb2 as pb
from elastic.wire.services import AgentStub

CONNECT_S = 10.0
"""Seconds within which the agent, which started this process, has to answer on its socket."""

CLOSE_S = 5.0
"""Seconds for which close() waits for the agent to take the last words."""


class AgentUnreachable(ElasticError):
    """Exit: the agent that started this process no longer answers on its socket."""


class AgentClient:
    """The worker's end of the stream."""

    def __init__(self, socket_path: str, *, job: str, worker_id: str, job_dir: Path) -> None:
        self._backlog = StepSpool(spill_path(job_dir, worker_id))
        self._changed = threading.Condition()
        self._words: deque[Word] = deque()
        self._closing = False
        self._ended = threading.Event()
        self._address = f"unix:{socket_path}"
        self._hello = pb.WorkerHello(job=job, worker_id=worker_id, pid=os.getpid())
        self._channel = grpc.insecure_channel(self._address, options=CHANNEL_OPTIONS)

    def connect(self, deliver: Callable[[Order], None], on_lost: Callable[[str], None]) -> None:
        """Send what is queued, and hear orders.

        deliver: called on the reader's thread with every order, in order; it must not block. on_lost: called once, from
        the same thread, when the stream ends before close(); nothing arrives after it. Raises AgentUnreachable if the
        agent does not answer within CONNECT_S.
        """
        self._deliver = deliver
        self._on_lost = on_lost
        try:
            grpc.channel_ready_future(self._channel).result(CONNECT_S)
        except grpc.FutureTimeoutError:
            self._channel.close()
            because = f"no agent answers on {self._address.removeprefix('unix:')} within {CONNECT_S:.0f} s"
            raise AgentUnreachable(because) from None
        self._stream = AgentStub(self._channel).Serve(self._outgoing())
        self._reader = threading.Thread(target=self._read, name="agent-client", daemon=True)
        self._reader.start()

    def send(self, word: Word) -> None:
        """Queue a word; never waits. Words after close() or a lost stream are dropped."""
        with self._changed:
            if self._closing or self._ended.is_set():
                return
            if isinstance(word, Progress) and self._words and isinstance(self._words[-1], Progress):
                self._words.pop()
            self._words.append(word)
            self._changed.notify()

    def record(self, line: dict[str, object]) -> None:
        """Queue one line for steps.jsonl; never waits for the agent. The line is kept until it is on file."""
        self._backlog.add(json.dumps(line, separators=(",", ":")))
        with self._changed:
            self._changed.notify()

    def close(self) -> None:
        """Send what is queued and say goodbye; waits at most CLOSE_S for the agent to have taken it.

        Records that were not acknowledged by then are left in a file for the agent. May be called again.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        if threading.current_thread() is not self._reader:
            self._ended.wait(CLOSE_S)
        self._channel.close()
        self._backlog.close()

    def _outgoing(self) -> Iterator[pb.WorkerWord]:
        yield pb.WorkerWord(hello=self._hello)
        while True:
            with self._changed:
                self._changed.wait_for(self._has_something)
                # Steps go before Finished, so that a reader of the job's result finds them on file.
                last = bool(self._words) and isinstance(self._words[0], Finished) and self._backlog.has_next
                word = self._words.popleft() if self._words and not last else None
            if word is not None:
                yield pb.WorkerWord(word=codec.word_to_wire(word))
            elif (record := self._backlog.take()) is not None:
                yield pb.WorkerWord(record=pb.StepRecord(number=record[0], line=record[1]))
            elif self._ended.is_set():
                return
            elif self._closing:
                yield pb.WorkerWord(goodbye=pb.Goodbye())
                return

    def _has_something(self) -> bool:
        return bool(self._words or self._closing or self._ended.is_set() or self._backlog.has_next)

    def _read(self) -> None:
        because = self._read_stream()
        with self._changed:
            self._ended.set()
            closing = self._closing
            self._changed.notify()
        if not closing:
            self._on_lost(because)

    def _read_stream(self) -> str:
        """Read the stream until it ends. Returns why it ended."""
        try:
            for message in self._stream:
                if message.WhichOneof("content") == "kept":
                    self._acknowledged(message.kept.up_to)
                else:
                    self._deliver(codec.order_from_wire(message.order))
        except grpc.RpcError as error:
            return f"the stream to the agent broke: {said_by(error)}"
        except codec.WireError as error:
            self._stream.cancel()
            return f"the agent does not speak this protocol: {error}"
        return "the agent ended the stream"

    def _acknowledged(self, up_to: int) -> None:
        self._backlog.acknowledged(up_to)
        with self._changed:
            self._changed.notify()
