"""A store whose etcd has members that hang: servers on the loopback interface, which answer as far as a test wants."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from elastic.errors import StoreUnavailable
from elastic.store import etcd_connection
from elastic.store.base import KeyPut, WatchEvent
from elastic.store.etcd import EtcdStore
from elastic.store.etcd_connection import Connections
from elastic.store.etcd_messages import rpc

PATIENCE_S = 60.0
SHORT_S = 0.3
TRIES = 20
"""Two are enough where the next member is connected while the second one waits; a busy machine needs some more."""


Answers = Callable[[str], bool | str]


class Member:
    """answers: whether it answers the question for a key; a text is what etcd says when it waited in vain."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self.asked: list[str] = []
        self.peers: set[str] = set()
        self.slow = threading.Event()
        """The question for the key "slow" is answered then, and watches hear something."""
        self.slow_came = threading.Event()
        self._server = grpc.server(futures.ThreadPoolExecutor(16))
        asks = grpc.unary_unary_rpc_method_handler(
            self._range, rpc.RangeRequest.FromString, rpc.RangeResponse.SerializeToString
        )
        watches = grpc.stream_stream_rpc_method_handler(
            self._watch, rpc.WatchRequest.FromString, rpc.WatchResponse.SerializeToString
        )
        for service, methods in (("KV", {"Range": asks}), ("Watch", {"Watch": watches})):
            handler = grpc.method_handlers_generic_handler(f"etcdserverpb.{service}", methods)
            self._server.add_generic_rpc_handlers((handler,))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self.endpoint = f"127.0.0.1:{self.port}"
        self._server.start()

    def stop(self) -> None:
        self.slow.set()
        self._server.stop(0).wait()

    def _range(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.peers.add(context.peer())
        key = request.key.decode()
        if key == "slow":
            self.slow_came.set()
            self.slow.wait(PATIENCE_S)
            return rpc.RangeResponse()
        self.asked.append(key)
        match self._answers(key):
            case True:
                return rpc.RangeResponse()
            case str(text):
                context.abort(grpc.StatusCode.UNAVAILABLE, text)
        over = threading.Event()
        if context.add_callback(over.set):
            over.wait(PATIENCE_S)
        return rpc.RangeResponse()

    def _watch(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        next(requests)
        yield rpc.WatchResponse(created=True)
        self.slow.wait(PATIENCE_S)
        reply = rpc.WatchResponse()
        reply.events.add().kv.key = b"k"
        yield reply


@pytest.fixture
def member() -> Iterator[Callable[[Answers], Member]]:
    members: list[Member] = []

    def make(answers: Answers) -> Member:
        members.append(Member(answers))
        return members[-1]

    yield make
    for one in members:
        one.stop()


Make = Callable[[Answers], Member]


def tries(store: EtcdStore) -> int:
    """How many it took until somebody answered."""
    for number in range(1, TRIES + 1):
        begun_s = time.monotonic()
        try:
            store.get("k", timeout_s=SHORT_S)
        except StoreUnavailable:
            time.sleep(max(0.0, begun_s + SHORT_S - time.monotonic()))
            continue
        return number
    raise AssertionError(f"nobody answered {TRIES} questions")


@pytest.mark.parametrize("silence", [False, "etcdserver: request timed out"])
def test_another_member_is_asked_when_the_connected_one_does_not_answer(member: Make, silence: bool | str) -> None:
    hangs, healthy = member(lambda _: silence), member(lambda _: True)
    with EtcdStore([hangs.endpoint, healthy.endpoint]) as store:
        assert tries(store) >= 3
        assert tries(store) == 1, "and it stays there"
    assert healthy.asked.count("k") == 2


def test_two_of_three_members_may_hang(member: Make) -> None:
    members = [member(lambda _: False), member(lambda _: False), member(lambda _: True)]
    with EtcdStore([one.endpoint for one in members]) as store:
        tries(store)
    assert members[0].asked and members[1].asked and members[2].asked


def test_a_member_that_answers_between_is_kept(member: Make) -> None:
    """A slow member is none that hangs."""
    slow, other = member(lambda key: key != "late"), member(lambda _: True)
    with EtcdStore([slow.endpoint, other.endpoint]) as store:
        for _ in range(3):
            store.get("k", timeout_s=PATIENCE_S)
            with pytest.raises(StoreUnavailable):
                store.get("late", timeout_s=SHORT_S)
        store.get("k", timeout_s=PATIENCE_S)
    assert (slow.asked.count("k"), other.asked.count("k")) == (4, 0)
    assert len(slow.peers) == 1


def test_calls_and_watches_go_on_over_the_connection_that_they_have(member: Make) -> None:
    hangs, healthy = member(lambda _: False), member(lambda _: True)
    got: list[object] = []
    heard: queue.SimpleQueue[WatchEvent] = queue.SimpleQueue()
    with EtcdStore([hangs.endpoint, healthy.endpoint]) as store:
        store.watch("k", 1, heard.put, timeout_s=PATIENCE_S)
        call = threading.Thread(target=lambda: got.append(store.get("slow", timeout_s=PATIENCE_S)), daemon=True)
        call.start()
        assert hangs.slow_came.wait(PATIENCE_S)
        tries(store)
        hangs.slow.set()
        call.join(PATIENCE_S)
        assert got == [None]
        assert isinstance(heard.get(timeout=PATIENCE_S), KeyPut)


def test_closing_ends_calls_over_a_former_connection(member: Make) -> None:
    hangs, healthy = member(lambda _: False), member(lambda _: True)
    failed: list[StoreUnavailable] = []

    def ask() -> None:
        try:
            store.get("slow", timeout_s=PATIENCE_S)
        except StoreUnavailable as error:
            failed.append(error)

    with EtcdStore([hangs.endpoint, healthy.endpoint]) as store:
        call = threading.Thread(target=ask, daemon=True)
        call.start()
        assert hangs.slow_came.wait(PATIENCE_S)
        tries(store)
    call.join(PATIENCE_S / 4)
    assert failed, "the store was closed"


def test_a_former_connection_is_closed_with_its_last_call(member: Make) -> None:
    hangs, healthy = member(lambda _: False), member(lambda _: True)
    with Forwarder([hangs.port]) as forwarder, EtcdStore([forwarder.endpoint, healthy.endpoint]) as store:
        tries(store)
        assert forwarder.ended.wait(PATIENCE_S)


def test_one_endpoint_that_leads_to_several_members_is_connected_anew(member: Make) -> None:
    hangs, healthy = member(lambda _: False), member(lambda _: True)
    with Forwarder([hangs.port, healthy.port]) as forwarder, EtcdStore([forwarder.endpoint]) as store:
        tries(store)
    assert "k" in healthy.asked


def test_another_member_is_asked_also_while_newer_certificates_are_not_accepted(
    member: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    plainly = etcd_connection.connected
    monkeypatch.setattr(
        etcd_connection, "connected", lambda target, tls, keepalive_s: plainly(target, None, keepalive_s)
    )
    hangs, healthy = member(lambda _: False), member(lambda _: True)
    files: Any = SimpleNamespace(state=lambda: files.now, now=(1,))
    with EtcdStore([hangs.endpoint, healthy.endpoint], tls=files) as store:
        files.now = (2,)
        tries(store)
    assert "k" in healthy.asked


def test_a_closed_store_connects_to_nobody(member: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    connections = Connections([member(lambda _: True).endpoint], None, 6.0)
    client = connections.present()
    connections.close()
    monkeypatch.setattr(etcd_connection, "connected", lambda *_: pytest.fail("a connection that nobody closes"))
    connections.unanswered(client)
    connections.unanswered(client)


class Forwarder:
    """A port whose connections go to each of these ports in turn."""

    def __init__(self, ports: list[int]) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.ended = threading.Event()
        """The client has closed a connection."""
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, args=(ports,), daemon=True).start()

    def __enter__(self) -> Forwarder:
        return self

    def __exit__(self, *_: object) -> None:
        for one in [self._listening, *self._open]:
            one.close()

    def _accept(self, ports: list[int]) -> None:
        for number in range(1000):
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", ports[number % len(ports)]))
            self._open += [client, server]
            threading.Thread(target=self._pass, args=(client, server, self.ended), daemon=True).start()
            threading.Thread(target=self._pass, args=(server, client, threading.Event()), daemon=True).start()

    @staticmethod
    def _pass(source: socket.socket, to: socket.socket, ended: threading.Event) -> None:
        try:
            while data := source.recv(65536):
                to.sendall(data)
        except OSError:
            return
        ended.set()
        to.close()
