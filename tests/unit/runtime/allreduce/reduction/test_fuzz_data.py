"""What one worker reads from another: hellos, copies, frames of a ring, headers of a reduction.

Whatever the bytes are, the answer is a value or the typed error of that reader, soon, in bounded memory.
"""

from __future__ import annotations

import json
import math
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elastic.errors import Disagree, NoMemory, RingBroken
from runtime.allreduce.reduction.dissemination import encode
from runtime.allreduce.reduction.entries import digest
from runtime.allreduce.reduction.over_mesh import ReductionRequest, exchange
from runtime.allreduce.reduction.partial_sum import Partial
from runtime.allreduce.reduction.schedule import ALIGN
from runtime.allreduce.ring import handshake
from runtime.allreduce.ring.frames import _HEAD, _MAGIC, Frame, FrameKind, LinkError, PeerLink
from runtime.allreduce.ring.handshake import (
    Hello,
    HelloRefused,
    Inbox,
    Welcome,
    check_welcome,
    decode_answer,
    decode_hello,
    is_proven,
    proven_hello,
    proven_welcome,
)
from runtime.allreduce.ring.ring import Ring
from runtime.recovery.transfer.connection import CopyConnection, CopyFailed
from tests.unit.broken import DEEP, documents, json_bytes, mutated
from tests.unit.rings import GENEROUS_S, JOB, TOKEN, called, listener, message_of, rest_of

quick = settings(max_examples=int(os.environ.get("FUZZ", "60")))
few = settings(max_examples=int(os.environ.get("FUZZ", "40")))

HELLO = proven_hello(Hello(JOB, 1, "b", "a", "ring", "plan"), "challenge", TOKEN)
WELCOME = proven_welcome(Welcome(1, "a", "plan"), HELLO, TOKEN)
HALF = b'"\\ud800"'
"""Half of a character, which JSON can spell."""


def body_of(message: bytes) -> bytes:
    return message[4:]


HELLO_BODY, WELCOME_BODY = body_of(handshake.encode(HELLO)), body_of(handshake.encode(WELCOME))
PROOF = json.dumps(HELLO.proof).encode()


@quick
@given(mutated(st.just(HELLO_BODY)) | json_bytes() | documents(json.loads(HELLO_BODY)))
@example(DEEP)
@example(HELLO_BODY.replace(PROOF, HALF))
def test_a_hello_is_read_or_refused(message: bytes) -> None:
    try:
        hello = decode_hello(message)
    except HelloRefused:
        return
    assert decode_hello(body_of(handshake.encode(hello))) == hello
    assert is_proven(hello, TOKEN) == (hello == HELLO), "what is proven is all of it"


@quick
@given(mutated(st.just(WELCOME_BODY)) | json_bytes() | documents(json.loads(WELCOME_BODY)))
@example(WELCOME_BODY.replace(json.dumps(WELCOME.proof).encode(), HALF))
@example(b'{"v":2,"refused":' + HALF + b"}")
def test_an_answer_is_read_or_refused(message: bytes) -> None:
    with suppress(HelloRefused):
        check_welcome(decode_answer(message), HELLO, TOKEN)


@quick
@given(mutated(st.just(handshake.encode(HELLO))) | st.binary(max_size=40))
def test_a_message_is_collected_or_refused(data: bytes) -> None:
    left, right = socket.socketpair()
    with left, right:
        left.sendall(data)
        left.close()
        with suppress(HelloRefused, EOFError):
            message = Inbox().read(right)
            assert message is not None and len(message) <= len(data)


@pytest.mark.parametrize("body", [DEEP[:60_000], HELLO_BODY.replace(PROOF, HALF), b"\xff\xfe", b"1" * 5000, b"{}"])
def test_a_listener_outlives_whoever_talks_nonsense(body: bytes) -> None:
    with closing(listener("a")) as opened:
        with socket.create_connection(opened.address, GENEROUS_S) as caller:
            caller.sendall(struct.pack(">I", len(body)) + body)
            assert b"refused" in rest_of(caller)
        with socket.create_connection(opened.address, GENEROUS_S) as caller:
            caller.settimeout(GENEROUS_S)
            called(caller, replace(HELLO, purpose="copy"))
            assert decode_answer(message_of(caller)).worker_id == "a"


# ------------------------------------------------------------------------------------------------------- copies


