"""Jobs of replicas with a quorum under virtual time, each from a seed, with deaths, joins, late workers and parted
networks: a generation has a member with the state of the job, a round ends and has its quorum, all members have the
same result of it, and no replica begins with another state than theirs.

A failing one: `python -m tests.sim --quorum --seed N --shrink`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any
from unittest.mock import patch

import pytest

from elastic.protocol import outer_round, recovery_plan
from elastic.protocol.messages import Generation, Member, Report
from tests.sim.directed import STORIES, draw
from tests.sim.faults import Scene, draw_by_chance
from tests.sim.replicas import Rounds, with_quorum
from tests.sim.worker import Worker
from tests.sim.world import World
from tests.unit.thoroughness import EXAMPLES

SEEDS = EXAMPLES or 60
TOLD = ("computed alone in vain", "newcomer alone is past k", "all die", "held after all")
"""Stories in which members lack a result, or all copies of the state are lost; told besides what seeds tell."""
AS_OFTEN = max(2, SEEDS // 30)
MUST_REACH = (
    "a late replica was told to stop",
    "a replica stopped early",
    "a replica was left out",
    "a survivor trained more than one replica",
    "a result of a round could not be copied",
    "a newcomer joined",
    "a newcomer took over a result",
    "a newcomer is the only one past k",
    "a new leader",
    "a ring could not be built",
    "redo rule: the operation is redone",
    "redo rule: the result is copied",
    "exit 0",
    "exit 3",
    "exit 4",
)


def scenes(seeds: int) -> list[tuple[int, Scene]]:
    told = [(seed, STORIES[name](Random(seed), name)) for name in TOLD for seed in range(AS_OFTEN)]
    return [(seed, with_quorum(scene, seed)) for seed, scene in [*told, *((seed, draw(seed)) for seed in range(seeds))]]


def search(seeds: int) -> Counter[str]:
    reached: Counter[str] = Counter()
    for seed, scene in scenes(seeds):
        try:
            reached.update(World(seed, scene=scene).run().reached)
        except AssertionError as violation:
            raise AssertionError(f"seed {seed} ({scene.name}): {violation}") from violation
    return reached


def test_every_job_with_a_quorum_ends_right_whatever_goes_wrong() -> None:
    reached = search(SEEDS)
    assert [what for what in MUST_REACH if not reached[what]] == []


def quiet(**changes: Any) -> Scene:
    """Three machines, one of which takes 20 times as long, and nothing goes wrong."""
    scene = replace(
        draw_by_chance(0), name="quiet", nodes=3, slots=1, min_workers=1, spares=0, steps=20, epoch_steps=1000, units=3,
        faults=(), store_trouble=0.0, copy_trouble=0.0, link_trouble=0.0, slow_links=0.0, slowness=(1.0, 20.0, 1.0),
        rounds=Rounds(2, 0.0, 6),
    )  # fmt: skip
    return replace(scene, **changes)


def test_nobody_waits_for_a_slow_replica_longer_than_for_one_of_its_inner_steps() -> None:
    took_s = World(5, scene=quiet()).run().duration_s
    assert took_s < 0.6 * World(5, scene=quiet(rounds=Rounds(3, 0.0, 6))).run().duration_s
    waits = World(5, scene=quiet(rounds=Rounds(2, 3.0, 6))).run()
    assert waits.duration_s > 1.2 * took_s, "a grace window is waited for"
    with patch.object(outer_round, "is_over", lambda least, grace_s, seen: False):
        assert World(5, scene=quiet()).run().duration_s > 1.5 * took_s, "a leader that stops nobody is seen"


IS_OVER, BY_REPORTS = outer_round.is_over, recovery_plan._by_reports


def _too_few(least: int, grace_s: float, seen: Any) -> bool:
    return IS_OVER(least - 1, grace_s, [*seen, (0, 1e9)])


def _half_the_grace(least: int, grace_s: float, seen: Any) -> bool:
    return IS_OVER(least, grace_s / 2, seen)


def _none_more(least: int, made: int, workers: int, *, left: int, over: bool) -> bool:
    """What the dead have trained is left out, also where too few live."""
    return made == left == 0


def _late_ones_out(least: int, made: int, workers: int, *, left: int, over: bool) -> bool:
    return made == left == 0 and workers % 2 == 0


def _fresh_weights(
    chain: Sequence[Generation], reports: Mapping[str, Report], dead: Collection[str], newcomers: Mapping[str, Member]
) -> Any:
    """Whoever answers has the state of the job."""
    began = chain[-1].began if chain else ""
    found = {
        worker: replace(report, copied=max(0, report.copied), began=began) if worker in newcomers else report
        for worker, report in reports.items()
    }
    return BY_REPORTS(chain, found, dead, newcomers)


@pytest.mark.parametrize(
    ("owner", "name", "mutant", "said"),
    [
        (outer_round, "is_over", _too_few, "of the quorum are missing"),
        (outer_round, "is_over", _half_the_grace, "has had no grace"),
        (outer_round, "computes", _none_more, "and the quorum is"),
        (outer_round, "computes", _late_ones_out, "and the quorum is"),
        (Worker, "cannot_redo", lambda worker, op: False, "and others have"),
        (recovery_plan, "_by_reports", _fresh_weights, "has the state of the job|with another state"),
    ],
    ids=["too few", "no grace", "no more below it", "late ones take no part", "computed alone", "fresh weights"],
)
def test_a_wrong_rule_is_found(owner: Any, name: str, mutant: Callable[..., Any], said: str) -> None:
    with patch.object(owner, name, mutant), pytest.raises(AssertionError, match=said):
        search(200)
