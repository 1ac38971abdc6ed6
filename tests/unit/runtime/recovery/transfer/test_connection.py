"""Messages with tensors over a copy connection, and what is refused."""

from __future__ import annotations

import json
import socket
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from runtime.allreduce.reduction.entries import MAX_HEADER_BYTES
from runtime.allreduce.reduction.partial_sum import Json
from runtime.allreduce.ring import listener
from runtime.allreduce.ring.handshake import Hello
from runtime.allreduce.ring.listener import Listener
from runtime.allreduce.ring.ring import Peer
from runtime.recovery.transfer import connection as copy
from runtime.recovery.transfer.connection import CopyConnection, CopyFailed, open_copy
from tests.unit.rings import GENEROUS_S, JOB, TOKEN, in_thread, wait_until

Serve = Callable[[CopyConnection, Hello], None]


@contextmanager
def door(serve: Serve) -> Iterator[Listener]:
    opened = Listener(
        "127.0.0.1",
        job=JOB,
        me="donor",
        token_of=lambda generation: TOKEN if generation == 3 else None,
        serve_copy=lambda sock, hello: serve(CopyConnection(sock), hello),
    )
    try:
        yield opened
    finally:
        opened.close()


def call(opened: Listener, *, generation: int = 3, token: str = TOKEN, to: str = "donor") -> CopyConnection:
    peer = Peer(to, *opened.address)
    return open_copy(peer, job=JOB, generation=generation, me="asker", plan="plan", token=token, deadline_s=GENEROUS_S)


@contextmanager
def pair() -> Iterator[tuple[CopyConnection, CopyConnection]]:
    left, right = socket.socketpair()
    connections = CopyConnection(left), CopyConnection(right)
    try:
        yield connections
    finally:
        for connection in connections:
            connection.close()


@contextmanager
def raw_pair() -> Iterator[tuple[socket.socket, CopyConnection]]:
    left, right = socket.socketpair()
    connection = CopyConnection(right)
    with left:
        yield left, connection
    connection.close()


def blobs(*sizes: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in sizes]


def message(head: object, total: int, body: bytes = b"") -> bytes:
    encoded = json.dumps(head).encode()
    return struct.pack(">4sIQ", b"ERC1", len(encoded), total) + encoded + body


def test_a_request_and_its_answer_with_tensors() -> None:
    state = blobs(0, 1, 3_000_001)

    def serve(connection: CopyConnection, hello: Hello) -> None:
        request, _ = connection.receive()
        connection.send({"for": hello.worker_id, "want": request["want"]}, state)

    with door(serve) as opened:
        connection = call(opened)
        connection.send({"want": "state"})
        header, received = connection.receive()
        connection.close()
    assert header == {"for": "asker", "want": "state"}
    assert all(got.equal(sent) for got, sent in zip(received, state, strict=True))


def test_tensors_are_received_into_given_memory() -> None:
    memory = torch.zeros(10, dtype=torch.uint8)

    def into(header: dict[str, Json], sizes: list[int]) -> list[Tensor]:
        assert header == {"n": 2} and sizes == [4, 6]
        return [memory[:4], memory[4:]]

    sent = blobs(4, 6)
    with pair() as (left, right):
        left.send({"n": 2}, sent)
        _, received = right.receive(into)
    assert memory.equal(torch.cat(sent))
    assert received[1].data_ptr() == memory[4:].data_ptr()


def test_a_flipped_bit_is_found() -> None:
    content = bytearray(b"0123456789")
    checksum = struct.pack(">I", zlib.crc32(content))
    content[4] ^= 1
    with raw_pair() as (left, connection):
        left.sendall(message({"header": {}, "sizes": [10]}, 10, bytes(content) + checksum))
        with pytest.raises(CopyFailed, match="blob 0 of 10 bytes"):
            connection.receive()


@pytest.mark.parametrize(
    "head",
    [
        {"header": {}, "sizes": [1 << 40]},
        {"header": {}, "sizes": [11, -1]},
        {"header": {}, "sizes": [True] * 10},
        {"header": {}, "sizes": [10.0]},
        {"header": {}, "sizes": "ten"},
        {"header": [], "sizes": [10]},
        {"sizes": [10]},
        [],
    ],
)
def test_sizes_that_do_not_add_up_are_refused_before_memory_is_taken(head: object) -> None:
    def into(header: dict[str, Json], sizes: list[int]) -> list[Tensor]:
        raise AssertionError("asked for memory")

    with raw_pair() as (left, connection):
        left.sendall(message(head, 10))
        with pytest.raises(CopyFailed):
            connection.receive(into)


