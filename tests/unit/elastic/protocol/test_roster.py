"""What a roster keeps beside its workers is what a look at all of them says."""

from __future__ import annotations

import random

from elastic.protocol.membership.group import Roster, WorkerView
from elastic.protocol.messages import Member

GENERATIONS = range(4)


def seen(worker: str, entered: int) -> WorkerView:
    return WorkerView(Member(worker, "a", "host", 1, 0), slot=0, pid=1, numerics="", entered=entered)


def agrees(roster: Roster) -> bool:
    outside = {worker for worker, one in roster.items() if not one.entered}
    inside = {number for number in GENERATIONS if any(one.entered == number for one in roster.values())} - {0}
    return roster.outside == outside and {n for n in GENERATIONS if roster.has_entered(n)} == inside


def test_whoever_comes_enters_moves_on_and_goes_is_counted_once() -> None:
    dice = random.Random(1)
    roster = Roster()
    for _ in range(2000):
        worker = f"w{dice.randrange(12)}"
        match dice.randrange(4):
            case 0 if worker in roster:
                del roster[worker]
            case 1:
                roster.discard(worker)
            case _:
                roster[worker] = seen(worker, dice.choice(GENERATIONS))
        assert agrees(roster)


def test_a_copy_has_counts_of_its_own() -> None:
    roster = Roster()
    roster["a"], roster["b"] = seen("a", 1), seen("b", 0)
    other = Roster(roster)
    assert other == roster and agrees(other)
    other["a"] = seen("a", 2)
    del other["b"]
    assert agrees(other) and agrees(roster) and roster.has_entered(1) and roster.outside == {"b"}
