"""Whom the port of a worker admits, and that no caller ends it for the others."""

from __future__ import annotations

import threading

import pytest

from elastic.errors import BuildFailed, GenerationEnded
from tests.unit.rings import GENEROUS_S, build_one, in_thread, listeners, peers_of, wait_until


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
