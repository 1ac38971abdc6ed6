"""A few hundred whole jobs under virtual time, each from a seed.

A failing one: `python -m tests.sim --seed N --shrink`. The big search, which counts all arms of the machines, is
`make sim`.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest

from elastic.config import Stragglers
from elastic.protocol.loop_state import CopyArrived, CopyOffered, CountAsHolder, LoopState, ScriptEvent, newcomer
from elastic.protocol.loop_state.events import PROCEED, Answer
from tests.sim import arms
from tests.sim.directed import STORIES
from tests.sim.faults import Fault, draw_by_chance
from tests.sim.reach import Reach, judge
from tests.sim.replicas import RoundsScript, is_round
from tests.sim.script import Script, write_script
from tests.sim.shrink import fewest
from tests.sim.taken import UNIT
from tests.sim.wanted import EXCLUDED, RARE, Excluded
from tests.sim.world import World

ROOT = Path(__file__).parents[2]
BATCHES = 10
SEEDS = 25
MUST_REACH = (
    "a donor lingers",
    "a drain was taken back",
    "a drained member did not wait for a newcomer",
    "a generation below quorum",
    "a generation was told as a difference",
    "a leader resigned",
    "a loss right after a loss",
    "a new leader",
    "a newcomer copies anew",
    "a newcomer joined",
    "a newcomer joined after it had taken over results",
    "a newcomer joined the first step that it copied",
    "a newcomer joined a ring that waited for it",
    "a newcomer joined a ring that waited for its copy",
    "a newcomer was too late for its epoch",
    "a newcomer whose set-up hung was replaced",
    "a newcomer took over a result",
    "a planned change was voided by a loss",
    "a ring could not be built",
    "a spare joined",
    "a state copy failed",
    "a stuck member was expelled and replaced",
    "a stuck newcomer was replaced",
    "a worker was demoted",
    "a worker was named a straggler",
    "committed planned",
    "exit 0",
    "exit 3",
    "exit 4",
    "exit 6",
    "exit 143",
    "held below quorum",
    "a leader change inside QUIESCING",
    "redo rule: computed alone",
    "redo rule: the operation is redone",
    "redo rule: the result is copied",
    "shards followed speed",
)
"""What a few hundred seeds do not miss; wanted.py has the rest."""

_reached: Counter[str] = Counter()
_batches: set[int] = set()


@pytest.mark.parametrize("batch", range(BATCHES))
def test_every_job_ends_right_whatever_goes_wrong(batch: int) -> None:
    for seed in range(batch * SEEDS, (batch + 1) * SEEDS):
        world = World(seed)
        try:
            _reached.update(world.run().reached)
        except AssertionError as violation:
            raise AssertionError(f"seed {seed}: {violation}") from violation
    _batches.add(batch)


def test_the_runs_have_reached_what_they_are_for() -> None:
    if len(_batches) < BATCHES:
        pytest.skip("counts what all batches have reached, and not all have run")
    missing = [what for what in MUST_REACH if not _reached[what]]
    assert not missing, f"run the whole file; never reached: {missing}"


def test_workers_without_any_leader_are_parked() -> None:
    """Which they were not, because the order seemed to come from a leader that was behind."""
    scene = STORIES["held after all"](Random(1), "held after all")
    assert World(0, scene=scene).run().reached["workers without any leader were parked"]


def test_a_seed_is_one_run() -> None:
    told: list[list[str]] = [[], []]
    for trace in told:
        World(17, trace.append).run()
    assert told[0] == told[1] and len(told[0]) > 20


@pytest.mark.parametrize("script", [Script, RoundsScript])
def test_a_script_is_as_long_as_it_likes(script: type[Script]) -> None:
    """And its states are asked for in any order, as by a judge who comes to an operation late."""
    program = write_script(Random(0), steps=3000, units=1, epoch_steps=3000)
    late, forward = script(program, program.operations), script(program, program.operations)
    if isinstance(late, RoundsScript) and isinstance(forward, RoundsScript):
        for op in (op for op, operation in enumerate(program.operations) if is_round(operation)):
            late.settle(op, ((op, 0, 0),))
            forward.settle(op, ((op, 0, 0),))
    states = [forward.state(op) for op in range(len(program.operations))]
    assert late.state(late.last) == states[-1] != states[0]


def test_a_round_that_is_settled_anew_changes_what_is_behind_it_alone() -> None:
    program = write_script(Random(0), steps=30, units=1, epoch_steps=30)
    script, ops = RoundsScript(program, program.operations), [*map(is_round, program.operations)]
    first, second = [op for op, it_is in enumerate(ops) if it_is][:2]
    script.settle(first, ((first, 0, 0),))
    script.settle(second, ((second, 0, 0),))
    before, behind = script.state(first), script.state(second + 1)
    script.settle(second, ((second, 0, 1),))
    assert script.state(first) == before
    assert script.state(second + 1) != behind


@pytest.mark.parametrize("seed", [2823, 3095, 8529, 15423])
def test_a_seed_that_has_failed_ends_right(seed: int) -> None:
    World(seed).run()


def test_a_failing_run_is_shrunk_to_the_faults_that_it_needs() -> None:
    """A member that changes its state unseen makes the job end with 5, which is a failure where nobody expects it."""
    scene = draw_by_chance(0)
    drift = Fault("drift", at_s=0.4)
    faults = (Fault("cut", at_s=0.3), drift, Fault("add_node", at_s=0.5))
    scene = replace(scene, name="quiet", nodes=2, steps=20, faults=faults, store_trouble=0.2, heal_s=5.0, poison=-1)
    with patch.object(World, "was_struck", lambda self, *kinds: False):
        needed, because = fewest(3, scene)
    assert needed == ["1"] and "nobody has said anything wrong" in because


def counts_any_copy(s: LoopState, event: CopyArrived) -> Answer:
    return s, CountAsHolder()


joins = newcomer.joins


def takes_any_epoch(s: LoopState, event: ScriptEvent) -> Answer:
    return (s, PROCEED) if isinstance(event, CopyOffered) else joins(s, event)


@pytest.mark.parametrize(
    ("function", "defect", "epoch_steps", "binds", "told"),
    [
        ("_copy_arrived", counts_any_copy, 1000, 1.0, "with another state than the others"),
        ("joins", takes_any_epoch, 2, 0.0, "where the others are in|, the members at"),
    ],
)
def test_a_newcomer_that_takes_a_wrong_copy_is_seen(
    function: str, defect: Callable[..., Answer], epoch_steps: int, binds: float, told: str
) -> None:
    """Of a step that its script is not bound to; of an epoch that its script is not in."""
    scene = replace(
        draw_by_chance(0), name="quiet", nodes=2, slots=1, min_workers=1, steps=60, epoch_steps=epoch_steps,
        faults=(Fault("crash", at_s=0.5),), store_trouble=0.0, copy_trouble=0.0, link_trouble=0.0, slow_links=0.0,
        short_log=False, binds=binds,
    )  # fmt: skip
    for seed in range(8):
        World(seed, scene=scene).run()
    with patch.object(newcomer, function, defect), pytest.raises(AssertionError, match=told):
        for seed in range(8):
            World(seed, scene=scene).run()


def test_arms_are_marked_where_they_are_taken() -> None:
    source = """
