"""`--verify`: bits that change in a gradient, a parameter or a moment are seen, and their worker, before they count."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos_tests.failpoints.orders import FailpointOrders
from chaos_tests.scenario.failpoints import BEFORE_REDUCTION, GRADIENT_READY, Act, FailpointOrder
from elastic.errors import ExitCode
from tests.live.jobs import ROOT, SCRIPTS, Job

pytestmark = pytest.mark.long

VERIFIED = SCRIPTS / "verified.py"
FLIPS = (
    (Act.FLIP_GRADIENT, GRADIENT_READY),
    (Act.FLIP_PARAMETER, BEFORE_REDUCTION),
    (Act.FLIP_MOMENT, BEFORE_REDUCTION),
)
APART = 110
"""Steps between two flips: three within 100 operations would be taken for a fault of the script."""


def job_of(home: Path, orders: FailpointOrders, workers: int, *options: str) -> Job:
    words = ("--quiet", "--workers", str(workers), *options, str(VERIFIED))
    return Job(home, *words, environment=orders.environment(str(ROOT)))


def digest(job: Job) -> str:
    return next(line for line in job.output.splitlines() if line.startswith("digest "))


@pytest.mark.parametrize(("every", "reduction"), [(1, "exact"), (1, "fixed"), (7, "exact")])
def test_flipped_bits_are_named_and_leave_no_trace(every: int, reduction: str, tmp_path: Path) -> None:
    """If not every step is verified, a state with such a bit may be used until it is seen."""
    orders = FailpointOrders(tmp_path / "orders")
    options = ("--reduction", reduction)
    with job_of(tmp_path, orders, 3, "--verify", f"every={every}", *options) as job:
        for number in range(len(FLIPS)):
            job.await_world(3)
            job.await_steps(len(job.steps()) + APART)
            victim = job.await_world(3)[number % 3]
            act, point = FLIPS[number % 3]
            orders.give(FailpointOrder(number, point, act), victim)
            line = job.await_event("corrupted", worker_id=victim)
            assert line["node"] == "local" and line["because"]
            job.await_event("expelled", worker_id=victim)
        job.gates.joinpath("end").touch()
        assert job.wait() == ExitCode.DONE
        assert len(job.events("corrupted")) == len(FLIPS), "nobody else was taken for wrong"
        steps, bits = job.steps(), digest(job)
        assert f"{victim} on node local has other values" in job.output
    if every > 1:
        return
    quiet_steps = {"STEPS": str(len(steps) - 1)}
    with Job(tmp_path, "--quiet", *options, str(VERIFIED), name="quiet", environment=quiet_steps) as quiet:
        assert quiet.wait() == ExitCode.DONE
        assert len(quiet.steps()) == len(steps) and digest(quiet) == bits


def test_of_two_members_nobody_can_say_whose_state_is_wrong(tmp_path: Path) -> None:
    """A gradient they compute once more."""
    orders = FailpointOrders(tmp_path / "orders")
    with job_of(tmp_path, orders, 2, "--verify", "every=1") as job:
        job.await_world(2)
        victim = job.members()[1]
        orders.give(FailpointOrder(0, GRADIENT_READY, Act.FLIP_GRADIENT), victim)
        job.await_event("corrupted", worker_id=victim)
        victim = job.await_world(2)[1]
        orders.give(FailpointOrder(1, BEFORE_REDUCTION, Act.FLIP_PARAMETER), victim)
        assert job.wait() == ExitCode.DISAGREE
        assert "nobody can say who is wrong" in job.output


def test_kills_and_joins_are_no_false_alarm(tmp_path: Path) -> None:
    orders = FailpointOrders(tmp_path / "orders")
    with job_of(tmp_path, orders, 3, "--verify", "every=1") as job:
        for turn in range(4):
            job.send(job.await_world(3)[turn % 3])
            job.await_steps(len(job.steps()) + 20)
        job.await_world(3)
        job.gates.joinpath("end").touch()
        assert job.wait() == ExitCode.DONE
        assert job.events("corrupted") == []
