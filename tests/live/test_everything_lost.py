"""SIGKILL to every process of a run at once, at random moments, and the same command again until the job is done.

`make test-live` does it many times; SEED= in the environment repeats one order of moments.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from chaos_tests.support.processes import kill_if_there, living
from elastic.checkpoints.naming import EntryName
from elastic.checkpoints.series import Series
from elastic.checkpoints.storage import storage_at
from elastic.records import ledger
from elastic.records.resume import decide
from tests.live.jobs import POLL_S, SCRIPTS, Job, run_alone

pytestmark = pytest.mark.long

SCRIPT = SCRIPTS / "brief.py"
EVERY = 5
PACE_S = 0.002
WRITING_S = 0.05
"""About as long as a checkpoint of the script is being written."""
START_S = 4.0
"""About as long as a start takes, from the command to the first step."""

Moment = Callable[[Job, random.Random], None]


def starting(job: Job, random_: random.Random) -> None:
    time.sleep(random_.uniform(0.0, START_S))


def stepping(job: Job, random_: random.Random) -> None:
    _after_steps(job, random_.randint(1, 6 * EVERY))


def checkpointing(job: Job, random_: random.Random) -> None:
    """A directory of a checkpoint has just been made, or a bit later."""
    before = entries(job)
    job.until("a checkpoint begins", lambda: entries(job) - before)
    time.sleep(random_.uniform(0.0, WRITING_S))


def saving(job: Job, random_: random.Random) -> None:
    """A manifest has just been written: what is older is about to be removed."""
    before = manifests(job)
    job.until("a checkpoint is complete", lambda: manifests(job) - before)
    time.sleep(random_.uniform(0.0, WRITING_S / 10))


MOMENTS: tuple[Moment, ...] = (starting, stepping, checkpointing, saving)


def entries(job: Job) -> set[str]:
    return {str(path) for path in (job.dir / "checkpoints").glob("*/step-*")}


def manifests(job: Job) -> set[str]:
    return {str(path) for path in (job.dir / "checkpoints").glob("*/step-*/manifest.json")}


def _after_steps(job: Job, count: int) -> None:
    job.await_steps(len(job.steps()) + 1 + count)


def kill_everything(job: Job, random_: random.Random) -> None:
    """In random order, until nothing is left, also of what was being forked."""
    while left := living(job.command.mark):
        for pid in random_.sample(sorted(left), len(left)):
            kill_if_there(pid)
        time.sleep(POLL_S)  # until the kernel has taken them away


@dataclass(frozen=True)
class Left:
    """What lies on the disk after a kill."""

    steps: int
    checkpoint: str
    step: int

    @classmethod
    def of(cls, job: Job) -> Left | None:
        """None: the kill came before there was a job."""
        path = job.dir / "steps.jsonl"
        steps = len(ledger.read(path)) if path.exists() else 0
        if not (job.dir / "job.json").exists():
            return None
        series = Series(storage_at(str(job.dir / "checkpoints")))
        found = decide(series, (job.dir / "id").read_text(), steps)
        return cls(steps, found.checkpoint, found.step)


def resumes(job: Job) -> list[dict[str, Any]]:
    path = job.dir / "resumes.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@contextmanager
def run(home: Path, epochs: int) -> Iterator[Job]:
    words = ("--workers", "2", "--checkpoint-every", f"{EVERY} steps", "--keep", "last 1", "--quiet")
    with Job(home, *words, str(SCRIPT), str(epochs)) as job:
        yield job


def survive(home: Path, epochs: int, moments: list[Moment], seed: int) -> None:
    random_ = random.Random(seed)
    printed = run_alone(home, SCRIPT, str(epochs))
    left: Left | None = None
    for number, moment in enumerate([*moments, None]):
        with run(home, epochs) as job:
            job.pace(PACE_S if moment else 0.0)
            if moment:  # it comes before the end
                job.shut("end")
            known = len(resumes(job))
            begun_s = time.monotonic()
            if moment is None:
                assert job.wait() == 0, job.story()
            else:
                moment(job, random_)
                assert job.command.process.poll() is None, job.story()
                kill_everything(job, random_)
                assert job.wait() == -signal.SIGKILL
                job.open("end")
            said = resumes(job)
            if left is not None and len(said) > known:
                assert len(said) == known + 1
                assert (said[-1]["checkpoint"], said[-1]["step"]) == (left.checkpoint, left.step), said[-1]
                redone = [left.step, left.steps - 1] if left.steps > left.step else None
                assert said[-1]["redone"] == redone, (said[-1], left)
                assert redone is None or left.steps - left.step <= 3 * EVERY, "more is done again than was not saved"
            else:
                assert left is None or moment is starting, "it went on without saying from where"
            before, left = left, Left.of(job)
            assert before is None or (left is not None and left.step >= before.step), "a checkpoint was lost"
            name = moment.__name__ if moment else "the end"
            took_s = time.monotonic() - begun_s
            print(f"{number + 1:3} {name:14} {took_s:5.1f} s  {left}", flush=True)
    assert printed.splitlines()[-1] in job.output
    digest = printed.splitlines()[-1].removeprefix("digest ")
    assert job.result["digest"] == digest
    (best,) = Series(storage_at(str(job.dir / "checkpoints")), "tenth").all()
    assert not best.problem
    steps = ledger.read(job.dir / "steps.jsonl")
    assert [line["step"] for line in steps] == list(range(len(steps)))


def test_everything_is_killed_twice(tmp_path: Path) -> None:
    survive(tmp_path, 10, [checkpointing, stepping], seed=1)


@pytest.mark.parametrize("part", range(3))
def test_everything_is_killed_at_random_moments(tmp_path: Path, part: int) -> None:
    seed = int(os.environ.get("SEED", time.time_ns() % 10**6)) + part
    print(f"\nSEED={seed - part}", flush=True)
    random_ = random.Random(seed)
    moments = [*MOMENTS, *random_.choices(MOMENTS, k=10 - len(MOMENTS))]
    random_.shuffle(moments)
    survive(tmp_path, 60, moments, seed)


def test_a_writer_that_was_frozen_in_a_checkpoint_replaces_and_removes_nothing(tmp_path: Path) -> None:
    epochs = 20
    printed = run_alone(tmp_path, SCRIPT, str(epochs))
    with run(tmp_path, epochs) as job:
        job.pace(PACE_S)
        job.await_world(2)
        checkpointing(job, random.Random(0))
        job.send("local.1.0", signal.SIGSTOP)
        job.await_event("expelled", worker_id="local.1.0")
        after = int(job.events("committed", kind="loss")[-1]["generation"])
        newer = job.until("a later generation's checkpoint", lambda: completed(job, after))
        job.pace(0.05)  # the next ones come slowly, so that none of them hides a loss of this one
        job.send("local.1.0", signal.SIGCONT)
        job.await_event("worker_exited", worker_id="local.1.0")
        assert newer[-1] <= completed(job, after)[-1]
        assert max(int(Path(path).parent.name[5:17]) for path in manifests(job)) >= newer[-1]
        job.pace(0.0)
        assert job.wait() == 0
        assert job.result["digest"] == printed.splitlines()[-1].removeprefix("digest ")
        assert job.left_behind() == {}


def completed(job: Job, generation: int) -> list[int]:
    """Steps of the periodic checkpoints taken in that generation or later to which the pointer was moved."""
    moved = [line["entry"] for line in job.events("pointer_moved", series="_periodic")]
    names = [name for entry in moved if (name := EntryName.parse(entry)) is not None]
    return [name.step for name in names if name.generation >= generation]
