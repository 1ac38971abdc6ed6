"""Building, aborting and leaving a ring. Members are threads; what travels is tested in test_reduce.py."""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from elastic.errors import BuildFailed, GenerationEnded, RingBroken
from runtime.allreduce.reduction.over_mesh import ReductionRequest, exchange
from runtime.allreduce.reduction.partial_sum import Partial
from runtime.allreduce.ring import listener as listener_module
from runtime.allreduce.ring import ring as ring_module
from runtime.allreduce.ring.frames import Frame, FrameKind, LinkError, PeerLink, packed
from runtime.allreduce.ring.handshake import Hello
from runtime.allreduce.ring.listener import MAX_UNCHECKED_OF_A_HOST
from runtime.allreduce.ring.ring import GATHER_S, MUCH_BYTES, Peer, Ring
from tests.unit.rings import (
    GENEROUS_S,
    JOB,
    build_all,
    build_one,
    called,
    everyone,
    in_thread,
    listeners,
    peers_of,
    rest_of,
    rings,
    wait_until,
)


def meet(ring: Ring, op: int = 0) -> None:
    """An operation of headers only, with one unit held by rank 0."""
    roots = [Partial(0, 1)] if ring.rank == 0 else []
    exchange(ring, ReductionRequest(op=op, roots=roots, units=1, groups={}))


def blocked(ring: Ring) -> Future[None]:
    """A member in an operation that cannot end, once it is inside."""
    future = in_thread(lambda: meet(ring))
    wait_until(ring._using.locked)
    return future


def test_members_see_one_order_of_ranks() -> None:
    with rings(3) as built:
        assert [ring.rank for ring in built] == [0, 1, 2]
        assert {ring.members for ring in built} == {("w0", "w1", "w2")}
        everyone([lambda ring=ring: meet(ring) for ring in built])  # type: ignore[misc]


def test_members_with_different_addresses_meet_over_tcp() -> None:
    with rings(3, hosts=["127.0.0.1", "127.0.0.2", "127.0.0.3"]) as built:
        families = {link._sock.family for ring in built for link in ring.links.values()}
        assert families == {socket.AF_INET}
        everyone([lambda ring=ring: meet(ring) for ring in built])  # type: ignore[misc]


def test_members_with_one_address_meet_over_a_unix_socket() -> None:
    with rings(2) as built:
        assert {link._sock.family for ring in built for link in ring.links.values()} == {socket.AF_UNIX}


def test_a_world_of_one_has_no_connection_and_works() -> None:
    with rings(1) as (ring,):
        assert ring.world_size == 1 and not ring.links
        meet(ring)
        ring.await_acknowledgements(0, [])
        ring.abort()
        with pytest.raises(RingBroken):
            meet(ring, 1)


def test_a_member_that_begins_late_finds_the_call_of_the_younger_parked() -> None:
    with listeners(["a", "b"]) as opened:
        peers = peers_of(opened)
        early = ThreadPoolExecutor(1).submit(build_one, opened["b"], "b", peers)
        wait_until(lambda: bool(opened["a"]._parked))
        first, second = build_one(opened["a"], "a", peers), early.result(GENEROUS_S)
        everyone([lambda: meet(first), lambda: meet(second)])
        first.close()
        second.close()


def test_the_member_that_is_not_there_is_named_and_no_other() -> None:
    with listeners(["a", "b", "c"]) as opened:
        peers = peers_of(opened)
        opened["b"].close()

        def attempt(me: str) -> tuple[str, ...]:
            with pytest.raises(BuildFailed) as failure:
                build_one(opened[me], me, peers, deadline_s=2.0)
            return failure.value.unreachable

        assert everyone([lambda: attempt("a"), lambda: attempt("c")]) == [("b",), ("b",)]


def test_a_member_whose_kernel_accepts_but_that_never_answers_is_named() -> None:
    """A frozen process looks like this."""
    with socket.create_server(("127.0.0.9", 0)) as frozen, listeners(["b"]) as opened:
        peers = [Peer("a", *frozen.getsockname()), *peers_of(opened)]
        with pytest.raises(BuildFailed) as failure:
            build_one(opened["b"], "b", peers, deadline_s=0.3)
        assert failure.value.unreachable == ("a",)


