"""A few hundred jobs in rounds under virtual time, each from a seed: nobody starts before all are ready, one worker is
blamed and the same by all, no more steps are done again than there may be, and the job ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from elastic.protocol.worker_id import node_of
from runtime.frontends.restart import rounds
from runtime.frontends.restart.rounds import AllDone, GoOn, ScriptState, StartScript
from runtime.recovery.kept import agreed_end
from runtime.recovery.kept.choice import KeptStep, KnownStep, RoundNumber
from tests.sim.rounds import RoundsWorld

SEEDS = 180
MUST_REACH = (
    *("all lost", "ended in part", "failed", "failing", "hang", "join", "killed", "lost", "lost at the end"),
    *("waited", "copied", "done again", "node lost", "torn", "two nodes lost", "drain", "agreed"),
    *("several done again", "void", "off", "room awaited"),
)


def search(seeds: int, *, rare: bool = False) -> Counter[str]:
    reached: Counter[str] = Counter()
    for seed in range(seeds):
        try:
            reached.update(RoundsWorld(seed, rare=rare).run())
        except AssertionError as violation:
            raise AssertionError(f"seed {seed}: {violation}") from violation
    return reached


def violations_where_few_are_kept() -> Iterator[str]:
    for seed in range(SEEDS):
        try:
            RoundsWorld(seed, rare=True).run()
        except AssertionError as violation:
            yield str(violation)


def test_every_job_in_rounds_ends_right() -> None:
    reached = search(SEEDS)
    assert [what for what in MUST_REACH if not reached[what]] == []


def test_so_it_does_where_few_steps_are_kept_and_mirrors_have_them_late() -> None:
    reached = search(SEEDS // 3, rare=True)
    assert [what for what in ("several done again", "void", "node lost", "copied") if not reached[what]] == []


def test_what_lacked_when_a_round_began_is_not_awaited_once_more() -> None:
    """Two machines are lost, a round begins anew, and a third machine is lost in it."""
    assert {"two nodes lost", "waited"} <= RoundsWorld(10283).run()


def test_nor_when_all_workers_of_that_round_are_lost() -> None:
    reached = RoundsWorld(2919, rare=True).run()
    assert {"all lost", "void"} <= reached and "waited" not in reached


def test_a_machine_that_has_missed_rounds_waits_for_those_that_may_have_more() -> None:
    """It is the only one left, and its own segments tell of a step that it has not whole."""
    reached = RoundsWorld(6158, rare=True).run()
    assert {"two nodes lost", "waited"} <= reached


def two_machines_lose_their_workers(seed: int) -> set[str]:
    """At one instant, of three; their memory stays. What the job has gone through."""
    world = RoundsWorld(seed, rare=seed % 2 == 1)
    world.size = world.nodes = 3
    world.incarnations, world.troubles = [0] * world.size, 0

    def away() -> None:
        for name in world.generations[-1][1:]:
            world.die(name)

    world.clock.after(world.clock.between(5.0, 35.0), away)
    return world.run()


def test_their_memory_is_waited_for() -> None:
    assert sum("waited" in two_machines_lose_their_workers(seed) for seed in range(60)) > 30


def test_a_survivor_that_takes_its_own_report_for_all_is_found() -> None:
    """As it was once: reports of the round before, of those who are left, are as good as those of all."""

    def of_round(reports: Any, members: Any, generation: int) -> Any:
        found = [reports[worker] for worker in members if worker in reports]
        return found if len(found) == len(members) and all(one.generation == generation for one in found) else []

    with patch.object(rounds, "of_round", of_round), pytest.raises(AssertionError, match="done again"):
        for seed in range(60):
            two_machines_lose_their_workers(seed)


def _knows_its_generation_only(*words: Any, **options: Any) -> rounds.Decision:
    """As it was once: who has heard of the next generation does not see that all scripts have ended."""
    reports, _, generation = words
    found = SOUND(*words, **options)
    late = isinstance(found, AllDone) and any(report.generation != generation for report in reports.values())
    return GoOn() if late else found


def _starts_early(*words: Any, **options: Any) -> rounds.Decision:
    """Before all others have ended their scripts."""
    reports, members, _ = words
    first = reports.get(members[0])
    ready = first is not None and first.store is not None and first.state is ScriptState.WAITING
    return StartScript(first.store) if ready else SOUND(*words, **options)


def _ends_early(*words: Any, **options: Any) -> rounds.Decision:
    """When the first script has ended well."""
    reports = words[0]
    done = any(report.state is ScriptState.DONE for report in reports.values())
    return AllDone() if done else SOUND(*words, **options)


def _never_hangs(*words: Any, **options: Any) -> rounds.Decision:
    return SOUND(*words, **{**options, "hang_s": float("inf")})


def _hangs_soon(*words: Any, **options: Any) -> rounds.Decision:
    return SOUND(*words, **{**options, "hang_s": 0.0})


def _waits_for_no_room(*words: Any, **options: Any) -> rounds.Decision:
    """As it was once: what all machines have kept is void, as one memory is full for a moment."""
    found = SOUND(*words, **options)
    if not isinstance(found, rounds.AwaitRoom):
        return found
    reports, members, _ = words
    store = reports[members[0]].store
    assert store is not None, "the store of another round"
    return StartScript(store, without=found.workers)


def _blames_itself(*words: Any, **options: Any) -> rounds.Decision:
    """Whoever decides first; each of them blames another one."""
    found = SOUND(*words, **options)
    calls.update(["blame"])
    if isinstance(found, rounds.Blame):
        return replace(found, worker=words[1][calls["blame"] % len(words[1])])
    return found


def _settles_early(reports: Any, members: Any, generation: int, begun: int) -> bool:
    """When the first script has kept a step."""
    return any(one.generation == generation and one.kept > begun for one in reports.values())


def _settles_with_one_step(reports: Any, members: Any, generation: int, begun: int) -> bool:
    """When each script has kept one, which may not be mirrored."""
    found = rounds.of_round(reports, members, generation)
    return bool(found) and all(one.kept > begun for one in found)


def _settles_by_numbers(reports: Any, members: Any, generation: int, begun: int) -> bool:
    """As it was once: so many steps after the first one, of which not each is kept."""
    found = rounds.of_round(reports, members, generation)
    return bool(found) and all(one.kept >= begun + (3 if _several(members) else 2) for one in found)


def _records_by_numbers(reports: Any, members: Any, generation: int) -> int:
    """As it was once: up to the step before the newest one that is kept, though no mirror may have it."""
    found = rounds.of_round(reports, members, generation)
    return min((one.kept for one in found), default=-1) - _several(members)


def _awaits_by_numbers(known: Any, held: Any, source: Any, members: Any) -> Any:
    """As it was once: a machine is waited for if more than one step lacks."""
    away = () if known is None else tuple(sorted(set(known.nodes) - set(map(node_of, members))))
    newest = max([one.step for one in held], default=0)
    found = known is None or away
    known = KnownStep(RoundNumber(0, 1), newest, away)
    return known if found and newest > (source.step if source is not None else 0) + 1 else None


def _several(members: Any) -> bool:
    return len(set(map(node_of, members))) > 1


def _takes_what_is_not_whole(held: Any) -> Any:
    newest = max(held, default=None)
    return None if newest is None else KeptStep(newest.step, newest.round, newest.group)


SOUND = rounds.decide
calls: Counter[str] = Counter()


@pytest.mark.parametrize(
    ("name", "mutant", "said"),
    [
        ("decide", _knows_its_generation_only, "some leave, and some do not"),
        ("decide", _starts_early, "ready|round|store|scripts|different|done again"),
        ("decide", _ends_early, "has not ended well|some leave|no digest"),
        ("decide", _never_hangs, "does not end"),
        ("decide", _hangs_soon, "gets on"),
        ("decide", _blames_itself, "different decisions"),
        ("decide", _waits_for_no_room, "for a moment without room"),
        ("is_settled", _settles_early, "done again"),
        ("newest_whole", _takes_what_is_not_whole, "not whole"),
        ("thin_parts", lambda held, source, members: [], "done again"),
    ],
)
def test_a_wrong_decision_is_found(name: str, mutant: Any, said: str) -> None:
    with patch.object(rounds, name, mutant), pytest.raises(AssertionError, match=said):
        search(SEEDS)


@pytest.mark.parametrize(
    ("name", "mutant", "said"),
    [
        ("is_settled", _settles_with_one_step, "done again"),
        ("is_settled", _settles_by_numbers, "done again"),
        ("safe_step", _records_by_numbers, "in the ledger, and is done again"),
        ("awaited", _awaits_by_numbers, "a step on its way to its mirrors"),
    ],
)
def test_a_wrong_decision_is_found_where_few_steps_are_kept(name: str, mutant: Any, said: str) -> None:
    with patch.object(rounds, name, mutant):
        assert any(said in violation for violation in violations_where_few_are_kept())


@pytest.mark.parametrize(
    ("name", "mutant"), [("AHEAD", 0), ("last_step", lambda seen, world, step: step + agreed_end.AHEAD)]
)
def test_a_last_step_that_some_have_behind_them_is_found(name: str, mutant: Any) -> None:
    with patch.object(agreed_end, name, mutant), pytest.raises(AssertionError, match="do not end behind one step"):
        search(SEEDS)
