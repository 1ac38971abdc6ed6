"""A worker's stream to its agent: in which order words go, and that orders wait for a worker which stands still."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from elastic.agent.worker.client import AgentClient
from elastic.agent.worker_socket import WorkerLink
from elastic.protocol.messages import Finished, Progress
from elastic.rendezvous.served_stream import OUTBOX_LIMIT
from elastic.wire import codec
from elastic.wire import elastic_pb2 as pb
from elastic.wire.services import add_to_server

WAIT_S = 60.0


class Agent:
    """Keeps every record at once, and what it hears."""

    def __init__(self) -> None:
        self.heard: queue.SimpleQueue[str] = queue.SimpleQueue()

    def Serve(self, words: Iterator[pb.WorkerWord], context: Any) -> Iterator[pb.AgentOrder]:
        for word in words:
            match word.WhichOneof("content"):
                case "record":
                    self.heard.put(word.record.line)
                    yield pb.AgentOrder(kept=pb.RecordsKept(up_to=word.record.number))
                case "word":
                    self.heard.put(type(codec.word_from_wire(word.word)).__name__)


def test_a_worker_says_that_it_has_finished_behind_its_last_steps(tmp_path: Path) -> None:
    agent = Agent()
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        add_to_server("Agent", agent, server)
        server.add_insecure_port(f"unix:{tmp_path}/a.sock")
        server.start()
        client = AgentClient(f"{tmp_path}/a.sock", job="job", worker_id="a.0.0", job_dir=tmp_path)
        client.record({"step": 1})
        client.send(Progress("a.0.0", 1, 2, 2))
        client.record({"step": 2})
        client.send(Finished("a.0.0", 1, "digest"))
        client.connect(lambda order: None, lambda because: None)
        heard = [agent.heard.get(timeout=WAIT_S) for _ in range(4)]
        client.close()
        server.stop(grace=None)
    assert heard == ["Progress", '{"step":1}', '{"step":2}', "Finished"]


def test_a_worker_that_stands_still_is_not_cut_off_however_many_orders_wait() -> None:
    link = WorkerLink("a.0.0")
    for _ in range(2 * OUTBOX_LIMIT):
        link.post(pb.AgentOrder())
    assert not link.ended.is_set() and link.outbox.qsize() == 2 * OUTBOX_LIMIT
