"""How process groups of a generation's members find each other, and what happens when they do not."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import pytest
import torch
from torch._C._distributed_c10d import AllreduceOptions, Store

from elastic.agent.worker import nccl_environment
from elastic.agent.worker.nccl_environment import connect_s
from elastic.config import RingKind
from elastic.errors import BuildFailed, ConfigError, DeviceHung, ElasticError
from elastic.protocol.messages import Generation, Kind, Member, Plan
from elastic.protocol.worker_state import Event, RingBuilt, RingFailed
from runtime.allreduce.ring.nccl import check_device
from runtime.allreduce.ring.process_group import PendingWork, TransportGroup, meeting
from runtime.allreduce.ring.ring_set import FAILURES_MAX, Rings
from runtime.allreduce.ring.transport import Meet, Meeting, Transport
from tests.unit.gloo import GlooGroup
from tests.unit.rings import GENEROUS_S, JOB, TOKEN, everyone, listeners, wait_until
from tests.unit.runtime.allreduce.reduction.test_over_transport import GENERATIONS

CPU = torch.device("cpu")


def ignored(event: object) -> None:
    """What becomes of links after their ring was left."""


def meet_all(meet: Meet, names: Sequence[str]) -> list[Transport]:
    number, offers = next(GENERATIONS), []
    told = threading.Event()

    def member(rank: int) -> Transport:
        with meet(number, names, rank) as met:
            if rank == 0:
                offers.append(met.offer)
                told.set()
            assert told.wait(GENEROUS_S)
            transport = met.connect(offers[0])
            assert transport is not None
            return transport

    transports = everyone([lambda rank=rank: member(rank) for rank in range(len(names))])  # type: ignore[misc]
    host, port = offers[0].split()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), GENEROUS_S)
    return transports


def test_members_meet_at_a_store_that_is_gone_when_they_have_met() -> None:
    transports = meet_all(meeting(GlooGroup, "127.0.0.1", CPU), ["a", "b", "c"])

    def member(rank: int) -> float:
        came = torch.zeros(3)
        with transports[rank].attempt():
            transports[rank].exchange(
                {other: torch.tensor([float(rank)]) for other in range(3) if other != rank},
                {other: came[other : other + 1] for other in range(3) if other != rank},
            )
        return float(came.sum())

    assert everyone([lambda rank=rank: member(rank) for rank in range(3)]) == [3.0, 2.0, 1.0]  # type: ignore[misc]
    for transport in transports:
        transport.close()


def test_the_store_listens_on_its_own_address_only() -> None:
    with meeting(GlooGroup, "127.0.0.1", CPU)(next(GENERATIONS), ["a"], 0) as met:
        port = int(met.offer.split()[1])
        socket.create_connection(("127.0.0.1", port), GENEROUS_S).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), GENEROUS_S)


def test_a_member_that_does_not_come_fails_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_environment, "CONNECT_S", 0.3)

    def make(store: Store, rank: int, world_size: int, generation: int, device: torch.device) -> TransportGroup:
        store.get("of rank 1")
        raise AssertionError

    with (
        meeting(make, "127.0.0.1", CPU)(next(GENERATIONS), ["a", "b"], 0) as met,
        pytest.raises(BuildFailed, match="generation"),
    ):
        met.connect(met.offer)


def test_a_large_world_has_longer_to_connect() -> None:
    assert [round(connect_s(size), 1) for size in (1, 2, 8, 512, 1024)] == [20.1, 20.2, 20.8, 71.2, 122.4]


def test_a_greeting_has_the_time_of_its_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_environment, "CONNECT_S", 0.0)
    monkeypatch.setattr(nccl_environment, "PEER_S", 0.15)

    class Silent:
        """A group whose exchange ends when it is aborted."""

        ended = threading.Event()

        def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], /) -> PendingWork:
            return self

        def allreduce(self, tensors: list[torch.Tensor], options: AllreduceOptions, /) -> PendingWork:
            return self

        def is_completed(self) -> bool:
            return self.ended.is_set()

        def wait(self) -> bool:
            return False

        def abort(self) -> None:
            self.ended.set()

    began_s = time.monotonic()
    with (
        meeting(lambda *_: Silent(), "127.0.0.1", CPU)(next(GENERATIONS), ["a", "b", "c"], 0) as met,
        pytest.raises(BuildFailed, match=r"not all members were connected within 0\.45 s"),
    ):
        met.connect(met.offer)
    assert time.monotonic() - began_s >= 0.45


def test_an_address_that_is_not_this_machines_fails_the_build() -> None:
    with (
        pytest.raises(BuildFailed, match=r"no store on 192\.0\.2\.1"),
        meeting(GlooGroup, "192.0.2.1", CPU)(1, ["a"], 0),
    ):
        pass


def test_an_offer_that_is_none_fails_the_build() -> None:
    with meeting(GlooGroup, "127.0.0.1", CPU)(next(GENERATIONS), ["a", "b"], 1) as met, pytest.raises(BuildFailed):
        met.connect("")


class Unwilling:
    """Meetings that fail so many times."""

    def __init__(self, failures: int, error: ElasticError | None = None) -> None:
        self.failures, self.error = failures, error or BuildFailed("no way")
        self.offer = self.because = ""

    @contextmanager
    def meet(self, generation: int, members: Sequence[str], rank: int) -> Iterator[Meeting]:
        yield self

    def connect(self, offer: str) -> Transport | None:
        self.failures -= 1
        if self.failures >= 0:
            raise self.error
        with meeting(GlooGroup, "127.0.0.1", CPU)(next(GENERATIONS), ["a"], 0) as met:
            return met.connect(met.offer)

    def abort(self) -> None:
        """It never waits."""


def generation(number: int, *ports: int) -> Generation:
    members = tuple(Member("ab"[n], "ab"[n], "127.0.0.1", port, n) for n, port in enumerate(ports))
    return Generation(number, Kind.FORM, number, members, Plan(), "because", token=TOKEN)


def build(rings: Rings, port: int, number: int) -> Event:
    posted: list[Event] = []
    done = threading.Event()

    def post(event: Event) -> None:
        posted.append(event)
        done.set()

    rings.build(generation(number, port), post)
    assert done.wait(GENEROUS_S)
    return posted[0]


@pytest.mark.parametrize("failures", [FAILURES_MAX - 1, FAILURES_MAX])
def test_transports_that_cannot_be_connected_are_tried_a_few_times(failures: int) -> None:
    with listeners(["a"]) as opened:
        door = opened["a"]
        rings = Rings(door, JOB, "a", GENEROUS_S, RingKind.NCCL, Unwilling(failures).meet)
        for number in range(1, failures + 1):
            rings.check()
            assert build(rings, door.address[1], number) == RingFailed(number, (), "no way")
        if failures < FAILURES_MAX:
            assert build(rings, door.address[1], 9) == RingBuilt(9)
            rings.check()
            assert rings.abort(9, ignored)
        else:
            with pytest.raises(ConfigError, match="no way; start the job with --ring tcp"):
                rings.check()


def test_a_device_that_hangs_is_told_at_once_on_the_thread_that_builds() -> None:
    heard: list[DeviceHung] = []
    unwilling = Unwilling(1, DeviceHung("cuda:0 still runs"))
    with listeners(["a"]) as opened:
        door = opened["a"]
        rings = Rings(door, JOB, "a", GENEROUS_S, RingKind.NCCL, unwilling.meet)
        rings.on_hung = heard.append
        assert build(rings, door.address[1], 1) == RingFailed(1, (), "cuda:0 still runs")
        assert [str(hung) for hung in heard] == ["cuda:0 still runs"]


class Late:
    """A meeting that says when it is asked to connect, and gives a transport when it is told to."""

    def __init__(self) -> None:
        self.offer = self.because = ""
        self.asked, self.told, self.aborted, self.closed = (threading.Event() for _ in range(4))

    @contextmanager
    def meet(self, generation: int, members: Sequence[str], rank: int) -> Iterator[Meeting]:
        yield self

    def connect(self, offer: str) -> Transport | None:
        self.asked.set()
        assert self.told.wait(GENEROUS_S)
        return cast(Transport, self)

    def abort(self) -> None:
        self.aborted.set()

    def close(self) -> None:
        self.closed.set()


def test_connecting_ends_with_its_generation_and_what_comes_later_is_closed() -> None:
    late, posted = Late(), list[Event]()
    with listeners(["a"]) as opened:
        rings = Rings(opened["a"], JOB, "a", GENEROUS_S, RingKind.NCCL, late.meet)
        rings.build(generation(7, opened["a"].address[1]), posted.append)
        assert late.asked.wait(GENEROUS_S)
        assert not rings.abort(9, ignored), "it is not built yet"
        wait_until(lambda: "ring-7" not in running())
        assert late.aborted.is_set() and not late.closed.is_set()
        late.told.set()
        assert late.closed.wait(GENEROUS_S)
        wait_until(lambda: "transport-7" not in running())
        assert posted == [] and rings.get(7) is None


def test_nobody_waits_at_the_store_when_the_generation_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """One member waits for the other's word in the store, and the other never comes; both hear that it is over."""
    monkeypatch.setattr(nccl_environment, "CONNECT_S", 10 * GENEROUS_S)
    waits = threading.Semaphore(0)

    def make(store: Store, rank: int, world_size: int, generation: int, device: torch.device) -> TransportGroup:
        waits.release()
        store.get("of nobody")
        raise AssertionError

    number, posted = next(GENERATIONS), list[Event]()
    with listeners(["a", "b"]) as opened:
        ports = [door.address[1] for door in opened.values()]
        every = [
            Rings(door, JOB, name, GENEROUS_S, RingKind.NCCL, meeting(make, "127.0.0.1", CPU))
            for name, door in opened.items()
        ]
        for rings in every:
            rings.build(generation(number, *ports), posted.append)
        for _ in every:
            assert waits.acquire(timeout=GENEROUS_S)
        for rings in every:
            rings.abort(9, ignored)
        wait_until(lambda: not {f"ring-{number}", f"transport-{number}"} & running())
        assert posted == []