def test_cancelling_ends_a_build_that_waits() -> None:
    with listeners(["a", "b"]) as opened:
        cancelled = threading.Event()
        future = ThreadPoolExecutor(1).submit(build_one, opened["a"], "a", peers_of(opened), cancelled=cancelled)
        cancelled.set()
        with pytest.raises(GenerationEnded) as ended:
            future.result(GENEROUS_S)
        assert not isinstance(ended.value, BuildFailed)


@pytest.mark.parametrize(("other", "said"), [({"plan": "another"}, "plan"), ({"token": "guess"}, "token")])
def test_members_with_another_plan_or_token_do_not_meet(other: dict[str, str], said: str) -> None:
    with listeners(["a", "b"]) as opened:
        peers = peers_of(opened)
        cancelled = threading.Event()
        older = ThreadPoolExecutor(1).submit(build_one, opened["a"], "a", peers, cancelled=cancelled)
        with pytest.raises(BuildFailed, match=said) as failure:
            build_one(opened["b"], "b", peers, **other)  # type: ignore[arg-type]
        assert failure.value.unreachable == ("a",)
        cancelled.set()
        with pytest.raises(GenerationEnded):
            older.result(GENEROUS_S)


def test_a_call_of_an_older_generation_is_refused() -> None:
    with listeners(["a", "b"]) as opened:
        for ring in build_all(opened, generation=2):
            ring.close()
        with pytest.raises(BuildFailed, match="generation 1 is over"):
            build_one(opened["b"], "b", peers_of(opened), generation=1)


def test_a_stranger_is_refused_before_it_waits_for_a_generation_that_is_known() -> None:
    with listeners(["a"]) as opened, socket.create_connection(opened["a"].address) as stranger:
        stranger.settimeout(GENEROUS_S)
        called(stranger, Hello(JOB, 1, "b", "a", "ring", "plan"), token="guess")
        assert b"the token is not the generation's" in rest_of(stranger)
        assert not opened["a"]._parked


def test_a_handful_of_each_host_waits_for_a_generation_that_is_not_known_and_members_meet_all_the_same() -> None:
    with listeners(["a", "b"], ["127.0.0.1", "127.0.0.2"]) as opened, ExitStack() as stack:
        door, peers = opened["a"], peers_of(opened)
        crowd = [stack.enter_context(socket.create_connection(door.address)) for _ in range(20)]
        kept = MAX_UNCHECKED_OF_A_HOST
        for number, stranger in enumerate(crowd, 1):
            stranger.settimeout(GENEROUS_S)
            called(stranger, Hello(JOB, 2, "b", "a", "ring", "plan"), token="guess")
            wanted = min(number, kept)
            wait_until(lambda count=wanted: len(door._parked) == count)  # type: ignore[misc]
        assert [rest_of(stranger) for stranger in crowd[kept:]] == [b""] * (len(crowd) - kept)
        assert len(door._parked) == kept, "of the host from which the member calls too"
        younger = in_thread(lambda: build_one(opened["b"], "b", peers, generation=2).close())
        build_one(door, "a", peers, generation=2).close()
        younger.result(GENEROUS_S)
        assert not door._parked
        for stranger in crowd[:kept]:
            assert b"the token is not the generation's" in rest_of(stranger)


def test_members_keep_their_places_when_strangers_of_many_hosts_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "MAX_PARKED", 3)
    with listeners(["a", "b"], ["127.0.0.1", "127.0.0.2"]) as opened, ExitStack() as stack:
        door, peers = opened["a"], peers_of(opened)
        younger = in_thread(lambda: build_one(opened["b"], "b", peers).close())
        wait_until(lambda: [parked.checked for parked in door._parked] == [True])
        crowd = []
        for number in range(6):
            place = (f"127.98.0.{number + 1}", 0)
            crowd.append(stack.enter_context(socket.create_connection(door.address, GENEROUS_S, place)))
            called(crowd[-1], Hello(JOB, 2, f"b.{number}", "a", "ring", "plan"), token="guess")
            wait_until(lambda who=f"b.{number}": door._parked[-1].hello.worker_id == who)  # type: ignore[misc]
        assert [rest_of(stranger) for stranger in crowd[:4]] == [b""] * 4, "the oldest of them go"
        assert sum(parked.checked for parked in door._parked) == 1
        build_one(door, "a", peers).close()
        younger.result(GENEROUS_S)


