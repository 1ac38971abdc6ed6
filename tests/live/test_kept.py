"""`elastic run --restart` with elastic.keep: a sharded script goes on from memory in a world of another size."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic.records.events.story import of_generation
from elastic.records.journal import read_all
from tests.live.jobs import ROOT, Job

SCRIPT = ROOT / "tests" / "live" / "programs" / "kept.py"
HELD = ROOT / "tests" / "live" / "held_site"
EXAMPLE = ROOT / "docs" / "examples" / "train_fsdp.py"
STEPS = 8


def alone(steps: int) -> str:
    """The digest of a quiet run of one process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(SCRIPT), "alone", str(steps)]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.strip()


def quiet(home: Path) -> tuple[str, list[dict[str, Any]], str]:
    """Of an undisturbed job with one worker: what its script has written, its ledger, and its digest."""
    files = home / "quiet files"
    files.mkdir()
    with Job(home, "--workers", "1", "--restart", str(SCRIPT), str(files), str(STEPS), name="quiet") as running:
        Rounds(running.until, files).open(*range(STEPS))
        assert running.wait() == 0, running.story()
        return (files / "digest").read_text(), running.steps(), str(running.result["digest"])


def recorded(lines: list[dict[str, Any]]) -> list[list[Any]]:
    """What the ledger has of each step, whatever workers have done it."""
    return [[line[name] for name in ("step", "epoch", "lr", "scalars", "samples")] for line in lines]


class Rounds:
    """The rounds of the script, by the files that it writes. until: as Job.until."""

    def __init__(self, until: Callable[..., Any], files: Path) -> None:
        self._until = until
        self._files = files

    def open(self, *steps: int) -> None:
        for step in steps:
            (self._files / f"{step}.go").touch()

    def started(self, number: int) -> dict[int, tuple[int, int, int]]:
        """Rank -> pid, world and first step, of the processes that have begun this round."""
        found = {}
        for path in self._files.glob(f"{number}.?"):
            if path.suffix[1:].isdigit():
                pid, world, first = map(int, path.read_text().split())
                found[int(path.suffix[1:])] = pid, world, first
        return found

    def done(self, number: int, rank: int) -> list[int]:
        """The steps that a process has done in this round; the number of a step is how many are done then."""
        path = self._files / f"{number}.{rank}.steps"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def await_step(self, step: int, world: int) -> int:
        """The newest round, once all of its processes have done so many steps; it has `world` ranks."""

        def reached() -> int | None:
            newest = max((int(path.name.split(".")[0]) for path in self._files.glob("*.0")), default=0)
            found = self.started(newest)
            here = len(found) == world and all(entry[1] == world for entry in found.values())
            at_least = [max(self.done(newest, rank), default=found[rank][2]) for rank in found]
            return newest + 1 if here and min(at_least) >= step else None

        found: int = self._until(f"step {step} in a world of {world}", reached) - 1
        return found

    def begun_after(self, number: int, world: int) -> int | None:
        """The newest round behind that one, if all of its processes have begun."""
        newest = max(int(path.name.split(".")[0]) for path in self._files.glob("*.0"))
        return newest if newest > number and len(self.started(newest)) == world else None

    def check(self, last: int, again: int) -> None:
        """All processes of a round begin with the same step, and at most so many steps are done again."""
        found = {number: self.started(number) for number in range(last + 1)}
        for number in range(1, last + 1):
            firsts = {first for _, _, first in found[number].values()}
            before = [max(self.done(number - 1, rank), default=0) for rank in found[number - 1]]
            assert len(firsts) <= 1
            if firsts and before:
                assert min(firsts) >= max(before) - again


def test_a_sharded_script_goes_on_from_memory_with_fewer_and_with_more_ranks(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    with Job(tmp_path, "--workers", "3", "--restart", str(SCRIPT), str(files), str(STEPS), site=HELD) as running:
        rounds = Rounds(running.until, files)
        rounds.open(0, 1, 2)
        number = rounds.await_step(3, world=3)
        running.shut("newcomer")
        pid, _, _ = rounds.started(number)[1]
        os.kill(pid, signal.SIGKILL)
        rounds.open(3)
        rounds.await_step(4, world=2)
        running.open("newcomer")
        rounds.open(4)
        number = rounds.await_step(5, world=3)
        rounds.open(*range(5, STEPS))
        assert running.wait() == 0, running.story()
        rounds.check(number, again=1)
        digest, lines, of_job = quiet(tmp_path)
        assert (files / "digest").read_text() == digest
        assert [line["step"] for line in lines] == list(range(STEPS)) and all(line["scalars"]["loss"] for line in lines)
        assert recorded(running.steps()) == recorded(lines), "each step once, with the mean of all units"
        assert {line["world_size"] for line in running.steps()} == {2, 3}
        assert running.result["digest"] == of_job != ""
        assert f"{STEPS} steps, " in running.output and f"digest {of_job}" in running.output
        read = {line for path in files.glob("*.opened") for line in path.read_text().splitlines()}
        segments = {path for path in read if path.startswith("/dev/shm/elastic-")}
        assert segments, "the state is read from memory"
        assert {
            path
            for path in read - segments
            if not path.startswith("/proc/") and not path.endswith((".py", ".pyc", ".so"))
        } == set()
        told = [moment.said for at in range(2, number + 2) for moment in of_generation(read_all(running.dir), at)]
        assert any("goes on from step" in said for said in told), told


@pytest.mark.long
def test_the_example_has_the_digest_of_one_process(tmp_path: Path) -> None:
    words = [str(EXAMPLE), "--steps", "60", "--print-every", "5", "--dim", "32"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    quiet = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True, env=environment)
    with Job(tmp_path, "--workers", "3", "--restart", *words, site=HELD) as running:
        running.until("some steps", lambda: "step 10 loss" in running.output)
        running.shut("newcomer")
        running.send(running.members()[0])
        running.await_event("script_started", world=2)
        running.open("newcomer")
        assert running.wait() == 0, running.story()
        assert len({line["world"] for line in running.events("script_started")}) == 2, "two and three processes"
        assert any(line["step"] >= 10 for line in running.events("kept_found"))
        assert quiet.stdout.splitlines()[-1] in running.output
