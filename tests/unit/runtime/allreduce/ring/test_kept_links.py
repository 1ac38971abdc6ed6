"""Rings that follow one another over the same connections, after a loss. Members are threads."""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import pytest

from elastic.errors import BuildFailed, GenerationEnded, RingBroken
from elastic.security import certificate_authority
from elastic.security.certificate_authority import Authority
from runtime.allreduce.ring import dialer
from runtime.allreduce.ring.dialer import Dial
from runtime.allreduce.ring.frames import UNREAD_MAX, Frame, FrameKind, PeerLink
from runtime.allreduce.ring.listener import Listener
from runtime.allreduce.ring.ring import Ring
from runtime.allreduce.ring.tls import SealedSocket, TlsContexts
from tests.unit.rings import GENEROUS_S, build_all, build_one, everyone, in_thread, listeners, peers_of, wait_until
from tests.unit.runtime.allreduce.reduction.test_over_mesh import LENGTHS, assert_same, run, sum_of

T = TypeVar("T")
NAMES = ["w0", "w1", "w2", "w3"]
KINDS = ["unix", "tcp", "tls"]


@pytest.fixture(scope="module")
def seals(tmp_path_factory: pytest.TempPathFactory) -> list[TlsContexts]:
    home = tmp_path_factory.mktemp("certs")
    certificate_authority.create(home / "ca")
    for name in NAMES:
        Authority(home / "ca").issue(name, ["agent"], home / name)
    return [TlsContexts(Path(home / name)) for name in NAMES]


@pytest.fixture(params=KINDS)
def opened(request: pytest.FixtureRequest, seals: list[TlsContexts]) -> Iterator[dict[str, Listener]]:
    hosts = ["127.0.0.1"] * 4 if request.param == "unix" else [f"127.0.0.{rank + 1}" for rank in range(4)]
    with listeners(NAMES, hosts, seals if request.param == "tls" else ()) as doors:
        yield doors


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whom members have connected to anew."""
    names: list[str] = []
    really = Dial._open

    def noted(dial: Dial) -> None:
        names.append(dial._hello.to)
        really(dial)

    monkeypatch.setattr(Dial, "_open", noted)
    return names


def follow(
    opened: dict[str, Listener],
    built: Sequence[Ring],
    generation: int,
    handed: Mapping[str, dict[str, PeerLink]] = MappingProxyType({}),
) -> list[Ring]:
    """The next ring, of the members that these rings are of. handed: what members have handed over already."""
    staying = {ring.me: opened[ring.me] for ring in built}

    def member(ring: Ring) -> Ring:
        kept = handed[ring.me] if ring.me in handed else ring.hand_over(list(staying))
        ring.close()  # on a busy machine an operation may not have ended in time, and then nothing was handed over
        return build_one(opened[ring.me], ring.me, peers_of(staying), generation=generation, kept=kept)

    return everyone([lambda ring=ring: member(ring) for ring in built])  # type: ignore[misc]


def reduce(built: Sequence[Ring], seed: int) -> None:
    """A sum that has the bits of one worker's."""
    owners = [unit % len(built) for unit in range(6)]
    for _, result in run(built, owners, LENGTHS, seed=seed):
        assert_same(result, sum_of((0, 6), LENGTHS, seed))


def sockets(ring: Ring) -> dict[str, socket.socket]:
    return {peer: link._sock for peer, link in ring.links.items()}


def close_all(built: Sequence[Ring]) -> None:
    for ring in built:
        ring.close()


def test_after_losses_the_survivors_keep_their_connections(opened: dict[str, Listener], called: list[str]) -> None:
    built = build_all(opened)
    reduce(built, 0)
    before = [sockets(ring) for ring in built]
    called.clear()
    for number, left in enumerate((3, 2), 2):
        built.pop().close()
        built = follow(opened, built, number)
        assert called == [] and len(built) == left
        reduce(built, number)
    assert [sockets(ring) for ring in built] == [{"w1": before[0]["w1"]}, {"w0": before[1]["w0"]}]
    if "tls" in str(os.environ.get("PYTEST_CURRENT_TEST")):
        assert all(isinstance(sock, SealedSocket) for ring in built for sock in sockets(ring).values())
    close_all(built)


def test_a_newcomer_is_connected_and_the_others_keep_theirs(opened: dict[str, Listener], called: list[str]) -> None:
    staying = dict(list(opened.items())[:3])
    built = build_all(staying)
    called.clear()

    def member(ring: Ring) -> Ring:
        return build_one(opened[ring.me], ring.me, peers_of(opened), generation=2, kept=ring.hand_over(NAMES))

    newcomer = in_thread(lambda: build_one(opened["w3"], "w3", peers_of(opened), generation=2))
    second = everyone([lambda ring=ring: member(ring) for ring in built])  # type: ignore[misc]
    second.append(newcomer.result(GENEROUS_S))
    assert sorted(set(called)) == ["w0", "w1", "w2"] and "w3" in second[0].links
    reduce(second, 1)
    close_all(second)


