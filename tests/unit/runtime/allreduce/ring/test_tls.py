"""Connections between workers of different hosts: sealed with certificates, and what strangers get there."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch

from elastic.errors import BuildFailed, ConfigError, RingBroken
from elastic.security import certificate_authority
from elastic.security.certificate_authority import Authority
from runtime.allreduce.reduction import over_mesh
from runtime.allreduce.ring import listener, tls
from runtime.allreduce.ring.handshake import Hello, decode_challenge, encode, proven_hello
from runtime.allreduce.ring.listener import Listener
from runtime.allreduce.ring.ring import Peer
from runtime.allreduce.ring.tls import PLAIN, SealedSocket, TlsContexts
from runtime.recovery.transfer.connection import CopyConnection, CopyFailed, open_copy
from tests.unit import rings as doors
from tests.unit.rings import (
    GENEROUS_S,
    JOB,
    TOKEN,
    build_one,
    everyone,
    listeners,
    message_of,
    peers_of,
    rest_of,
    rings,
    wait_until,
)
from tests.unit.runtime.allreduce.reduction.test_over_mesh import LENGTHS, assert_same, run, sum_of

HOSTS = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of nodes w0, w1, w2, and of one of another fleet that believes this one."""
    home = tmp_path_factory.mktemp("certs")
    for name in ("ca", "other-ca"):
        certificate_authority.create(home / name)
    for name in ("w0", "w1", "w2"):
        Authority(home / "ca").issue(name, ["agent"], home / name)
    Authority(home / "other-ca").issue("w1", ["agent"], home / "eve")
    with (home / "eve" / "ca.pem").open("ab") as file:
        file.write((home / "ca" / "ca.pem").read_bytes())
    return home


@pytest.fixture(scope="module")
def seals(certs: Path) -> list[TlsContexts]:
    return [TlsContexts(certs / name) for name in ("w0", "w1", "w2")]


