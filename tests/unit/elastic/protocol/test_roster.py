"""What a roster keeps beside its workers is what a look at all of them says."""

from __future__ import annotations

import random
from itertools import product

import pytest

from elastic.protocol.membership.roster import ARCS, Roster, Stage, WorkerView
from elastic.protocol.messages import Member

GENERATIONS = range(4)


def seen(worker: str, entered: int, stage: Stage = Stage.MEMBER) -> WorkerView:
    return WorkerView(Member(worker, "a", "host", 1, 0), slot=0, pid=1, numerics="", entered=entered, stage=stage)


def agrees(roster: Roster) -> bool:
    inside = {number for number in GENERATIONS if any(one.entered == number for one in roster.values())}
    at = {stage: {worker for worker, one in roster.items() if one.stage is stage} for stage in Stage}
    return (
        at == {stage: roster.at(stage) for stage in Stage}
        and {number for number in GENERATIONS if roster.has_entered(number)} == inside
    )


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
                stages = sorted(ARCS[roster[worker].stage]) if worker in roster else list(Stage)
                roster[worker] = seen(worker, dice.choice(GENERATIONS), dice.choice(stages or [roster[worker].stage]))
        assert agrees(roster)


@pytest.mark.parametrize(("before", "after"), list(product(Stage, Stage)))
def test_only_the_listed_arcs_lead_from_stage_to_stage(before: Stage, after: Stage) -> None:
    roster = Roster()
    roster["w"] = seen("w", 1, before)
    if after is before or after in ARCS[before]:
        roster["w"] = seen("w", 1, after)
        assert roster.at(after) == {"w"}
        return
    with pytest.raises(AssertionError, match=f"^w is {before} and cannot become {after}$"):
        roster["w"] = seen("w", 1, after)
    assert roster["w"].stage is before and agrees(roster)


def test_a_copy_has_counts_of_its_own() -> None:
    roster = Roster()
    roster["a"], roster["b"] = seen("a", 1), seen("b", 0, Stage.INVITED)
    other = Roster(roster)
    assert other == roster and agrees(other)
    other["a"] = seen("a", 2)
    del other["b"]
    assert agrees(other) and agrees(roster) and roster.has_entered(1) and roster.at(Stage.INVITED) == {"b"}
    assert roster.at(Stage.INVITED, Stage.MEMBER) == {"a", "b"}