@pytest.mark.parametrize("length", [1, 5000], ids=["small", "larger"])
def test_what_was_on_its_way_in_the_old_ring_is_dropped(opened: dict[str, Listener], length: int) -> None:
    """Also where half of it was read, into memory that is in use again."""
    built = build_all(opened)
    link = built[0].links["w1"]
    memory = bytearray(length)
    taken = Takes(memory)
    link.send(Frame(FrameKind.GATHER, 1, 0, length), b"a" * length)
    link._queue.refill()
    whole = b"".join(bytes(part) for part in link._queue.sending)
    link._queue.sending = []
    half = 40 + length // 2
    assert link._sock.send(whole[:half]) == half
    other = built[1].links["w0"]
    wait_until(lambda: other.receive(taken) or other._payload is not None)
    assert link._sock.send(whole[half:]) == len(whole) - half
    got = bytes(memory)
    second = follow(opened, built, 2)
    assert memory == got, "nothing is written there after the ring was left"
    reduce(second, 3)
    close_all(second)


class Takes:
    """memory: for the payload; None: it is not accepted yet."""

    def __init__(self, memory: bytearray | None) -> None:
        self._memory = memory

    def accept(self, peer: str, frame: Frame) -> memoryview | None:
        return None if self._memory is None else memoryview(self._memory)

    def complete(self, peer: str, frame: Frame, payload: memoryview) -> None:
        return


def test_a_frame_that_was_not_accepted_is_dropped(opened: dict[str, Listener]) -> None:
    built = build_all(opened)
    sender, receiver = built[1].links["w0"], built[0].links["w1"]
    sender.send(Frame(FrameKind.GATHER, 1, 7, 4), b"soon")
    sender.flush()
    wait_until(lambda: receiver.receive(Takes(None)) or receiver.stalled)
    second = follow(opened, built, 2)
    reduce(second, 3)
    close_all(second)


@pytest.mark.parametrize("torn", [True, False], ids=["a part is sent", "all is in the kernel"])
def test_a_connection_in_use_is_made_anew(opened: dict[str, Listener], called: list[str], torn: bool) -> None:
    """It would take longer to read what it carries. Over TCP this host's kernel has taken it all for the peer."""
    built = build_all(opened)
    link = built[0].links["w1"]
    size = 1 << 24 if torn else UNREAD_MAX + 1000
    link.send(Frame(FrameKind.GATHER, 1, 0, size), bytes(size))
    link.flush()
    assert link.unsent == torn
    local = link._sock.family == socket.AF_UNIX
    called.clear()
    handed = built[0].hand_over(NAMES)  # before w1 leaves too, and reads what is there
    second = follow(opened, built, 2, {"w0": handed})
    assert called == (["w0"] if torn or local else []), "w1 has called it"
    reduce(second, 3)
    close_all(second)


@pytest.mark.parametrize("closes", ["w0", "w1"])
def test_a_connection_that_one_side_has_closed_is_made_anew(
    opened: dict[str, Listener], called: list[str], closes: str
) -> None:
    built = build_all(opened)
    called.clear()

    def member(ring: Ring) -> Ring:
        kept = ring.hand_over(NAMES)
        if ring.me == closes:
            while kept:
                kept.popitem()[1].close()
        return build_one(opened[ring.me], ring.me, peers_of(opened), generation=2, kept=kept)

    second = everyone([lambda ring=ring: member(ring) for ring in built])  # type: ignore[misc]
    assert set(called) == ({"w0"} if closes == "w0" else {"w0", "w1"})
    reduce(second, 3)
    close_all(second)


