"""Rounds of random worlds that are killed at random points end with the digest of a quiet run."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.unit.sources import ROOT


def lines(program: str, *arguments: str) -> list[list[str]]:
    command = [sys.executable, "-m", f"tests.unit.runtime.recovery.kept.{program}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.long
def test_a_chain_of_rounds_has_the_digest_of_a_quiet_run() -> None:
    seeds = range(2, 13)
    ((_, _, quiet),) = lines("worlds", "long:1")
    found = lines("chains", *map(str, seeds))
    assert [line[-1] for line in found] == [quiet] * len(seeds), found
    assert max(int(again) for _, _, _, again, _ in found) <= 1
    assert sum(int(kills) for _, _, kills, _, _ in found) >= len(seeds), "rounds were ended by kills"