def test_a_port_with_a_new_owner_is_not_taken_for_the_old_one() -> None:
    with listeners(["a.1", "b"]) as opened:
        peers = [Peer("a.0", *opened["a.1"].address), Peer("b", *opened["b"].address)]
        with pytest.raises(BuildFailed, match=r"this is a\.1") as failure:
            build_one(opened["b"], "b", peers)
        assert failure.value.unreachable == ("a.0",)


@pytest.mark.parametrize(
    "message",
    [
        struct.pack(">I", 1 << 20),
        struct.pack(">I", 4) + b"nope",
        struct.pack(">I", 2) + b"[]",
        struct.pack(">I", 7) + b'{"v":1}',
        struct.pack(">I", 9) + json.dumps({"v": 99}).encode(),
    ],
    ids=["too long", "no JSON", "no object", "no fields", "other version"],
)
def test_nonsense_is_refused_and_the_listener_lives(message: bytes) -> None:
    with listeners(["a", "b"]) as opened:
        with socket.create_connection(opened["a"].address) as stranger:
            stranger.settimeout(GENEROUS_S)
            stranger.sendall(message)
            assert b"refused" in rest_of(stranger)
        for ring in build_all(opened):
            ring.close()


def test_a_hello_of_another_job_is_refused() -> None:
    with listeners(["a"]) as opened, socket.create_connection(opened["a"].address) as stranger:
        stranger.settimeout(GENEROUS_S)
        hello = Hello("other", 1, "b", "a", "ring", "plan")
        called(stranger, hello)
        assert JOB.encode() in rest_of(stranger)


@pytest.mark.parametrize("hosts", [["127.0.0.1"] * 2, ["127.0.0.1", "127.0.0.2"]], ids=["unix", "tcp"])
def test_abort_frees_a_blocked_member_whose_peer_does_nothing(hosts: list[str]) -> None:
    """The peer never reads or writes, as a frozen process; both the blocked and later operations end."""
    with rings(2, hosts) as (ring, _):
        future = blocked(ring)
        ring.abort()
        ring.abort()
        with pytest.raises(RingBroken) as broken:
            future.result(GENEROUS_S)
        assert broken.value.peer is None
        with pytest.raises(RingBroken):
            meet(ring, 1)


@pytest.mark.parametrize("hosts", [["127.0.0.1"] * 3, ["127.0.0.1", "127.0.0.2", "127.0.0.3"]], ids=["unix", "tcp"])
def test_a_member_knows_who_has_closed_its_end_and_who_has_only_left(hosts: list[str]) -> None:
    """Also where something that came before was not read, and after it has left the ring itself."""
    with rings(3, hosts) as (ring, other, gone):
        assert ring.closed_by_peers() == ()
        link = gone.links["w0"]
        link.send(Frame(FrameKind.GATHER, 1, 0, 4), b"data")
        link.flush()
        other.abort()
        link.close()
        while not (closed := ring.closed_by_peers()):
            time.sleep(0.001)  # the kernel takes its time
        assert closed == ("w2",), "who has left keeps its connections"
        ring.abort()
        ends = ring.watch_ends()
        assert next(ends) == ("w2",)
        other.close()
        assert list(ends) == [("w1", "w2")]
        ring.close()
        assert ring.closed_by_peers() == () and list(ring.watch_ends()) == []


class SlowToClose:
    """A transport that is closed when the test says so."""

    def __init__(self) -> None:
        self.closing, self.closed = threading.Event(), threading.Event()

    def abort(self) -> None:
        pass

    def close(self) -> None:
        self.closing.set()
        assert self.closed.wait(GENEROUS_S)