def copy_message(head: bytes, total: int, body: bytes = b"") -> bytes:
    return struct.pack(">4sIQ", b"ERC1", len(head), total) + head + body


COPY = copy_message(b'{"header":{"step":3},"sizes":[4]}', 4, b"abcd" + struct.pack(">I", 0xED82CD11))
COPY_HEAD: dict[str, Any] = {"header": {"step": 3}, "sizes": [4, 0]}


@quick
@given(
    mutated(st.just(COPY))
    | (json_bytes() | documents(COPY_HEAD)).map(lambda head: copy_message(head, 4, b"abcd" + bytes(4)))
)
@example(COPY)
@example(copy_message(DEEP, 0))
@example(copy_message(b'{"header":{},"sizes":[4398046511104]}', 1 << 42))
@example(copy_message(b'{"header":{},"sizes":[1e999]}', 4))
def test_a_copy_is_read_or_fails(data: bytes) -> None:
    left, right = socket.socketpair()
    with left, closing(CopyConnection(right)) as connection:
        left.sendall(data)
        left.close()
        try:
            header, blobs = connection.receive()
        except (CopyFailed, NoMemory):
            return
        assert isinstance(header, dict)
        assert sum(blob.numel() for blob in blobs) <= len(data)


# -------------------------------------------------------------------------------------------------------- rings

ROOM = 1 << 16


class Taker:
    """A sink that takes any frame of up to ROOM bytes."""

    def __init__(self) -> None:
        self.taken: list[Frame] = []

    def accept(self, peer: str, frame: Frame) -> memoryview | None:
        if frame.length > ROOM:
            raise LinkError(f"{peer} sent too much")
        return memoryview(bytearray(frame.length))

    def complete(self, peer: str, frame: Frame, payload: memoryview) -> None:
        self.taken.append(frame)


def frame(kind: int, payload: bytes = b"", *, term: int = 0, piece: int = 0, op: int = 0, generation: int = 1) -> bytes:
    return bytes(_HEAD.pack(_MAGIC, kind, term, piece, generation, op, len(payload))) + payload


@quick
@given(mutated(st.just(frame(1, b"header") + frame(2, b"abcd") + frame(4))) | st.binary(max_size=80))
def test_frames_are_read_or_the_peer_is_named(data: bytes) -> None:
    left, right = socket.socketpair()
    with left, closing(PeerLink("b", right, 1)) as link:
        left.sendall(data)
        left.close()
        taker = Taker()
        with suppress(LinkError):
            while not link.ended:
                link.receive(taker)
        assert len(taker.taken) <= len(data)


ELEMENTS = 2 * ALIGN
"""So that each of two has a slice."""
GROUPS = {"float32": ELEMENTS}
TERM = {"node": [2, 4], "has_grad": "1", "weight": 0, "scalars": {"loss": ["mean", 0, 0]}, "note": None, "leaves": []}
AGREED = json.dumps({"units": 4, "groups": GROUPS}, separators=(",", ":")).encode()
FIELDS: dict[str, Any] = {"worker_id": "b", "terms": [TERM]}
NATIVE: dict[str, Any] = {"worker_id": "b", "terms": [{**TERM, "leaves": [2, 3]}]}
NUMBERS = (2.0, 0.5, 2.0)


def entry(said: bytes, numbers: Sequence[float] = NUMBERS, agreed: bytes = AGREED) -> bytes:
    return struct.pack("<16sI", digest(agreed), len(said)) + said + struct.pack(f"<{len(numbers)}d", *numbers)


SAID = json.dumps(FIELDS).encode()
ENCODED = encode([entry(SAID)])


@contextmanager
def against(data: bytes) -> Iterator[Ring]:
    """A ring of a and b, in which b has sent these bytes and is gone."""
    left, right = socket.socketpair()
    with left, closing(Ring(1, ("a", "b"), ("127.0.0.1",) * 2, "a", {"b": right})) as ring:
        left.settimeout(GENEROUS_S)
        left.sendall(data)
        left.shutdown(socket.SHUT_WR)
        yield ring


def reduce(ring: Ring, native: bool = False) -> None:
    root = Partial(0, 2, {"float32": torch.ones(ELEMENTS)}, 1, 2.0, {"loss": ("mean", 0.5, 2.0)})
    leaves = [0, 1] if native else None
    exchange(ring, ReductionRequest(op=0, roots=[root], leaves=leaves, units=4, groups=GROUPS))


