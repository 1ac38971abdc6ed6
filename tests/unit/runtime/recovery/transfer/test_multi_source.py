"""A state that comes in parts: every byte once, whoever sends it, and whoever stops sending."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from random import Random
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.allreduce.reduction.partial_sum import Json
from runtime.recovery.state.host_bytes import HostBytes, Part, Slice, parts_of
from runtime.recovery.transfer import multi_source
from runtime.recovery.transfer.connection import CopyConnection, CopyFailed
from runtime.recovery.transfer.multi_source import MultiSourceCopy, digest, send_parts
from runtime.recovery.transfer.parts import Parts
from tests.unit.rings import GENEROUS_S

SIZES = [10, 0, 700, 33]
HEADER: dict[str, Json] = {
    "format": 1,
    "tensors": [
        {"name": f"model.{i}", "dtype": "uint8", "shape": [size], "strides": [1], "nbytes": size, "device": "cpu"}
        for i, size in enumerate(SIZES)
    ],
    "objects": {"model": {"state": [{"__tensor__": i} for i in range(len(SIZES))]}},
    "state": {},
}
Serve = Callable[[CopyConnection], object]


def state() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in SIZES]


def pieces(request: dict[str, Json]) -> list[torch.Tensor]:
    return [state()[blob][start:end] for blob, start, end in cast(list[Slice], request["part"])]


def to_the_end(connection: CopyConnection) -> None:
    request, _ = connection.receive()
    assert request == {"want": "part", "op": 4, "digest": digest(HEADER)}
    connection.send({"ready": 4})
    send_parts(connection, HostBytes(state()))


class Served:
    """Connections, each with a thread that serves the other end."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def by(self, serve: Serve) -> CopyConnection:
        near, far = (CopyConnection(sock) for sock in socket.socketpair())

        def run() -> None:
            try:
                serve(far)
            except CopyFailed:
                pass
            finally:
                far.close()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self._stack.callback(thread.join, GENEROUS_S)
        self._stack.callback(near.close)
        return near

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(multi_source, "PART_BYTES", 16)
    made = Served()
    yield made
    made.close()


def gathered(served: Served, helpers: Sequence[Serve], donor: Serve | None = None) -> list[torch.Tensor]:
    connection = served.by(donor or (lambda connection: send_parts(connection, HostBytes(state()))))
    opens = [lambda serve=serve: served.by(serve) for serve in helpers]
    return MultiSourceCopy(4, HEADER).run(connection, opens)


def right(blobs: Sequence[torch.Tensor]) -> bool:
    return all(blob.equal(wanted) for blob, wanted in zip(blobs, state(), strict=True))


def test_the_donor_alone_sends_everything(served: Served) -> None:
    assert right(gathered(served, []))


def test_others_send_parts_of_the_same_state(served: Served) -> None:
    helped = threading.Event()

    def slow_donor(connection: CopyConnection) -> None:
        """Begins once somebody else has sent a part."""
        assert helped.wait(GENEROUS_S)
        send_parts(connection, HostBytes(state()))

    def helper(connection: CopyConnection) -> None:
        connection.receive()
        connection.send({"ready": 4})
        connection.send({}, pieces(connection.receive()[0]))
        helped.set()
        send_parts(connection, HostBytes(state()))

    def late(connection: CopyConnection) -> None:
        """Begins then, too: it would leave nothing to send if the first one came late."""
        assert helped.wait(GENEROUS_S)
        to_the_end(connection)

    assert right(gathered(served, [helper, late], slow_donor))
    assert helped.is_set()


