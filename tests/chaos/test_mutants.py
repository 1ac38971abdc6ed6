"""The judge is judged: each planted defect is found by the invariant that is there for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos_tests.checkers import Truth
from tests.chaos.runs import Undisturbed, disturbed, told, undisturbed
from tests.mutants.catalogue import MUTANTS


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return undisturbed(tmp_path_factory.mktemp("quiet"), epochs=8)


def test_the_sound_product_passes(quiet: Undisturbed, tmp_path: Path) -> None:
    verdicts = disturbed(tmp_path / "sound", quiet, ("kill", "freeze-long", "kill-rank-0", "kill-two"), gap_s=2.0)
    assert {verdict.answer for verdict in verdicts.values()} == {Truth.TRUE}, told(verdicts)


@pytest.mark.parametrize("name", [name for name, mutant in MUTANTS.items() if not mutant.rounds])
def test_a_mutant_is_caught(name: str, quiet: Undisturbed, tmp_path: Path) -> None:
    mutant = MUTANTS[name]
    verdicts = disturbed(tmp_path / "mutant", quiet, mutant.faults, gap_s=mutant.gap_s, mutant=name)
    print(told(verdicts))
    assert verdicts[mutant.caught_by].answer is Truth.FALSE, told(verdicts)