def header(entry: bytes) -> bytes:
    return frame(FrameKind.HEADER, encode([entry]))


def headers(fields: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """Damaged headers in whole frames."""
    said = json_bytes() | documents(fields)
    return (mutated(st.just(entry(json.dumps(fields).encode()))) | said.map(entry)).map(header)


def odd(*, numbers: Sequence[float] = NUMBERS, **fields: object) -> bytes:
    return header(entry(json.dumps({**FIELDS, **fields}).encode(), numbers))


def disagreeing(agreed: bytes) -> bytes:
    """A member whose units or groups are others, and what it says of them then."""
    return header(entry(SAID, agreed=agreed)) + frame(FrameKind.HEADER, encode([agreed]), term=1)


@few
@given(headers(FIELDS), st.booleans())
@example(header(entry(DEEP)), False)
@example(header(entry(b"")), False)
@example(odd(numbers=()), False)
@example(odd(numbers=(*NUMBERS, 0.0)), False)
@example(odd(worker_id="a"), False)
@example(odd(numbers=(), terms={}), False)
@example(odd(terms=[{**TERM, "weight": 10**400}]), False)
@example(odd(terms=[{**TERM, "has_grad": "-1"}]), False)
@example(odd(terms=[{**TERM, "node": [2**70, -1]}]), False)
def test_a_header_of_a_reduction_is_read_or_breaks_the_ring(data: bytes, native: bool) -> None:
    with against(data) as ring, pytest.raises((RingBroken, Disagree)):
        reduce(ring, native)


@few
@given(headers(NATIVE))
@example(odd(numbers=(), terms={}))
def test_a_header_of_a_native_reduction_is_read_or_breaks_the_ring(data: bytes) -> None:
    with against(data) as ring, pytest.raises((RingBroken, Disagree)):
        reduce(ring, native=True)


@few
@given((mutated(st.just(AGREED)) | json_bytes()).filter(lambda agreed: agreed != AGREED).map(disagreeing))
@example(disagreeing(DEEP))
@example(disagreeing(json.dumps({"units": math.inf, "groups": GROUPS}).encode()))
@example(disagreeing(json.dumps({"units": 4, "groups": {"float32": math.nan}}).encode()))
@example(disagreeing(AGREED + b" "))
@example(disagreeing(AGREED)[: -len(AGREED)])
def test_what_a_member_says_when_it_does_not_agree_is_read_or_breaks_the_ring(data: bytes) -> None:
    with against(data) as ring, pytest.raises((RingBroken, Disagree)):
        reduce(ring)


WHOLE = (
    frame(FrameKind.HEADER, ENCODED)
    + frame(FrameKind.SCATTER, struct.pack("<f", 2.0) * ALIGN)
    + frame(FrameKind.GATHER, struct.pack("<f", 3.0) * ALIGN, piece=1)
)


def test_what_is_damaged_below_is_whole() -> None:
    with against(WHOLE) as ring:
        reduce(ring)


@few
@given(mutated(st.just(WHOLE)))
@example(WHOLE[: len(frame(FrameKind.HEADER, ENCODED)) + 60])
@example(WHOLE[:-7])
def test_frames_of_a_reduction_are_taken_or_break_the_ring(data: bytes) -> None:
    with against(data) as ring, suppress(RingBroken, Disagree):
        reduce(ring)


def test_many_terms_for_other_units_get_no_memory() -> None:
    """A header is small, and what it asks for need not be."""
    terms = [{**TERM, "node": [n, n + 1]} for n in range(300)]
    groups = {"float32": 1 << 19}
    agreed = json.dumps({"units": 300, "groups": groups}).encode()
    one = entry(json.dumps({**FIELDS, "terms": terms}).encode(), NUMBERS * 300, agreed)
    root = Partial(0, 2, {"float32": torch.ones(1 << 19)}, 1, 2.0)
    with against(header(one) + frame(FrameKind.HEADER, encode([agreed]), term=1)) as ring:
        with pytest.raises((RingBroken, Disagree)):
            exchange(ring, ReductionRequest(op=0, roots=[root], units=4, groups=groups))
        assert sum(len(memory) for memory in ring._scratch.values()) < 1 << 26
