"""Whom the port of a worker admits, and that no caller ends it for the others."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time

import pytest

from elastic.errors import BuildFailed, GenerationEnded
from runtime.allreduce.ring.handshake import Hello
from runtime.allreduce.ring.listener import ACCEPT_AGAIN_S
from tests.unit.rings import (
    GENEROUS_S,
    JOB,
    TOKEN,
    build_all,
    build_one,
    called,
    in_thread,
    listeners,
    peers_of,
    rest_of,
    wait_until,
)


@pytest.mark.parametrize("order", [(6, 7), (7, 6)])
def test_planned_generations_of_one_base_are_built_side_by_side(order: tuple[int, int]) -> None:
    """A list is planned, and at once the next one: the faster member has begun both when the other one calls."""
    with listeners(["a", "b"]) as opened:
        peers, ends = peers_of(opened), []
        for number in order:
            ends.append(in_thread(lambda n=number: build_one(opened["a"], "a", peers, generation=n, base=5)))  # type: ignore[misc]
            wait_until(lambda n=number: n in opened["a"]._expecting)  # type: ignore[misc]
        for number in (6, 7):
            ends.append(in_thread(lambda n=number: build_one(opened["b"], "b", peers, generation=n, base=5)))  # type: ignore[misc]
        rings = [end.result(GENEROUS_S) for end in ends]
        assert [ring.generation for ring in rings] == [*order, 6, 7]
        for ring in rings:
            ring.close()


def test_a_call_that_waits_for_a_planned_generation_is_refused_when_its_base_is_over() -> None:
    with listeners(["a", "b"]) as opened:
        door, peers, cancelled = opened["a"], peers_of(opened), threading.Event()
        planned = in_thread(lambda: build_one(opened["b"], "b", peers, generation=6, base=5))
        wait_until(lambda: bool(door._parked))
        loss = in_thread(lambda: build_one(door, "a", peers, generation=8, cancelled=cancelled))
        with pytest.raises(BuildFailed, match="generation 6 is over, a is at 8"):
            planned.result(GENEROUS_S)
        with pytest.raises(BuildFailed, match="generation 7 is over, a is at 8"):
            build_one(opened["b"], "b", peers, generation=7, base=5)
        cancelled.set()
        with pytest.raises(GenerationEnded):
            loss.result(GENEROUS_S)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
def test_a_port_without_a_descriptor_for_a_caller_rests_and_admits_it_later(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, tried_s, some_free = socket.socket.accept, list[float](), threading.Event()

    def none_left(sock: socket.socket) -> tuple[socket.socket, object]:
        if some_free.is_set():
            return accept(sock)
        tried_s.append(time.monotonic())
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(socket.socket, "accept", none_left)
    with listeners(["a", "b"], ["127.0.0.1", "127.0.0.2"]) as opened:
        peers = peers_of(opened)
        ends = [in_thread(lambda n=name: build_one(opened[n], n, peers)) for name in opened]  # type: ignore[misc]
        wait_until(lambda: len(tried_s) > 3)
        some_free.set()
        for end in ends:
            end.result(GENEROUS_S).close()
    assert tried_s[3] - tried_s[0] >= 3 * ACCEPT_AGAIN_S


def test_a_caller_that_cannot_be_checked_is_dropped_and_others_are_admitted() -> None:
    with listeners(["a", "b"]) as opened:
        opened["a"].token_of = {1: TOKEN}.__getitem__
        with socket.create_connection(opened["a"].address) as caller:
            caller.settimeout(GENEROUS_S)
            called(caller, Hello(JOB, 2, "b", "a", "ring", "plan"))
            assert rest_of(caller) == b""
        for ring in build_all(opened):
            ring.close()
