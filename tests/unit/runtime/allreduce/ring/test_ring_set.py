"""The rings of one worker: what becomes of those that cannot be built, and of those that are not needed any more."""

from __future__ import annotations

import errno
import threading
from queue import SimpleQueue
from typing import Any

import pytest

from elastic.config import RingKind
from elastic.protocol.messages import Generation, Kind, Member, Plan
from elastic.protocol.worker_state import Event, RingBuilt, RingFailed
from runtime.allreduce.ring import listener
from runtime.allreduce.ring.ring import Ring
from runtime.allreduce.ring.ring_set import Rings
from tests.unit.rings import GENEROUS_S, JOB, TOKEN, listeners, wait_until


def generation(number: int, *ports: int) -> Generation:
    """Of members a and b, whose listeners have these ports."""
    members = tuple(Member("ab"[n], "ab"[n], "127.0.0.1", port, n) for n, port in enumerate(ports))
    return Generation(number, Kind.PLANNED, 1, members, Plan(), "because", token=TOKEN)


def test_a_build_that_finds_no_descriptor_fails_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*arguments: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    posted: SimpleQueue[Event] = SimpleQueue()
    with listeners(["a"]) as opened:
        rings = Rings(opened["a"], JOB, "a", GENEROUS_S, RingKind.TCP)
        monkeypatch.setattr(listener, "Arrivals", none_left)
        rings.build(generation(1, opened["a"].address[1]), posted.put)
        assert posted.get(timeout=GENEROUS_S) == RingFailed(1, (), "[Errno 24] Too many open files")
        assert rings._building == {}


class Slow(Rings):
    """Their meshes are connected when `go` is set."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.go = threading.Event()
        self.made: list[Ring] = []

    def _mesh(self, *arguments: Any) -> Ring:
        assert self.go.wait(GENEROUS_S)
        self.made.append(super()._mesh(*arguments))
        return self.made[-1]


@pytest.mark.parametrize("late", [False, True])
def test_a_retired_ring_is_closed_whenever_it_comes_up(late: bool) -> None:
    """Its list was replaced by the next one. late: all members are in the next one before it is up."""
    posted: SimpleQueue[Event] = SimpleQueue()
    with listeners(["a"]) as opened:
        rings = Slow(opened["a"], JOB, "a", GENEROUS_S)
        rings.build(generation(6, opened["a"].address[1]), posted.put)
        rings.retire(6, 10)
        rings.close_retired(9)
        if not late:
            rings.go.set()
            assert posted.get(timeout=GENEROUS_S) == RingBuilt(6)
            assert rings.get(6) is rings.made[0]
        rings.close_retired(10)
        rings.go.set()
        wait_until(lambda: bool(rings.made) and rings.made[0]._closed)
        assert rings.get(6) is None and not rings._building
        assert posted.empty()