def test_ends_are_seen_and_links_are_closed_while_a_transport_takes_long_to_close() -> None:
    with rings(3) as (ring, other, gone):
        transport = SlowToClose()
        ring.transport = transport  # type: ignore[assignment]
        ring.abort()
        gone.close()
        ends = ring.watch_ends()
        assert next(ends) == ("w2",)
        assert transport.closing.wait(GENEROUS_S)
        closing = in_thread(ring.close)
        wait_until(lambda: other.closed_by_peers() == ("w0", "w2"))
        assert not closing.done(), "it waits for its transport"
        transport.closed.set()
        closing.result(GENEROUS_S)


def test_a_connection_that_nothing_comes_back_on_was_not_closed_by_the_peer() -> None:
    with rings(2, ["127.0.0.1", "127.0.0.2"]) as (ring, gone):
        link = ring.links["w1"]
        link._failed(OSError(errno.ETIMEDOUT, "Connection timed out"))
        gone.close()
        while not link.receive(Late(link)) and not link.ended:
            time.sleep(0.001)
        assert ring.closed_by_peers() == ()


def test_close_waits_for_the_member_it_frees() -> None:
    with rings(2) as (ring, _):
        future = blocked(ring)
        ring.close()
        with pytest.raises(RingBroken):
            future.result(GENEROUS_S)
        ring.close()


@pytest.mark.parametrize("hosts", [["127.0.0.1"] * 3, ["127.0.0.1", "127.0.0.2", "127.0.0.3"]], ids=["unix", "tcp"])
def test_a_peer_that_goes_away_is_named(hosts: list[str]) -> None:
    with rings(3, hosts) as built:
        future = blocked(built[0])
        built[2].close()
        with pytest.raises(RingBroken) as broken:
            future.result(GENEROUS_S)
        assert broken.value.peer == "w2"


def test_a_peer_that_left_after_the_operation_is_missed_only_in_the_next() -> None:
    with rings(2) as built:
        everyone([lambda ring=ring: meet(ring) for ring in built])  # type: ignore[misc]
        built[1].close()
        built[0].await_acknowledgements(0, [])
        with pytest.raises(RingBroken) as broken:
            meet(built[0], 1)
        assert broken.value.peer == "w1"


class Late:
    """Needs nothing; has a frame for its peer once that is gone."""

    op = 0
    may_gather = False

    def __init__(self, link: PeerLink) -> None:
        self._link = link

    def needs(self, peer: str) -> bool:
        return False

    def advance(self) -> bool:
        if self._link.ended:
            self._link.send(Frame(FrameKind.GATHER, 1, 0, 4), b"data")
        return bool(self._link.ended)

    def accept(self, peer: str, frame: Frame) -> memoryview | None:
        raise LinkError("nothing was sent")

    def complete(self, peer: str, frame: Frame, payload: memoryview) -> None:
        raise AssertionError("nothing was accepted")


@pytest.mark.parametrize("unsent", [0, 1 << 24], ids=["nothing", "more than the connection takes"])
def test_an_operation_ends_although_a_peer_that_it_needs_no_more_left_before_all_was_sent(unsent: int) -> None:
    with rings(2) as built:
        alone, other = built
        link = alone.links["w1"]
        if unsent:
            link.send(Frame(FrameKind.GATHER, 1, 0, unsent), bytes(unsent))
            link.flush()
        other.close()
        in_thread(lambda: alone.run(Late(link))).result(GENEROUS_S)


class Taking:
    """Takes one frame."""

    op = 0

    def __init__(self, may_gather: bool) -> None:
        self.may_gather, self._there = may_gather, False

    def needs(self, peer: str) -> bool:
        return not self._there

    def advance(self) -> bool:
        return self._there

    def accept(self, peer: str, frame: Frame) -> memoryview | None:
        return memoryview(bytearray(frame.length))

    def complete(self, peer: str, frame: Frame, payload: memoryview) -> None:
        self._there = True


