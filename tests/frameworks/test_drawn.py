"""Random scripts of Trainer and Lightning under random faults, other ones each time: the bits, the ledger and what was
logged are those of the quiet run. FATES_SEED=n begins with that trial."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from tests.fates.draw import FRAMEWORKS
from tests.fates.many import many

TRIALS = 6


def test_every_fate_of_a_framework_ends_as_its_quiet_run(tmp_path: Path) -> None:
    first = int(os.environ.get("FATES_SEED", secrets.randbelow(10**9)))
    summary = many(first, trials=TRIALS, minutes=20.0, processes=2, home=tmp_path, kinds=FRAMEWORKS)
    again = f"python -m tests.fates --kinds {','.join(FRAMEWORKS)} --trials 1 --seed"
    assert summary["failed"] == [], f"{again} {summary['failed'][:1]}"
