"""--overlap on: gradients leave while backward goes on, and no bit changes, whoever dies in the middle of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.records import ledger
from tests.live.conftest import Quiet
from tests.live.exchanges import kill_and_freeze, kill_two
from tests.live.jobs import SCRIPTS, TRAINER, Job

GLOO = Path(__file__).parent / "gloo_site"
OPTIONS = ("--workers", "3", "--overlap", "on", "--quiet")


def check_end(job: Job, quiet: Quiet) -> None:
    assert job.result["digest"] == quiet.digest
    assert ledger.compare(quiet.steps, job.steps()) is None
    assert not list(job.events("overlap_given_up"))


@pytest.mark.long
def test_a_member_and_rank_0_die_while_gradients_leave(quiet: Quiet, tmp_path: Path) -> None:
    with Job(tmp_path, *OPTIONS, str(TRAINER)) as job:
        kill_two(job)
        check_end(job, quiet)
        assert job.left_behind() == {}


@pytest.mark.long
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


@pytest.mark.long
def test_over_gloo_in_the_place_of_nccl(quiet: Quiet, tmp_path: Path) -> None:
    with Job(tmp_path, *OPTIONS, "--ring", "nccl", str(TRAINER), site=GLOO) as job:
        job.pace(0.05)
        job.shut("end")
        kill_and_freeze(job)
        check_end(job, quiet)


@pytest.mark.long
def test_over_mpi(quiet: Quiet, tmp_path: Path) -> None:
    with Job(tmp_path, *OPTIONS, "--ring", "mpi", str(TRAINER)) as job:
        kill_two(job)
        check_end(job, quiet)
