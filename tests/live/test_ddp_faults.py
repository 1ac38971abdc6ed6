"""Unchanged torchrun scripts in every world, and on three nodes through random faults: the digest of one worker.

Each schedule prints its seed. SEED=n in the environment is that of the first schedule of each script, so
`SEED=n pytest -m long -k 'plain and faults0'` repeats schedule n.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic.records import ledger
from elastic.records.exactly_once import prove
from elastic.store.embedded import EmbeddedEtcd
from tests.live.jobs import DEADLINE_S, Job, Line
from tests.live.jobs import SCRIPTS as LIVE_SCRIPTS
from tests.live.spread import Spread
from tests.live.test_ddp import RANKS, SCRIPTS, digest

pytestmark = pytest.mark.long

EPOCHS = "6"
NAMES = ("plain", "trainer", "evaluated", "spawned", "endless", "accumulation")
FAULTS = ("kill", "kill", "kill rank 0", "freeze", "join", "drain")
SECONDS = 9.0
"""What the naps of three workers come to, so that newcomers have time to join."""

Quiet = Callable[[str], tuple[str, list[Line]]]


@pytest.fixture(scope="module")
def seed() -> int:
    return int(os.environ.get("SEED", time.time_ns() % 10**6))


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Quiet:
    """Script -> digest and ledger of one worker."""
    return functools.cache(lambda name: world(tmp_path_factory.mktemp(name), name, workers=1))


def world(home: Path, name: str, workers: int) -> tuple[str, list[Line]]:
    words = ("--workers", str(workers), "--ranks", RANKS, str(SCRIPTS / f"{name}.py"), EPOCHS)
    with Job(home, *words) as job:
        assert job.wait() == 0
        return digest(job), job.steps()


@pytest.mark.parametrize("workers", [2, 3, 4, 6])
@pytest.mark.parametrize("name", NAMES)
def test_every_world_has_the_digest_of_one_worker(name: str, workers: int, quiet: Quiet, tmp_path: Path) -> None:
    found, steps = world(tmp_path, name, workers)
    assert found == quiet(name)[0]
    assert ledger.compare(steps, quiet(name)[1]) is None
    assert proved(steps)


def proved(steps: list[Line]) -> bool:
    """Whether the ledger proves that each rank had what its DistributedSampler gives it, once, as far as it goes."""
    epochs = prove(steps)
    return all(epoch.proved and epoch.order == "sampler" for epoch in epochs) and bool(epochs)


@pytest.mark.parametrize("number", range(20), ids=lambda number: f"faults{number}")
@pytest.mark.parametrize("name", NAMES)
def test_random_faults_change_no_bit(
    name: str, number: int, seed: int, quiet: Quiet, etcd: EmbeddedEtcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, lines = quiet(name)
    turns = 2 * len(lines)  # of a worker that has two of the four ranks
    monkeypatch.setenv("NAP", str(SECONDS / turns))
    monkeypatch.setenv("SNAPSHOT", str(tmp_path / "snapshot.pt"))
    random_ = random.Random(seed + number)
    done = []
    command = (sys.executable, str(SCRIPTS / f"{name}.py"), EPOCHS)
    job_name = f"{name}-{seed + number}"
    with Spread(tmp_path, etcd, job_name, command=command, ranks=int(RANKS), workers=3, max_workers=4) as job:
        job.rendezvous()
        faults = Faults(job, random_)
        epoch = sum(line["epoch"] == 0 for line in lines)
        kinds = random_.sample(FAULTS, random_.randint(1, 3))
        drawn = [(random_.randrange(epoch if kind == "join" else 1, 3 * epoch), kind) for kind in kinds]
        for step, kind in sorted(drawn):
            faults.await_step(step)
            done.append(f"{kind} in step {step}: {faults.do(kind)}")
        result = job.await_result()
        joined = [line["worker_id"] for line in job.events("joined")]
        print(f"seed {seed + number} {name}:", "; ".join(done), f"({len(joined)} joined)")
        assert (result["exit_code"], result["digest"]) == (0, wanted)
        for agent in faults.agents:
            assert agent.wait(DEADLINE_S) == 0
        # A node's file ends before a step that it had no members in, so the last steps may be on no file.
        on_file = job.steps()
        assert ledger.compare(on_file, [lines[line["step"]] for line in on_file]) is None
        assert proved(on_file)


class Faults:
    """Of a job over the nodes a, with two workers, b, and, from a join on, c. At least one worker that has the state is
    left alone."""

    def __init__(self, job: Spread, random_: random.Random) -> None:
        self.agents = [job.agent("a", slots=2), job.agent("b")]
        self._job, self._random = job, random_
        self._hit: set[str] = set()

    @property
    def over(self) -> bool:
        return (self._job.dir / "result.json").exists()

    def await_step(self, step: int) -> None:
        self._job.until(f"step {step}", lambda: self.over or self._job.status().get("applied", 0) > step)

    def do(self, kind: str) -> str:
        """Who was hit, or that the job was over before."""
        job = self._job
        if kind == "join":
            self.agents.append(job.agent("c"))
            return "c"
        several = job.until("workers to spare", lambda: ["over"] if self.over else self._able(kind))
        victim = several[0] if kind == "kill rank 0" else self._random.choice(several)
        if self.over:
            return "over"
        if kind == "drain":
            node = victim.split(".")[0]
            job.give_notice(node, DEADLINE_S)
            job.until(f"{node} is empty", lambda: self.over or node not in self._nodes(job.members()))
            job.notice(node).unlink()
            return node
        self._hit.add(victim)
        job.kill(victim, signal.SIGSTOP if kind == "freeze" else signal.SIGKILL)
        if kind == "freeze":
            job.until(f"{victim} is expelled", lambda: self.over or job.events("expelled", worker_id=victim))
            job.kill(victim, signal.SIGCONT)
        return victim

    def _able(self, kind: str) -> list[str]:
        """Members that have the state, in rank order, if one of them can go."""
        found = [m["worker_id"] for m in self._job.status()["members"] if m["applied"]]
        able = [worker for worker in found if worker not in self._hit]
        if kind == "kill rank 0" and able[:1] != found[:1]:
            return []
        return able if len(self._nodes(able) if kind == "drain" else able) > 1 else []

    @staticmethod
    def _nodes(workers: list[str]) -> set[str]:
        return {worker.split(".")[0] for worker in workers}


@pytest.mark.parametrize("workers", [1, 3])
def test_a_run_goes_on_at_a_last_step_that_has_fewer_batches(workers: int, tmp_path: Path) -> None:
    """A script that is started again begins with the first batch of its epoch, so in another branch of its loop."""
    options = ("--workers", str(workers), "--ranks", "1", "--checkpoint-every", "3 steps", "--snapshot-every", "off")
    words = (*options, str(LIVE_SCRIPTS / "short_last_step.py"))
    with Job(tmp_path, *words) as job:
        job.await_event("checkpoint_complete")
        job.command.process.kill()
        job.wait()
    with Job(tmp_path, *words, name="quiet") as alone:
        (alone.gates / "last").touch()
        assert alone.wait() == 0
        wanted = digest(alone)
    with Job(tmp_path, *words) as job:
        (job.gates / "last").touch()
        assert job.wait() == 0, job.output
        assert digest(job) == wanted
