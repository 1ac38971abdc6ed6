"""A script in rounds under faults, and the judge of such a job: each planted defect is found by its invariant."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos_tests.checkers import Truth
from chaos_tests.scenario.schedule import PRESETS
from tests.chaos.runs import Undisturbed, disturbed, told, undisturbed_kept, undisturbed_rounds
from tests.mutants.catalogue import MUTANTS


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return undisturbed_rounds(tmp_path_factory.mktemp("quiet"), steps=100)


def test_the_sound_product_passes_every_kind_of_the_preset(tmp_path: Path) -> None:
    quiet = undisturbed_rounds(tmp_path / "quiet", steps=300)
    kinds = tuple(sorted(PRESETS["rounds"].weights))
    verdicts = disturbed(tmp_path / "sound", quiet, kinds, gap_s=1.0)
    assert verdicts.pop("I20").answer is Truth.NOT_APPLICABLE  # the script keeps nothing
    assert {verdict.answer for verdict in verdicts.values()} == {Truth.TRUE}, told(verdicts)


@pytest.mark.parametrize("preset", ["rounds-kept", "rounds-kept-nodes"])
def test_a_script_that_keeps_its_state_has_the_bits_of_the_quiet_run(preset: str, tmp_path: Path) -> None:
    """The script compares them itself, and fails if they differ."""
    quiet = undisturbed_kept(tmp_path / "quiet", steps=300)
    kinds = tuple(sorted(PRESETS[preset].weights))
    verdicts = disturbed(tmp_path / "sound", quiet, kinds, gap_s=1.0)
    assert {verdict.answer for verdict in verdicts.values()} == {Truth.TRUE}, told(verdicts)


@pytest.mark.parametrize("name", [name for name, mutant in MUTANTS.items() if mutant.rounds])
def test_a_mutant_is_caught(name: str, quiet: Undisturbed, tmp_path: Path) -> None:
    mutant = MUTANTS[name]
    verdicts = disturbed(tmp_path / "mutant", quiet, mutant.faults, gap_s=mutant.gap_s, mutant=name)
    print(told(verdicts))
    assert verdicts[mutant.caught_by].answer is Truth.FALSE, told(verdicts)