def test_a_greeting_that_nobody_answers_ends_with_its_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_environment, "CONNECT_S", 10 * GENEROUS_S)
    greets = threading.Event()

    class Silent:
        """A group whose exchange never ends."""

        def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], /) -> PendingWork:
            greets.set()
            return self

        def allreduce(self, tensors: list[torch.Tensor], options: AllreduceOptions, /) -> PendingWork:
            return self

        def is_completed(self) -> bool:
            return self.aborted.is_set()

        def wait(self) -> bool:
            return False

        def abort(self) -> None:
            self.aborted.set()

        aborted = threading.Event()

    with listeners(["a"]) as opened:
        meet = meeting(lambda *_: Silent(), "127.0.0.1", CPU)
        rings = Rings(opened["a"], JOB, "a", GENEROUS_S, RingKind.NCCL, meet)
        rings.build(generation(8, opened["a"].address[1]), lambda event: None)
        assert greets.wait(GENEROUS_S)
        rings.abort(9, ignored)
        wait_until(lambda: not {"ring-8", "transport-8"} & running())


@pytest.mark.parametrize(
    ("asked", "because", "wanted"),
    [
        (RingKind.TCP, "", ("tcp", "")),
        (RingKind.NCCL, "", ("nccl", "")),
        (RingKind.MPI, "b has no rank", ("tcp", "b has no rank")),
    ],
)
def test_what_carries_the_gradients_is_known_and_why(asked: RingKind, because: str, wanted: tuple[str, str]) -> None:
    late = Late()
    late.told.set()
    late.because = because
    if because:
        late.connect = lambda offer: None  # type: ignore[method-assign]
    with listeners(["a"]) as opened:
        door = opened["a"]
        rings = Rings(door, JOB, "a", GENEROUS_S, asked, None if asked is RingKind.TCP else late.meet)
        assert rings.carries(9) == ("", "")
        assert build(rings, door.address[1], 9) == RingBuilt(9)
        assert rings.carries(9) == wanted
        rings.abort(9, ignored)
        assert rings.carries(9) == ("", "")


def running() -> set[str]:
    """Names of the threads."""
    return {thread.name for thread in threading.enumerate()}


def test_nccl_without_a_gpu_or_without_nccl_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="the device of this worker is cpu; use --ring tcp"):
        check_device(CPU)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(ConfigError, match="built without NCCL"):
        check_device(torch.device("cuda:0"))