def sign(number):
    if number < 0:
        return -1
    for _ in range(number):
        return 1
    match number:
        case 0:
            return 0
        case _:
            raise AssertionError("never")
"""
    first = len(arms.NAMES)
    place: dict[str, Any] = {}
    exec(compile(arms.instrument(ast.parse(source), "m.py"), "m.py", "exec"), place)
    three = ["m.py sign: not if number < 0", "m.py sign: for _ in range(number)"]
    for number, taken in ((-5, ["m.py sign: if number < 0"]), (0, [three[0], "m.py sign: case 0"]), (7, three)):
        arms.forget()
        place["sign"](number)
        assert arms.taken() == ["m.py sign", *taken]
    negative = ["m.py sign", "m.py sign: if number < 0"]
    assert arms.NAMES[first:] == [*negative, *three, "m.py sign: case 0"]


def test_what_is_wanted_and_not_reached_is_named() -> None:
    reach = Reach()
    for _ in range(10):
        reach.add("quiet", 200, ["a"], [("detector", "alive", "judge", "suspect")], [RARE[0]])
    reach.add("quiet", 199, ["b"], [("detector", "alive", "judge", "dozing")], [])
    name, why = next(iter(EXCLUDED.items()))
    verdict = judge(reach, ["a", "b"], {})
    assert (reach.schedules, reach.short) == (10, 1)
    assert "a" not in verdict.rare and verdict.rare["b"] == 1 and verdict.rare["detector: suspect -> alive"] == 0
    assert "detector: alive -> suspect" not in verdict.rare and f"path: {RARE[0]}" not in verdict.rare
    assert verdict.unknown == ["detector: alive -> dozing"] and set(verdict.stale) == set(EXCLUDED)
    assert judge(reach, [name], {why.test: [name]}).untested == []
    assert judge(reach, [name], {why.test: ["a"]}).untested == [f"{name}: {why.test}"]


@pytest.mark.parametrize("why", sorted(set(EXCLUDED.values())), ids=lambda why: str(why.test))
def test_what_is_excluded_has_a_unit_test(why: Excluded) -> None:
    """`make sim` runs it, and looks whether it takes the arm."""
    file, _, name = why.test.partition("::")
    assert f"def {name}(" in (UNIT / file).read_text(encoding="utf-8")


def test_what_is_excluded_is_in_the_machines() -> None:
    """In a process of its own, as the machines are imported here already."""
    code = (
        "from tests.sim import arms; arms.install()\n"
        "import tests.sim.world\n"
        "from tests.sim.reach import Reach, judge\n"
        "print(*judge(Reach(), arms.NAMES, {}).stale, sep='\\n', end='')"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT) == ""


def test_shards_that_follow_speed_make_a_mixed_world_faster() -> None:
    """One of three machines takes four times as long for a unit."""
    scene = replace(
        draw_by_chance(0), name="quiet", nodes=3, slots=1, min_workers=1, spares=0, steps=60, epoch_steps=1000, units=8,
        faults=(), store_trouble=0.0, copy_trouble=0.0, link_trouble=0.0, slowness=(1.0, 4.0, 1.0), uneven_s=0.5,
    )  # fmt: skip
    took_s = {}
    for policy in (Stragglers.IGNORE, Stragglers.NAME):
        verdict = World(5, scene=replace(scene, stragglers=policy)).run()
        took_s[policy] = verdict.duration_s
        assert verdict.ended.exit_code == 0
        assert (verdict.reached["shards followed speed"] > 0) == (policy is Stragglers.NAME)
    assert took_s[Stragglers.NAME] < 0.75 * took_s[Stragglers.IGNORE], took_s