def test_what_a_helper_does_not_send_the_donor_sends(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """One dies before it is asked, one in the middle, one says no, one sends nothing, and one cannot be reached."""
    monkeypatch.setattr(multi_source, "HELPER_S", 0.05)
    monkeypatch.setattr(multi_source, "HELPERS_MAX", 5)

    def dies(connection: CopyConnection) -> None:
        connection.receive()
        connection.send({"ready": 4})
        connection.receive()

    def freezes(connection: CopyConnection) -> None:
        dies(connection)
        connection.receive()

    def refuses(connection: CopyConnection) -> None:
        connection.receive()
        connection.send({"refused": "another state"})

    assert right(gathered(served, [lambda connection: None, dies, refuses, freezes]))

    def unreachable() -> CopyConnection:
        raise CopyFailed("nobody there")

    donor = served.by(lambda connection: send_parts(connection, HostBytes(state())))
    assert right(MultiSourceCopy(4, HEADER).run(donor, [unreachable]))


def test_without_its_donor_a_copy_fails_and_nobody_writes_into_it_any_more(served: Served) -> None:
    freed = threading.Event()

    def helper(connection: CopyConnection) -> None:
        connection.receive()
        connection.send({"ready": 4})
        connection.receive()
        with pytest.raises(CopyFailed):
            connection.receive()
        freed.set()

    with pytest.raises(CopyFailed):
        gathered(served, [helper], donor=lambda connection: connection.receive())
    served.close()


def test_another_donor_of_the_same_state_sends_what_is_missing(served: Served) -> None:
    """The first one sends two parts and dies in the third; its helper dies with it."""
    asked: list[Json] = []

    def dies(connection: CopyConnection) -> None:
        for _ in range(2):
            connection.send({}, pieces(connection.receive()[0]))
        connection.receive()

    def goes_on(connection: CopyConnection) -> None:
        while True:
            request, _ = connection.receive()
            asked.append(request["part"])
            connection.send({}, pieces(request))

    gathering = MultiSourceCopy(4, HEADER)
    with pytest.raises(CopyFailed):
        gathering.run(served.by(dies), [lambda: served.by(lambda connection: None)])
    here = gathering.gathered
    assert here == 32
    assert gathering.is_of(4, HEADER) and not gathering.is_of(5, HEADER) and not gathering.is_of(4, {"tensors": []})
    assert right(gathering.run(served.by(goes_on), []))
    assert gathering.gathered == sum(blob.numel() for blob in state())
    assert len(asked) == len(parts_of([blob.numel() for blob in state()], 16)) - 2


def test_a_helper_that_is_reached_only_in_the_next_run_does_not_take_the_name_of_another(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The donor dies while a helper is called, and the next donor goes on at once, with a helper too. The first one is
    reached then; the part of a helper that was interrupted must come from the donor."""
    monkeypatch.setattr(multi_source, "HELPER_S", 0.05)
    reached, asked, first_done = threading.Event(), threading.Event(), threading.Event()

    def late() -> CopyConnection:
        assert reached.wait(GENEROUS_S)
        return served.by(one_part)

    def one_part(connection: CopyConnection) -> None:
        connection.receive()
        connection.send({"ready": 4})
        request = connection.receive()[0]
        asked.wait(GENEROUS_S)
        connection.send({}, pieces(request))
        connection.receive()
        first_done.set()
        connection.receive()

    def stalls(connection: CopyConnection) -> None:
        connection.receive()
        connection.send({"ready": 4})
        connection.receive()
        asked.set()
        connection.receive()

    def donor(connection: CopyConnection) -> None:
        reached.set()
        assert asked.wait(GENEROUS_S)
        first_done.wait(0.3)
        send_parts(connection, HostBytes(state()))

    gathering = MultiSourceCopy(4, HEADER)
    for blob in gathering._blobs:
        blob.zero_()
    with pytest.raises(CopyFailed):
        gathering.run(served.by(lambda connection: None), [late])
    assert right(gathering.run(served.by(donor), [lambda: served.by(stalls)]))


def test_pieces_of_other_sizes_are_refused(served: Served) -> None:
    def other_bytes(connection: CopyConnection) -> None:
        connection.receive()
        connection.send({}, [torch.zeros(3, dtype=torch.uint8)])

    with pytest.raises(CopyFailed, match="pieces"):
        gathered(served, [], donor=other_bytes)


@pytest.mark.parametrize(
    "header", [{}, {"tensors": [{}]}, {"tensors": [{"nbytes": -1}]}, {"tensors": [{"nbytes": "1"}]}]
)
def test_a_malformed_description_is_refused(served: Served, header: dict[str, Json]) -> None:
    with pytest.raises(CopyFailed):
        MultiSourceCopy(4, header)


@pytest.mark.parametrize("part", [[[9, 0, 1]], [[0, "a", 1]], [3], [[0, 1]]])
def test_a_part_that_is_none_is_not_sent(served: Served, part: list[Json]) -> None:
    def serve(connection: CopyConnection) -> None:
        with pytest.raises(CopyFailed, match="none"):
            send_parts(connection, HostBytes(state()))

    connection = served.by(serve)
    connection.send({"part": part})
    with pytest.raises(CopyFailed):
        connection.receive()


@given(
    sizes=st.lists(st.integers(0, 50), max_size=8), most=st.integers(1, 60), script=st.randoms(use_true_random=False)
)
def test_every_byte_is_asked_for_until_it_is_there_and_then_never_again(
    sizes: list[int], most: int, script: Random
) -> None:
    parts = parts_of(sizes, most)
    assert all(sum(end - start for _, start, end in part) <= most for part in parts)
    planned, got = Parts(parts), list[Slice]()
    asked: dict[str, Part] = {}
    while not planned.complete:
        donor = script.choice("abc")
        if donor not in asked:
            part = planned.take(donor)
            if part is not None:
                asked[donor] = part
        elif script.random() < 0.3:
            planned.lost(donor)
            del asked[donor]
        else:
            planned.done(donor)
            got += asked.pop(donor)
    covered = sorted((blob, byte) for blob, start, end in got for byte in range(start, end))
    assert covered == [(blob, byte) for blob, size in enumerate(sizes) for byte in range(size)]
