"""A few hundred jobs in rounds under virtual time, each from a seed: nobody starts before all are ready, one worker is
blamed and the same by all, and the job ends."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from runtime.frontends.restart import rounds
from runtime.frontends.restart.rounds import AllDone, GoOn, ScriptState, StartScript
from tests.sim.rounds import RoundsWorld

SEEDS = 300
MUST_REACH = ("all lost", "ended in part", "failed", "failing", "hang", "join", "killed", "lost", "lost at the end")


def search(seeds: int) -> Counter[str]:
    reached: Counter[str] = Counter()
    for seed in range(seeds):
        try:
            reached.update(RoundsWorld(seed).run())
        except AssertionError as violation:
            raise AssertionError(f"seed {seed}: {violation}") from violation
    return reached


def test_every_job_in_rounds_ends_right() -> None:
    reached = search(SEEDS)
    assert [what for what in MUST_REACH if not reached[what]] == []


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


def _blames_itself(*words: Any, **options: Any) -> rounds.Decision:
    """Whoever decides first; each of them blames another one."""
    found = SOUND(*words, **options)
    calls.update(["blame"])
    if isinstance(found, rounds.Blame):
        return replace(found, worker=words[1][calls["blame"] % len(words[1])])
    return found


SOUND = rounds.decide
calls: Counter[str] = Counter()


@pytest.mark.parametrize(
    ("mutant", "said"),
    [
        (_knows_its_generation_only, "some leave, and some do not"),
        (_starts_early, "ready|round|store|scripts|different"),
        (_ends_early, "has not ended well|some leave"),
        (_never_hangs, "does not end"),
        (_hangs_soon, "gets on"),
        (_blames_itself, "different decisions"),
    ],
)
def test_a_wrong_decision_is_found(mutant: Any, said: str) -> None:
    with patch.object(rounds, "decide", mutant), pytest.raises(AssertionError, match=said):
        search(SEEDS)
