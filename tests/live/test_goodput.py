"""The goodput benchmark with real jobs and real faults, in its smallest size; its figures are not looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench import goodput
from tests.bench.goodput import KILLS, MIXED, QUIET, THEIR_KILLS, THEIRS
from tests.bench.legs import KILL


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_leg_trains_is_hit_and_is_told_of(tmp_path: Path) -> None:
    found = goodput.measure(tmp_path, goodput.SMALL, seed=2)
    assert {name: len(of) for name, of in found.legs.items()} == dict.fromkeys(goodput.ORDER, 1)
    assert not found.legs[QUIET][0].faults and not found.legs[THEIRS][0].faults
    assert found.legs[KILLS][0].faults.keys() == found.legs[THEIR_KILLS][0].faults.keys() == {KILL}
    assert sum(found.legs[MIXED][0].faults.values()) >= 1
    assert found.legs[MIXED][0].faults.keys() <= set(goodput.kinds_of(found.together))
    assert found.legs[KILLS][0].stall_s > 0 and found.legs[KILLS][0].redo_s >= 0
    assert all(found.legs[name][0].steps > 0 for name in (QUIET, THEIRS))
    assert goodput.summary(found).startswith("goodput: kill15=")
