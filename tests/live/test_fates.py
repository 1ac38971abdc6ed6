"""Random trainings under random fates: ten minutes of other ones each time. FATES_SEED=n begins with that trial."""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fates import draw
from tests.fates.many import many
from tests.fates.play import Broken, play

pytestmark = pytest.mark.long
MINUTES = float(os.environ.get("FATES_MINUTES", "10"))


@pytest.mark.timeout(60 * MINUTES + 1200)  # the last trials begin within those minutes
def test_every_fate_ends_in_the_bits_and_the_ledger_of_the_quiet_run(tmp_path: Path) -> None:
    first = int(os.environ.get("FATES_SEED", secrets.randbelow(10**9)))
    summary = many(first, trials=0, minutes=MINUTES, processes=2, home=tmp_path)
    failed = summary["failed"]
    assert failed == [], f"python -m tests.fates --seed {failed[0]} --trials 1"
    assert summary["strikes"] > summary["skipped"]


def test_a_script_whose_bits_depend_on_the_world_is_noticed(tmp_path: Path) -> None:
    program = draw.Program(
        kind="steps",
        model="mlp",
        optimizer="sgd",
        schedule="none",
        source="loader",
        shards=4,
        batch_size=8,
        samples=64,
        epochs=0,
        steps=40,
        every=1,
        extras=(draw.INEXACT,),
        pause_ms=2,
    )
    quiet = draw.Trial(0, program, workers=2, options=(), sums=(), strikes=())
    with pytest.raises(Broken, match="differs in scalars"):
        play(quiet, tmp_path)
    exact = tmp_path / "exact"
    exact.mkdir()
    assert play(replace(quiet, program=replace(program, extras=())), exact).commands == 1, "its bits are the same"
