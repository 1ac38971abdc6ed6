"""Scripts for Horovod: every death in those that are hard to survive, jobs that go on, and ranks that have joined."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import elastic.horovod.torch as hvd
from elastic.records import ledger
from tests.live.jobs import ROOT, Job
from tests.live.test_ddp import digest
from tests.unit.jobs import one_thread
from tests.unit.runtime.frontends.horovod import attacks
from tests.unit.runtime.frontends.horovod.members import together

SCRIPTS = ROOT / "tests" / "frameworks" / "scripts"
STEPS = 24


@pytest.fixture
def threads() -> Iterator[None]:
    with one_thread(), torch.autograd.set_multithreading_enabled(False):
        yield


@pytest.mark.parametrize("dies", ["w0", "w1", "w2"])
@pytest.mark.parametrize("options", [{}, {"compression": hvd.Compression.fp16}, {"op": hvd.Sum}])
def test_many_tensors_survive_every_death(threads: None, dies: str, options: dict[str, Any]) -> None:
    for operation in range(1, attacks.OPERATIONS):
        _, workers = together(3, partial(attacks.many, **options), kills={dies: (operation, 0)})
        first, *others = (worker.weights for name, worker in sorted(workers.items()) if name != dies)
        assert first and all(weights == first for weights in others), operation


@pytest.mark.parametrize("admitted", range(1, attacks.STEPS))
def test_a_newcomer_comes_to_many_tensors_in_any_step(threads: None, admitted: int) -> None:
    for copied in range(1, admitted + 1):
        world, workers = together(2, attacks.many, newcomers=1, asked_at=0, copy_at=copied, admit_at=admitted)
        assert world.joined_at == {"n0": admitted}
        first, *others = (worker.weights for worker in workers.values())
        assert first and all(weights == first for weights in others), copied


def words(workers: int, pause_s: float) -> tuple[str, ...]:
    options = ("--workers", str(workers), "--checkpoint-every", "4 steps")
    return (*options, str(SCRIPTS / "horovod_many.py"), str(STEPS), str(pause_s))


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> str:
    with Job(tmp_path_factory.mktemp("quiet"), *words(1, 0.0), name="quiet") as job:
        assert job.wait() == 0, job.output
        return digest(job)


def living(job: Job, killed: set[str]) -> list[str]:
    """Members by rank, but for those that were killed."""
    members = [str(member["worker_id"]) for member in job.status()["members"]]
    return [worker for worker in members if worker not in killed]


def test_two_deaths_cost_no_step_of_a_job_with_many_tensors(tmp_path: Path, wanted: str) -> None:
    """Each death is of the worker with rank 0, behind a step that has been held up until both workers are there."""
    with Job(tmp_path, *words(2, 0.3)) as job:
        gates = ("3", "12", str(STEPS - 1))
        for gate in gates:
            job.shut(gate)
        killed = set[str]()
        for gate in gates:
            job.until("full world", lambda: len(living(job, killed)) == 2)
            job.open(gate)
            if gate != gates[-1]:
                victim = living(job, killed)[0]
                job.send(victim)
                killed.add(victim)
        assert job.wait() == 0, job.output
        numbers = [line["step"] for line in job.steps()]
        assert numbers == list(range(len(numbers)))
        assert digest(job) == wanted, job.output


def test_a_job_that_has_lost_everything_goes_on_with_its_momentum(tmp_path: Path, wanted: str) -> None:
    """The optimizers are broadcast before the loop, when they are those of a new job, and in it."""
    with Job(tmp_path, *words(2, 0.2)) as job:
        job.await_steps(10)
        job.command.process.kill()
        job.wait()
        assert job.left_behind() == {}
    with Job(tmp_path, *words(2, 0.0)) as job:
        assert job.wait() == 0, job.output
        begun = [line for line in job.output.splitlines() if line.startswith("begins at step ")]
        assert int(begun[0].split()[3]) >= 8, job.output
        assert digest(job) == wanted, job.output
        assert ledger.read(job.dir / "steps.jsonl")


def test_a_job_that_has_lost_everything_goes_on_in_the_middle_of_its_epoch(tmp_path: Path) -> None:
    """ElasticSampler deals what was left at the checkpoint, each sample once, and whole epochs behind it."""
    samples, epochs, seen = 120, 2, tmp_path / "seen.jsonl"

    def run(pause_s: float) -> Job:
        options = ("--workers", "2", "--checkpoint-every", "4 steps", str(SCRIPTS / "horovod_sampler.py"))
        return Job(tmp_path, *options, str(samples), str(epochs), str(pause_s), str(seen))

    with run(0.2) as job:
        job.await_steps(20)
        job.command.process.kill()
        job.wait()
        assert job.left_behind() == {}
    seen.unlink()
    with run(0.0) as job:
        assert job.wait() == 0, job.output
        begun = re.findall(r"epoch (\d+) behind (\d+) samples, 2 workers", job.output)[0]
        epoch, processed = int(begun[0]), int(begun[1])
        assert epoch == 0 and 2 * 16 <= processed < samples, job.output
        order = list(range(samples))
        random.Random(3).shuffle(order)
        trained = [json.loads(line) for line in seen.read_text().splitlines()]
        assert sorted(trained) == sorted([0, number] for number in order[processed:]) + [
            [1, number] for number in range(samples)
        ]


def test_ranks_that_have_joined_survive_a_death_of_another_one(tmp_path: Path) -> None:
    """A death before anybody has joined, and one when rank 1 has: each time the script begins anew."""
    options = ("--restart", "--workers", "2", str(SCRIPTS / "horovod_joined.py"), "0.3")
    with Job(tmp_path, *options) as job:
        for number, line in enumerate(("batch 2 of 2 ranks", "batch 9 of 2 ranks")):
            job.until(line, lambda line=line: line in job.output)  # type: ignore[misc]
            job.send(next(worker for worker in job.workers() if worker.startswith(f"local.{number}.")))
        assert job.wait() == 0, job.output
        assert "rank 0 joined last" in job.output
        assert job.output.count("batch 0 of 2 ranks") >= 2
