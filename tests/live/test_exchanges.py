"""--overlap, --compression and --reduction fixed: kills, freezes, joins and resumes over every kind of ring leave the
bits of one worker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.records import ledger
from tests.live.conftest import Quiet
from tests.live.exchanges import kill_and_freeze, kill_two
from tests.live.jobs import DEADLINE_S, SCRIPTS, TRAINER, Job, Line

pytestmark = pytest.mark.long

GLOO = Path(__file__).parent / "gloo_site"
WAYS = {
    "overlap": ("--overlap", "on"),
    "bf16": ("--compression", "bf16"),
    "int8": ("--compression", "int8"),
    "fixed": ("--reduction", "fixed"),
}


class Alone:
    """What scripts/trainer.py comes to in a world of one."""

    def __init__(self, digest: str, steps: list[Line], options: tuple[str, ...]) -> None:
        self.digest, self.steps = digest, steps
        self.options = (*options, "--quiet")


@pytest.fixture(scope="module", params=WAYS)
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alone]:
    """Of --overlap the run without it."""
    options = WAYS[request.param]
    if request.param == "overlap":
        quiet: Quiet = request.getfixturevalue("quiet")
        yield Alone(quiet.digest, quiet.steps, options)
        return
    with Job(tmp_path_factory.mktemp("alone"), "--workers", "1", *options, "--quiet", str(TRAINER)) as job:
        assert job.wait(2 * DEADLINE_S) == 0
        yield Alone(job.result["digest"], job.steps(), options)


def check_end(job: Job, alone: Alone) -> None:
    assert job.result["digest"] == alone.digest
    assert ledger.compare(alone.steps, job.steps()) is None
    assert not list(job.events("overlap_given_up"))


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_a_member_and_rank_0_die(alone: Alone, overlap: str, tmp_path: Path) -> None:
    """With --overlap on, while gradients leave."""
    with Job(tmp_path, "--workers", "3", *alone.options, "--overlap", overlap, str(TRAINER)) as job:
        kill_two(job)
        check_end(job, alone)
        assert job.left_behind() == {}


def test_over_gloo_in_the_place_of_nccl(alone: Alone, tmp_path: Path) -> None:
    """With --reduction fixed the sums are its own allreduce."""
    with Job(tmp_path, "--workers", "3", "--ring", "nccl", *alone.options, str(TRAINER), site=GLOO) as job:
        job.pace(0.05)
        job.shut("end")
        kill_and_freeze(job)
        assert {line["over"] for line in job.events("ring_up")} == {"nccl"}
        check_end(job, alone)


def test_over_mpi(alone: Alone, tmp_path: Path) -> None:
    with Job(tmp_path, "--workers", "3", "--ring", "mpi", *alone.options, str(TRAINER)) as job:
        kill_two(job)
        assert {line["over"] for line in job.events("ring_up", generation=1)} == {"mpi"}
        check_end(job, alone)


def test_a_job_goes_on_from_its_checkpoint_with_another_number_of_workers(alone: Alone, tmp_path: Path) -> None:
    options = ("--checkpoint-every", "5 steps", *alone.options)
    with Job(tmp_path, "--workers", "2", *options, str(TRAINER)) as job:
        job.pace(0.02)
        job.await_event("checkpoint_complete")
        job.await_steps(7)
        job.command.process.kill()
        job.wait()
    with Job(tmp_path, "--workers", "3", *options, str(TRAINER)) as job:
        assert job.wait() == 0, job.story()
        assert (job.dir / "resumes.jsonl").exists()
        assert json.loads((job.dir / "result.json").read_bytes())["digest"] == alone.digest


@pytest.mark.parametrize("alone", ["bf16", "int8"], indirect=True)
def test_with_allreduce_no_step_is_lost(alone: Alone, tmp_path: Path) -> None:
    with Job(tmp_path, "--workers", "3", "--reduction", "allreduce", *alone.options, str(TRAINER)) as job:
        kill_two(job)
        assert [line["step"] for line in job.steps()] == [line["step"] for line in alone.steps]
        for ours, theirs in zip(job.steps()[:5], alone.steps, strict=False):  # later ones hang on every bit
            assert ours["scalars"]["loss"] == pytest.approx(theirs["scalars"]["loss"], rel=0.1)


@pytest.mark.parametrize("reduction", ["exact", "fixed"])
def test_a_gradient_that_changes_after_it_was_sent_is_sent_again(reduction: str, tmp_path: Path) -> None:
    """The second backward of a shard; after one such pass nothing is sent early until the next generation."""
    script, digests = SCRIPTS / "second_backward.py", []
    for workers, overlap in ((1, "off"), (3, "on")):
        words = ("--workers", str(workers), "--overlap", overlap, "--reduction", reduction, "--quiet", str(script))
        with Job(tmp_path, *words, name=overlap) as job:
            assert job.wait() == 0, job.story()
            digests.append(job.result["digest"])
            given_up = list(job.events("overlap_given_up"))
    assert digests[0] == digests[1]
    assert len(given_up) == 3, "once by each member"