def test_a_peer_that_leaves_late_is_called_anew(
    opened: dict[str, Listener], called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its side of the connection may be as good as dead; what it says there later is heard by nobody."""
    monkeypatch.setattr(dialer, "KEPT_S", 0.05)
    built = build_all(opened)
    called.clear()
    early = [in_thread(lambda ring=ring: follow_alone(opened, ring)) for ring in built[1:]]  # type: ignore[misc]
    wait_until(lambda: called.count("w0") == 3)
    second = [follow_alone(opened, built[0]), *(future.result(GENEROUS_S) for future in early)]
    reduce(second, 3)
    close_all(second)


def follow_alone(opened: dict[str, Listener], ring: Ring, generation: int = 2, **other: object) -> Ring:
    kept = ring.hand_over(NAMES)
    return build_one(opened[ring.me], ring.me, peers_of(opened), generation=generation, kept=kept, **other)  # type: ignore[arg-type]


def test_who_waits_in_the_old_ring_finds_that_a_peer_has_left_it_and_is_not_gone(opened: dict[str, Listener]) -> None:
    built = build_all(opened)
    running = in_thread(lambda: run([built[0]], [0, 0], LENGTHS))
    wait_until(built[0]._using.locked)
    kept = built[1].hand_over(NAMES)
    with pytest.raises(RingBroken, match="w1 has left this ring") as broken:
        running.result(GENEROUS_S)
    assert broken.value.peer == "w1" and built[0].closed_by_peers() == ()
    kept["w0"].close()
    wait_until(lambda: built[0].closed_by_peers() == ("w1",))
    for link in kept.values():
        link.close()
    close_all(built)


@pytest.mark.parametrize(("other", "said"), [({"plan": "another"}, "plan"), ({"token": "guess"}, "token")])
def test_another_plan_or_token_is_refused(opened: dict[str, Listener], other: dict[str, str], said: str) -> None:
    two = dict(list(opened.items())[:2])
    first, second = build_all(two)
    cancelled = threading.Event()

    def older() -> Ring:
        kept = first.hand_over(NAMES)
        return build_one(two["w0"], "w0", peers_of(two), generation=2, kept=kept, cancelled=cancelled)

    waits = in_thread(older)
    kept = second.hand_over(NAMES)
    with pytest.raises(BuildFailed, match=said) as failure:
        build_one(two["w1"], "w1", peers_of(two), generation=2, kept=kept, **other)  # type: ignore[arg-type]
    assert failure.value.unreachable == ("w0",)
    cancelled.set()
    with pytest.raises(GenerationEnded):
        waits.result(GENEROUS_S)


def test_members_that_build_different_generations_do_not_meet(opened: dict[str, Listener]) -> None:
    """The one behind is told so when it calls; the one ahead waits for the other."""
    two = dict(list(opened.items())[:2])
    first, second = build_all(two)
    cancelled = threading.Event()

    def ahead() -> Ring:
        kept = first.hand_over(NAMES)
        return build_one(two["w0"], "w0", peers_of(two), generation=3, kept=kept, cancelled=cancelled)

    waits = in_thread(ahead)
    with pytest.raises(BuildFailed, match="generation 2 is over"):
        build_one(two["w1"], "w1", peers_of(two), generation=2, kept=second.hand_over(NAMES))
    third = [build_one(two["w1"], "w1", peers_of(two), generation=3), waits.result(GENEROUS_S)]
    reduce(third[::-1], 1)
    close_all(third)


def test_a_cancelled_build_closes_what_was_kept(opened: dict[str, Listener]) -> None:
    two = dict(list(opened.items())[:2])
    first, second = build_all(two)
    cancelled = threading.Event()
    cancelled.set()
    for ring, kept in [(ring, ring.hand_over(NAMES)) for ring in (first, second)]:
        links = list(kept.values())
        with pytest.raises(GenerationEnded):
            build_one(two[ring.me], ring.me, peers_of(two), generation=2, kept=kept, cancelled=cancelled)
        assert kept == {} and [link.fileno() for link in links] == [-1]


def test_a_connection_that_a_child_has_inherited_ends_for_the_peer(opened: dict[str, Listener]) -> None:
    """A process of a DataLoader, say, in which it would stay open."""
    built = build_all(opened)
    inherited = [os.dup(link.fileno()) for link in built[0].links.values()]
    for link in built[0].hand_over(NAMES).values():
        link.close()
    wait_until(lambda: built[1].closed_by_peers() == ("w0",))
    for descriptor in inherited:
        os.close(descriptor)
    close_all(built)


def test_nothing_is_kept_of_a_ring_that_is_in_use_for_long(opened: dict[str, Listener]) -> None:
    built = build_all(opened)
    with built[0]._using:
        assert built[0].hand_over(NAMES) == {}
    close_all(built)
    assert built[0].hand_over(NAMES) == {}, "nor of one that is closed"


def test_following_leaks_no_descriptor_and_no_thread(opened: dict[str, Listener]) -> None:
    built = follow(opened, build_all(opened), 2)
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for generation in range(3, 40):
        built = follow(opened, built, generation)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (descriptors, threads)
    close_all(built)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 10))])
def test_rings_left_in_the_middle_of_operations_follow_one_another(
    opened: dict[str, Listener], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members leave at any moment, in any order, and some have begun a frame that never ends."""
    monkeypatch.setattr(dialer, "KEPT_S", 0.2)
    chance = random.Random(seed)
    built = build_all(opened)
    for generation in range(2, 12):
        doomed = [in_thread(lambda ring=ring: run([ring], [0] * 6, LENGTHS)) for ring in built]  # type: ignore[misc]
        first = chance.choice(built)
        peer, link = chance.choice(list(first.links.items()))
        if chance.random() < 0.5:
            frame = struct.pack("<4sB3xIIQQQ", b"ERF2", 3, 0, 0, generation - 1, 99, 1 << 20) + bytes(3000)
            with suppress(OSError):  # it takes nothing now
                socket.socket.send(link._sock, frame)  # past TLS, with which two threads must not write at once
        pause = threading.Event()
        for ring in chance.sample(built, len(built)):
            pause.wait(chance.random() * 0.003)
            ring.abort()
        built = follow(opened, built, generation)
        for future in doomed:
            with suppress(RingBroken):  # it may have been complete before
                future.result(GENEROUS_S)
        assert peer in first.links
        reduce(built, generation)
    close_all(built)


def test_a_rebuild_of_a_large_world_connects_nobody_anew(called: list[str]) -> None:
    names = [f"w{rank}" for rank in range(32)]
    with listeners(names) as opened:
        built = build_all(opened)
        assert len(called) >= 32 * 31 / 2
        called.clear()
        built.pop(11).close()
        built = follow(opened, built, 2)
        assert called == []
        close_all(built)