@pytest.mark.parametrize(
    ("may_gather", "come", "gathers"),
    [(True, 1000, True), (True, MUCH_BYTES, False), (False, 1000, False)],
    ids=["nobody waits", "much has come", "somebody waits"],
)
def test_bytes_gather_while_nobody_waits_for_an_operation(
    may_gather: bool, come: int, gathers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(ring_module, "sleep", slept.append)
    with rings(2) as (ring, other):
        sock = other.links["w0"]._sock
        frame = packed(Frame(FrameKind.GATHER, 1, 0, come + 1000)) + bytes(come + 1000)
        sock.sendall(frame[:-1000])
        future = in_thread(lambda: ring.run(Taking(may_gather)))
        wait_until(lambda: ring.links["w1"].moved == len(frame) - 1000)
        sock.sendall(frame[-1000:])
        future.result(GENEROUS_S)
    assert slept == ([GATHER_S] if gathers else [])


def test_members_at_different_operations_do_not_wait_for_each_other() -> None:
    with rings(2) as built:
        futures = [in_thread(lambda: meet(built[0], 7)), in_thread(lambda: meet(built[1], 8))]
        for ring, future in zip(built, futures, strict=True):
            with pytest.raises(RingBroken):
                future.result(GENEROUS_S)
            ring.abort()


def test_an_acknowledgement_ends_the_wait_for_it() -> None:
    with rings(3) as built:
        everyone([lambda ring=ring: meet(ring, 4) for ring in built])  # type: ignore[misc]
        waiting = in_thread(lambda: built[2].await_acknowledgements(4, ["w0", "w1"]))
        built[0].acknowledge(4, ["w2"])
        assert not waiting.done()
        built[1].acknowledge(4, ["w2", "w2-not-a-member"])
        waiting.result(GENEROUS_S)


def test_acknowledgements_pass_through_a_running_operation() -> None:
    with rings(3) as built:
        future = blocked(built[0])
        built[1].acknowledge(0, ["w0"])
        wait_until(lambda: built[0]._acknowledged["w1"] == 0)
        everyone([lambda: meet(built[1]), lambda: meet(built[2])])
        future.result(GENEROUS_S)
        built[0].await_acknowledgements(0, ["w1"])


def test_an_acknowledgement_made_during_an_operation_leaves_with_or_after_it() -> None:
    with rings(2) as built:
        future = blocked(built[0])
        built[0].acknowledge(0, ["w1"])
        meet(built[1])
        future.result(GENEROUS_S)
        built[1].await_acknowledgements(0, ["w0"])


def test_waiting_for_the_acknowledgement_of_a_peer_that_dies_raises() -> None:
    with rings(2) as built:
        waiting = in_thread(lambda: built[0].await_acknowledgements(3, ["w1"]))
        built[1].close()
        with pytest.raises(RingBroken) as broken:
            waiting.result(GENEROUS_S)
        assert broken.value.peer == "w1"


def test_rebuilding_leaks_no_descriptor_and_no_thread() -> None:
    with listeners(["a", "b", "c"]) as opened:

        def cycle(generation: int) -> None:
            built = build_all(opened, generation)
            built[0].abort()
            for ring in built:
                ring.close()

        cycle(1)
        descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
        for generation in range(2, 202):
            cycle(generation)
        assert len(os.listdir("/proc/self/fd")) == descriptors
        assert threading.active_count() == threads


def test_failed_builds_leak_no_descriptor() -> None:
    with listeners(["a", "b", "c"]) as opened:
        peers = peers_of(opened)

        def cycle(generation: int) -> None:
            with pytest.raises(BuildFailed):
                build_one(opened["b"], "b", peers, generation=generation, deadline_s=0.0)

        def settle(generation: int) -> None:
            """A ring of a newer generation lets every listener drop what failed calls have left there."""
            for ring in build_all(opened, generation=generation):
                ring.close()

        settle(1)
        descriptors = len(os.listdir("/proc/self/fd"))
        for generation in range(2, 20):
            cycle(generation)
        settle(50)
        wait_until(lambda: len(os.listdir("/proc/self/fd")) == descriptors)


def test_a_closed_listener_refuses_connections() -> None:
    with listeners(["a"]) as opened:
        opened["a"].close()
        opened["a"].close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(opened["a"].address, timeout=GENEROUS_S)


def test_what_rank_0_offers_is_told_to_all() -> None:
    with listeners(["w0", "w1", "w2"]) as opened:
        peers = peers_of(opened)

        def member(name: str) -> str:
            ring = build_one(opened[name], name, peers, offer=f"of {name}")
            ring.close()
            return ring.offer

        assert everyone([lambda name=name: member(name) for name in opened]) == ["of w0"] * 3  # type: ignore[misc]
