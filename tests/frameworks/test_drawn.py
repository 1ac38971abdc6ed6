"""Random scripts of Trainer and Lightning under random faults, other ones each time: the bits, the ledger and what was
logged are those of the quiet run. FATES_SEED=n begins with that trial."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest

from tests.fates.draw import FRAMEWORKS, Program, Trial
from tests.fates.many import many
from tests.fates.play import play

TRIALS = 6


def test_every_fate_of_a_framework_ends_as_its_quiet_run(tmp_path: Path) -> None:
    first = int(os.environ.get("FATES_SEED", secrets.randbelow(10**9)))
    summary = many(first, trials=TRIALS, minutes=20.0, processes=2, home=tmp_path, kinds=FRAMEWORKS)
    again = f"python -m tests.fates --kinds {','.join(FRAMEWORKS)} --trials 1 --seed"
    assert summary["failed"] == [], f"{again} {summary['failed'][:1]}"


@pytest.mark.parametrize("kind", FRAMEWORKS)
def test_samples_that_are_drawn_anew_in_an_evaluation_are_those_of_one_worker(kind: str, tmp_path: Path) -> None:
    """The learning rate depends on them."""
    program = Program(
        kind=kind,
        model="dropout",
        optimizer="sgd",
        schedule="plateau",
        source="loader",
        shards=2,
        batch_size=4,
        samples=64,
        epochs=3,
        steps=8,
        every=1,
        extras=("evaluate", "noisy_data"),
        pause_ms=1,
    )
    assert play(Trial(0, program, workers=2, options=(), sums=(), strikes=()), tmp_path).generations == 1
