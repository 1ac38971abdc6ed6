"""`elastic run --restart` over several nodes, and in a fleet: a round follows whatever happens to a node."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from elastic import cli
from elastic.errors import ExitCode
from elastic.store.embedded import EmbeddedEtcd
from tests.live.fleet import Fleet, lives
from tests.live.jobs import ROOT
from tests.live.spread import Spread, losses

SCRIPT = ROOT / "tests" / "live" / "programs" / "restarted.py"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Where the script writes, on all nodes."""
    directory = tmp_path / "files"
    directory.mkdir()
    return directory


Make = Callable[..., Spread]


@pytest.fixture
def spread(tmp_path: Path, files: Path) -> Iterator[Make]:
    with ExitStack() as stack:
        etcd = stack.enter_context(EmbeddedEtcd())

        def make(**spec: Any) -> Spread:
            command = (sys.executable, str(SCRIPT), str(files))
            job = stack.enter_context(Spread(tmp_path, etcd, "rounds", command=command, restart=True, **spec))
            job.rendezvous()
            return job

        yield make


class Rounds:
    """The rounds of a script, by the files that it writes."""

    def __init__(self, files: Path, until: Callable[..., Any]) -> None:
        self._files = files
        self._until = until

    def next(self, world: int, after: int = -1) -> int:
        """The number of the first round behind that one which has so many ranks and has formed its group."""
        found: int = self._until(f"a round of {world} behind {after}", lambda: self._formed(world, after)) - 1
        return found

    def _formed(self, world: int, after: int) -> int | None:
        """Plus 1, as 0 is not true."""
        ranks: dict[int, set[str]] = {}
        for path in self._files.iterdir():
            rank, size, number, *rest = path.name.split(".")
            if not rest and number.isdigit() and int(size) == world and int(number) > after:  # else it is being written
                ranks.setdefault(int(number), set()).add(rank)
        return next((number + 1 for number, there in sorted(ranks.items()) if len(there) == world), None)

    def environment(self, rank: int, world: int, number: int) -> dict[str, str]:
        said: dict[str, str] = json.loads((self._files / f"{rank}.{world}.{number}.json").read_text())
        return said

    def pid(self, rank: int, world: int, number: int) -> int:
        return int((self._files / f"{rank}.{world}.{number}").read_text())

    def saved(self, world: int, number: int) -> set[int]:
        """Ranks of a round that were asked to stop, and have saved."""
        return {int(path.name.split(".")[0]) for path in self._files.glob(f"?.{world}.{number}.saved")}

    def asked(self, world: int, number: int) -> dict[str, Any]:
        """Node number -> the notice that its script had when it was asked to stop; of one script a node."""
        found = {}
        for rank in self.saved(world, number):
            node = self.environment(rank, world, number)["GROUP_RANK"]
            found[node] = json.loads((self._files / f"{rank}.{world}.{number}.saved").read_text())
        return found

    def end(self) -> None:
        (self._files / "end").touch()


@pytest.mark.long
def test_a_node_that_dies_costs_a_round_and_its_return_another_one(spread: Make, files: Path) -> None:
    job = spread(workers=3)
    rounds = Rounds(files, job.until)
    job.agent("a", slots=2)
    lost = job.agent("b")
    first = rounds.next(3)
    places = [rounds.environment(rank, 3, first) for rank in range(3)]
    assert sorted((e["GROUP_RANK"], e["LOCAL_RANK"], e["LOCAL_WORLD_SIZE"]) for e in places) in (
        [("0", "0", "2"), ("0", "1", "2"), ("1", "0", "1")],  # rank 0 is on node a
        [("0", "0", "1"), ("1", "0", "2"), ("1", "1", "2")],
    )
    assert {e["GROUP_WORLD_SIZE"] for e in places} == {"2"}
    script = next(rounds.pid(r, 3, first) for r in range(3) if places[r]["LOCAL_WORLD_SIZE"] == "1")
    lost.kill()  # the kernel ends its worker and the script with it
    second = rounds.next(2, first)
    assert not lives(script)
    assert {rounds.environment(rank, 2, second)["GROUP_WORLD_SIZE"] for rank in range(2)} == {"1"}
    job.agent("b")
    third = rounds.next(3, second)
    assert rounds.saved(2, second) == {0, 1}, "a planned change lets scripts save"
    assert third > second > first
    rounds.end()
    assert job.await_result()["exit_code"] == 0


@pytest.mark.long
def test_a_drain_lets_the_scripts_save_and_loses_nobody(
    spread: Make, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = spread()
    rounds = Rounds(files, job.until)
    job.agent("a")
    job.agent("b")
    first = rounds.next(2)
    words = ["drain", "--job-dir", str(job.dir), "--node", "b"]
    assert cli.main([*words, "--budget", "90"]) == ExitCode.DONE
    assert capsys.readouterr().out == "node b is empty; the job goes on with 1 worker, on a\n"
    second = rounds.next(1, first)
    asked = rounds.asked(2, first)
    assert sorted(asked) == ["0", "1"], "both scripts were asked to stop"
    assert sorted(asked.values(), key=str) == [None, ["asked", "operator", True]], "and one node has to go"
    assert cli.main([*words, "--cancel"]) == ExitCode.DONE
    third = rounds.next(2, second)
    assert rounds.asked(1, second) == {"0": None}
    job.give_notice("a", 60.0)
    rounds.next(1, third)
    assert sorted(rounds.asked(2, third).values(), key=str) == [None, ["reclaim", f"file {job.notice('a')}", True]]
    rounds.end()
    assert job.await_result()["exit_code"] == 0
    assert losses(job) == []


@pytest.mark.long
def test_a_job_of_a_fleet_runs_rounds_through_the_death_of_a_script(tmp_path: Path, files: Path) -> None:
    with Fleet(tmp_path, nodes=("a", "b")) as fleet:
        rounds = Rounds(files, fleet.until)
        command, checkpoints = ["python", str(SCRIPT), str(files)], str(tmp_path / "checkpoints")
        job = fleet.submit(name="rounds", command=command, workers=2, restart=True, checkpoint_dir=checkpoints)
        first = rounds.next(2)
        os.kill(rounds.pid(0, 2, first), signal.SIGKILL)
        second = rounds.next(2, first)
        assert fleet.status(job)["restart"] is True
        rounds.end()
        assert fleet.await_end(job)["exit_code"] == 0
        assert second > first
