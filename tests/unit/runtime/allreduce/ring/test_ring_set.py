"""The rings of one worker: what becomes of those that cannot be built, and of those that are not needed any more."""

from __future__ import annotations

import errno
from queue import SimpleQueue

import pytest

from elastic.config import RingKind
from elastic.protocol.messages import Generation, Kind, Member, Plan
from elastic.protocol.worker_state import Event, RingFailed
from runtime.allreduce.ring import listener
from runtime.allreduce.ring.ring_set import Rings
from tests.unit.rings import GENEROUS_S, JOB, TOKEN, listeners


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