@pytest.mark.parametrize(
    "prefix",
    [
        struct.pack(">4sIQ", b"HTTP", 10, 0),
        struct.pack(">4sIQ", b"ERC1", copy.MAX_HEAD_BYTES + 1, 0),
        struct.pack(">4sIQ", b"ERC1", 10, copy.MAX_TOTAL_BYTES + 1),
    ],
    ids=["magic", "head", "total"],
)
def test_an_announcement_out_of_bounds_is_refused(prefix: bytes) -> None:
    with raw_pair() as (left, connection):
        left.sendall(prefix)
        with pytest.raises(CopyFailed, match="protocol"):
            connection.receive()


def test_memory_of_another_size_is_a_mistake_of_the_caller() -> None:
    with pair() as (left, right):
        left.send({}, blobs(5))
        with pytest.raises(ValueError, match="destinations"):
            right.receive(lambda header, sizes: blobs(4))


@pytest.mark.parametrize("blob", [torch.zeros(4), torch.zeros(2, 2, dtype=torch.uint8), blobs(8)[0][::2]])
def test_only_flat_bytes_are_sent(blob: Tensor) -> None:
    with pair() as (left, _), pytest.raises(ValueError, match="uint8"):
        left.send({}, [blob])


def test_a_newcomer_can_be_told_a_shared_value_as_large_as_members_exchange() -> None:
    told: dict[str, Json] = {"shared": {"files": "x" * (MAX_HEADER_BYTES - 100)}}
    with pair() as (left, right):
        sending = in_thread(lambda: left.send(told))
        assert right.receive()[0] == told
        sending.result(GENEROUS_S)


def test_a_header_out_of_bounds_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy, "MAX_HEAD_BYTES", 100)
    with pair() as (left, _), pytest.raises(ValueError, match="header"):
        left.send({"long": "x" * 100})


def test_abort_frees_a_receiver_and_a_sender() -> None:
    """The other side neither reads nor writes, as a frozen process."""
    with pair() as (left, _):
        receiving = in_thread(left.receive)
        wait_until(left._using.locked)
        left.abort()
        left.abort()
        with pytest.raises(CopyFailed):
            receiving.result(GENEROUS_S)
    with pair() as (left, _):
        sending = in_thread(lambda: left.send({}, blobs(8_000_000)))
        wait_until(left._using.locked)
        left.close()
        with pytest.raises(CopyFailed):
            sending.result(GENEROUS_S)


def test_a_side_that_goes_away_fails_the_other_in_the_middle() -> None:
    with raw_pair() as (left, connection):
        left.sendall(message({"header": {}, "sizes": [10]}, 10, b"0123"))
        left.close()
        with pytest.raises(CopyFailed, match="closed"):
            connection.receive()


def test_every_wait_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy, "STALL_S", 0.05)
    with raw_pair() as (left, connection):
        with pytest.raises(CopyFailed):
            connection.send({}, blobs(8_000_000))
        left.sendall(message({"header": {}, "sizes": [10]}, 10, b"0123"))
        with pytest.raises(CopyFailed):
            connection.receive()
    monkeypatch.setattr(copy, "ANSWER_S", 0.05)
    with pair() as (left_connection, _), pytest.raises(CopyFailed):
        left_connection.receive()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"token": "guess"}, "token"), ({"generation": 4}, "generation 4"), ({"to": "other"}, "this is donor")],
    ids=["token", "generation", "name"],
)
def test_a_caller_without_the_right_hello_is_refused(wrong: dict[str, str], said: str) -> None:
    def serve(connection: CopyConnection, hello: Hello) -> None:
        raise AssertionError("served")

    with door(serve) as opened, pytest.raises(CopyFailed, match=said):
        call(opened, **wrong)  # type: ignore[arg-type]


def test_a_member_whose_process_has_ended_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = gone.getsockname()
    with pytest.raises(CopyFailed, match=r"donor is gone: .*ECONNREFUSED"):
        open_copy(Peer("donor", *address), job=JOB, generation=3, me="asker", plan="", token=TOKEN, deadline_s=3600)


def test_a_member_that_does_not_answer_is_an_error_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(CopyFailed, match=r"in 0.05 s: no answer"):
        address = silent.getsockname()
        open_copy(Peer("donor", *address), job=JOB, generation=3, me="asker", plan="", token=TOKEN, deadline_s=0.05)


def test_more_copies_than_allowed_are_refused_and_a_closing_listener_ends_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener, "MAX_COPIES", 16)
    ended = threading.Semaphore(0)

    def serve(connection: CopyConnection, hello: Hello) -> None:
        with pytest.raises(CopyFailed):
            connection.receive()
        ended.release()

    with door(serve) as opened:
        connections = [call(opened) for _ in range(listener.MAX_COPIES)]
        with pytest.raises(CopyFailed, match="copies"):
            call(opened)
        connections[0].close()
        assert ended.acquire(timeout=GENEROUS_S)
        opened.close()
        for _ in connections[1:]:
            assert ended.acquire(timeout=GENEROUS_S)
    for connection in connections:
        connection.close()
