"""Jobs without waiting under virtual time, each from a seed: no acknowledged update is lost unless its owner and its
mirror are, and then it is named; none is applied twice; every unit is trained; each phase ends."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest

from runtime.asynchronous import phase_notes
from runtime.asynchronous.piece_copies import HeldPiece, PieceCopies
from runtime.asynchronous.store import ParameterStore
from runtime.asynchronous.units_left import finished_by
from tests.sim.phases import PhasesWorld
from tests.unit.thoroughness import EXAMPLES

SEEDS = EXAMPLES or 60
MUST_REACH = (
    "lost",
    "join",
    "drain",
    "frozen",
    "expelled",
    "fell back",
    "taken back",
    "summed again",
    "taken back where a phase begins",
)


def search(seeds: int) -> Counter[str]:
    reached: Counter[str] = Counter()
    for seed in range(seeds):
        try:
            reached.update(PhasesWorld(seed).run())
        except AssertionError as violation:
            raise AssertionError(f"seed {seed}: {violation}") from violation
    return reached


def test_every_job_without_waiting_ends_right() -> None:
    reached = search(SEEDS)
    assert [what for what in MUST_REACH if not reached[what]] == []


def _applied_again(copies: PieceCopies, worker: str, *others: Any) -> Any:
    """Whoever asks once more, as it has had no answer, is taken for one that asks for the first time."""
    for held in copies._held.values():
        held.applied.pop(worker, None)
    return JUDGE(copies, worker, *others)


def _always_in_step(copies: PieceCopies, generation: int, members: Any) -> Any:
    """Whatever a worker holds, it goes on with, and says nothing."""
    for piece in range(len(copies._start)):
        held = copies._held.setdefault(piece, HeldPiece(copies._start[piece].clone()))
        held.in_step = True
    return ENTER(copies, generation, members)


def _begins_in_step(store: ParameterStore, *about: Any, in_step: bool) -> None:
    """Also if it had left, and others have trained meanwhile."""
    BEGIN(store, *about)


BEGIN = ParameterStore.begin
JUDGE, ENTER = PieceCopies.judge, PieceCopies.enter


@pytest.mark.parametrize(
    ("owner", "name", "mutant", "said"),
    [
        (ParameterStore, "_mirrored", lambda *_: True, "has lost the acknowledged"),
        (PieceCopies, "judge", _applied_again, "applied twice"),
        (PieceCopies, "enter", _always_in_step, "has lost the acknowledged"),
        (PieceCopies, "mirror", lambda *_: [], "has lost the acknowledged|applied twice"),
        (ParameterStore, "begin", _begins_in_step, "has lost the acknowledged"),
        (phase_notes, "finished_by", lambda dead, count, *rest: finished_by(dead, count + 1, *rest), "was not trained"),
    ],
    ids=["no mirror", "applied again", "always in step", "mirrors nothing", "not away", "not yet finished"],
)
def test_a_wrong_rule_is_found(owner: Any, name: str, mutant: Any, said: str) -> None:
    with patch.object(owner, name, mutant), pytest.raises(AssertionError, match=said):
        search(300)