@pytest.mark.parametrize("piece_bytes", [512, 512 * 1024])
def test_sealed_members_get_the_bits_of_one(
    seals: list[TlsContexts], piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(over_mesh, "PIECE_BYTES", piece_bytes)
    groups = {**LENGTHS, "float32": 200_003 if piece_bytes > 512 else 1000}
    with rings(3, HOSTS, seals) as built:
        assert all(isinstance(link._sock, SealedSocket) for ring in built for link in ring.links.values())
        for op in range(2):
            for _, result in run(built, [0, 1, 2], groups, op=op, seed=op):
                assert_same(result, sum_of((0, 3), groups, op))


def test_a_worker_waits_for_another_certificate_if_its_own_is_over(
    certs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "RENEWED_POLL_S", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(certificate_authority, "_now", lambda: datetime.now(UTC) - timedelta(days=2))
        Authority(certs / "ca").issue("w0", ["agent"], tmp_path, days=1)
    waits: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(TlsContexts.when_valid, tmp_path, waits.append)
        wait_until(lambda: bool(waits))
        assert not made.done() and "worker.pem ended at" in waits[0]
        Authority(certs / "ca").issue("w0", ["agent"], tmp_path)
        assert made.result(GENEROUS_S) is not None
    assert len(waits) == 1
    with pytest.raises(ConfigError, match=r"has no worker\.pem"):
        TlsContexts.when_valid(tmp_path / "nowhere", waits.append)


def test_members_of_one_host_need_no_seal(seals: list[TlsContexts]) -> None:
    with rings(2, None, [seals[0], seals[0]]) as built:
        assert {link._sock.family for ring in built for link in ring.links.values()} == {socket.AF_UNIX}


def test_a_sealed_member_that_is_blocked_is_freed(seals: list[TlsContexts]) -> None:
    with rings(2, HOSTS[:2], seals[:2]) as (ring, other):
        future = ThreadPoolExecutor(1).submit(run, [ring], [0, 1], {"float32": 100_000})
        wait_until(ring._using.locked)
        other.close()
        with pytest.raises(RingBroken):
            future.result(GENEROUS_S)


def test_what_comes_in_pieces_of_any_size_is_received_whole(certs: Path, seals: list[TlsContexts]) -> None:
    """Also what lies below the seal already, which poll does not report, and more than a socket takes at once."""
    near, far = shaken(seals[0], seals[1])
    with near, far:
        sent = [os.urandom(size) for size in (1, 5000, 16_384, 3, 300_000, 16_383, 2_000_000)]
        got = bytearray(sum(map(len, sent)))
        rest, filled = [memoryview(piece) for piece in sent], 0
        while filled < len(got):
            if rest:
                try:
                    size = near.sendmsg(rest)
                    while rest and size >= len(rest[0]):
                        size -= len(rest.pop(0))
                    if size:
                        rest[0] = rest[0][size:]
                except BlockingIOError:
                    pass
            try:
                filled += far.recvmsg_into([memoryview(got)[filled : filled + 7000], memoryview(got)[filled + 7000 :]])[
                    0
                ]
            except BlockingIOError:
                continue
        assert bytes(got) == b"".join(sent)
        near.shutdown(socket.SHUT_RDWR)
        far.settimeout(GENEROUS_S)
        assert far.recv(1) == b""


def shaken(one: TlsContexts, other: TlsContexts) -> tuple[SealedSocket, SealedSocket]:
    with socket.create_server(("127.0.0.1", 0)) as door:
        near = socket.create_connection(door.getsockname())
        far, _ = door.accept()
    sealed = []
    for sock, seal in ((near, one), (far, other)):
        sock.setblocking(False)
        wrapped = seal.as_caller(sock) if sock is near else seal.as_called(sock)
        assert isinstance(wrapped, SealedSocket)
        sealed.append(wrapped)

    def is_done() -> bool:
        for sock in sealed:
            try:
                sock.shake_hands()
            except BlockingIOError:
                continue
        return all(sock.node for sock in sealed)

    wait_until(is_done)
    return sealed[0], sealed[1]


@contextmanager
def donor(seal: TlsContexts, refused: list[str]) -> Iterator[Listener]:
    """That sends ten megabytes to whoever may ask."""

    def serve(sock: socket.socket, hello: Hello) -> None:
        with suppress(CopyFailed):  # the asker has heard enough
            CopyConnection(sock).send({"from": "w0"}, [torch.arange(10_000_000, dtype=torch.uint8)])

    opened = doors.listener("w0", "127.0.0.1", seal, lambda because, host: refused.append(because), serve)
    try:
        yield opened
    finally:
        opened.close()


def ask(opened: Listener, seal: TlsContexts, *, generation: int = 1, token: str = TOKEN, within_s: float = 20.0) -> int:
    """Bytes of the answer."""
    peer = Peer("w0", *opened.address)
    asking = {"job": JOB, "generation": generation, "me": "w1", "plan": "plan", "token": token}
    connection = open_copy(peer, deadline_s=within_s, seal=seal, **asking)  # type: ignore[arg-type]
    try:
        _, (blob,) = connection.receive()
        assert blob.equal(torch.arange(10_000_000, dtype=torch.uint8))
        return connection.received
    finally:
        connection.close()


def test_state_is_copied_over_a_sealed_connection_and_to_nobody_else(seals: list[TlsContexts], certs: Path) -> None:
    refused: list[str] = []
    with donor(seals[0], refused) as opened:
        assert ask(opened, seals[1]) > 10_000_000
        with pytest.raises(CopyFailed, match="node w2, not of 'w1'"):
            ask(opened, seals[2])  # who says it is w1
        with socket.create_connection(opened.address, GENEROUS_S) as noise:
            noise.sendall(bytes(100))
            rest_of(noise)
        unknown = "the caller's TLS: CERTIFICATE_VERIFY_FAILED"
        while unknown not in refused:  # who gives up so soon may not have come to show it
            with pytest.raises(CopyFailed):
                ask(opened, TlsContexts(certs / "eve"), within_s=0.2)
        wait_until(lambda: {"the caller's TLS: WRONG_VERSION_NUMBER", unknown} < set(refused))
        assert ask(opened, seals[1]) > 10_000_000


@pytest.mark.parametrize(
    ("generation", "token", "because"),
    [(1, "that of generation 0", "the token is not the generation's"), (2, TOKEN, "does not know generation 2")],
)
def test_a_copy_is_for_those_who_know_the_token_of_that_generation(generation: int, token: str, because: str) -> None:
    refused: list[str] = []
    with donor(PLAIN, refused) as opened:
        with pytest.raises(CopyFailed, match=because):
            ask(opened, PLAIN, generation=generation, token=token)
        assert because in refused[0]
        assert ask(opened, PLAIN) > 10_000_000


def test_what_was_overheard_opens_no_other_connection() -> None:
    """The token itself is never said, and a hello answers one challenge only."""
    refused: list[str] = []
    hello = Hello(JOB, 1, "w1", "w0", "copy", "plan")
    with donor(PLAIN, refused) as opened:
        with socket.create_connection(opened.address, GENEROUS_S) as first:
            challenge = message_of(first)
            overheard = encode(proven_hello(hello, decode_challenge(challenge), TOKEN))
            first.sendall(overheard)
            welcome = message_of(first)
        assert not any(TOKEN.encode() in said for said in (challenge, overheard, welcome))
        for said in (overheard, None):
            with socket.create_connection(opened.address, GENEROUS_S) as again:
                challenge = message_of(again)
                if said is None:  # the old proof under the new challenge
                    old = json.loads(overheard[4:])
                    body = json.dumps({**old, "challenge": decode_challenge(challenge)}).encode()
                    said = struct.pack(">I", len(body)) + body
                again.sendall(said)
                assert b"refused" in rest_of(again)
        assert refused == ["it answers another challenge", "the token is not the generation's"]


def test_whoever_is_called_must_know_the_token_too() -> None:
    """Else one who has taken a member's port could send a model of his own."""
    with socket.create_server(("127.0.0.1", 0)) as door, ThreadPoolExecutor(1) as pool:
        address = door.getsockname()
        asking = pool.submit(
            open_copy,
            Peer("w0", *address),
            job=JOB,
            generation=1,
            me="w1",
            plan="p",
            token=TOKEN,
            deadline_s=GENEROUS_S,
        )
        sock, _ = door.accept()
        with sock:
            for body in ({"v": 2, "challenge": "c"}, None):
                if body is None:
                    message_of(sock)
                    body = {"v": 2, "generation": 1, "worker_id": "w0", "plan": "p", "offer": "", "proof": "guessed"}
                text = json.dumps(body).encode()
                sock.sendall(struct.pack(">I", len(text)) + text)
            with pytest.raises(CopyFailed, match="its token is not the generation's"):
                asking.result(GENEROUS_S)


def test_silent_callers_keep_nobody_out_and_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times as many as a host may have, from one host; members of another meet meanwhile."""
    monkeypatch.setattr(listener, "HELLO_S", 1.0)
    with listeners(["w0", "w1"], ["127.0.0.1", "127.0.0.2"]) as opened:
        crowd = []
        for _ in range(10 * listener.MAX_PENDING_OF_A_HOST):
            sock = socket.socket()
            sock.bind(("127.0.0.3", 0))
            sock.connect(opened["w0"].address)
            crowd.append(sock)
        peers = peers_of(opened)
        for ring in everyone([lambda name=name: build_one(opened[name], name, peers) for name in opened]):  # type: ignore[misc]
            ring.close()
        for sock in crowd:
            sock.settimeout(GENEROUS_S)
            rest_of(sock)
            sock.close()


def test_members_whose_certificates_are_not_believed_do_not_meet(seals: list[TlsContexts], certs: Path) -> None:
    with listeners(["w0", "w1"], HOSTS[:2], [seals[0], TlsContexts(certs / "eve")]) as opened:
        peers = peers_of(opened)
        cancelled = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            older = pool.submit(build_one, opened["w0"], "w0", peers, cancelled=cancelled)
            with pytest.raises(BuildFailed) as failure:
                build_one(opened["w1"], "w1", peers, deadline_s=0.3)
            assert failure.value.unreachable == ("w0",)
            cancelled.set()
            with pytest.raises(Exception, match="ended"):
                older.result(GENEROUS_S)


def test_a_new_certificate_is_used_from_the_next_connection_on(certs: Path, tmp_path: Path) -> None:
    shutil.copytree(certs / "w0", tmp_path / "w0")
    seal = TlsContexts(tmp_path / "w0")
    near, far = shaken(seal, TlsContexts(certs / "w1"))
    before = far.getpeercert(binary_form=True)
    Authority(certs / "ca").issue("w0", ["agent"], tmp_path / "w0")
    near_again, far_again = shaken(seal, TlsContexts(certs / "w1"))
    assert far_again.getpeercert(binary_form=True) not in (before, None)
    for sock in (near, far, near_again, far_again):
        sock.close()


def test_a_new_certificate_that_cannot_be_used_stops_no_connection(certs: Path, tmp_path: Path) -> None:
    """Also where none was made with the one before."""
    shutil.copytree(certs / "w0", tmp_path / "w0")
    seal = TlsContexts(tmp_path / "w0")
    (tmp_path / "w0" / "worker.pem").write_bytes(b"half a")
    for one, other in ((seal, TlsContexts(certs / "w1")), (TlsContexts(certs / "w1"), seal)):
        for sock in shaken(one, other):
            sock.close()


def test_callers_that_speak_and_hang_up_at_once_keep_nobody_out(
    seals: list[TlsContexts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are gone when the listener takes their connections, which lie there with what they said."""
    refused: list[str] = []
    with donor(seals[0], refused) as opened:
        as_called, held, gone = seals[0].as_called, threading.Event(), threading.Event()

        def wait_first(sock: socket.socket) -> socket.socket:
            held.set()
            assert gone.wait(GENEROUS_S)
            return as_called(sock)

        monkeypatch.setattr(seals[0], "as_called", wait_first)
        for _ in range(3):
            with socket.create_connection(opened.address, GENEROUS_S) as caller:
                assert held.wait(GENEROUS_S)
                caller.sendall(b"hello")
                caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        gone.set()
        assert ask(opened, seals[1]) > 10_000_000
    assert len(refused) >= 3


def test_a_worker_without_a_certificate_does_not_begin(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no worker\.pem"):
        TlsContexts(tmp_path)
