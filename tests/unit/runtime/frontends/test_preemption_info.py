"""Notices in the shape of Ray Train's: of all nodes, and the same answer on every worker."""

from __future__ import annotations

import threading

import pytest

import elastic.ray
from elastic.agent.worker.node_notice import NodeNotice
from elastic.errors import UsageError
from elastic.ray import PreemptionInfo
from runtime.frontends.ddp.rank_script import RankScript
from runtime.frontends.preemption_info import _info, get_preemption_info
from runtime.loop import job as jobs
from runtime.loop.job import Job
from tests.unit.jobs import Recorded, Setup, make_job, set_up, train
from tests.unit.worlds import FakeMember, Killed, World


def test_ray_names_of_what_workers_say() -> None:
    info = _info({"a.0.0": [2, 9_000], "b.0.0": None, "a.1.0": [0, 8_000], "c.0.1": [3, 7_500]})
    assert info == PreemptionInfo(7_500, {"a": [0, 2], "c": [3]})
    assert (info.preempted_node_ids, info.preempted_ranks) == (["a", "c"], [0, 2, 3])
    assert _info({"a.0.0": None, "b.0.0": None}) is None


@pytest.mark.parametrize("ranks", [False, True])
def test_without_a_job_of_its_own_it_says_whom_to_ask(monkeypatch: pytest.MonkeyPatch, ranks: bool) -> None:
    """A script of --ranks has a job; one rank of a worker cannot exchange anything for all."""
    if ranks:
        monkeypatch.setattr(jobs, "_current", make_job(Recorded()))
        monkeypatch.setattr(RankScript, "current", lambda: object())
    with pytest.raises(UsageError, match=r"elastic\.notice\(\)"):
        elastic.ray.get_preemption_info()


@pytest.mark.parametrize("newcomers", [0, 1])
def test_all_workers_get_one_answer_also_a_newcomer_and_through_a_death(
    monkeypatch: pytest.MonkeyPatch, newcomers: int
) -> None:
    """The node of w1 has to go between the second and the third epoch; w0 dies in the exchange of the second."""
    mine = threading.local()
    monkeypatch.setattr(jobs, "current", lambda: mine.job)
    answers: dict[str, list[PreemptionInfo | None]] = {}

    def script(session: FakeMember) -> str:
        setup = set_up(make_job(session))
        mine.job = setup.job

        def ask(setup: Setup) -> None:
            job: Job = setup.job
            said = answers.setdefault(job.worker_id, [])
            if job.worker_id == "w1" and len(said) == 1:
                session.going = NodeNotice.begins(60.0, "spot", "reclaim", "EC2", signalled=False)
            said.append(get_preemption_info())

        return train(setup, epochs=3, body=ask)

    world = World(3, kills={"w0": (8, 0)})
    world.run(script, newcomers=newcomers, asked_at=2, admit_at=2)
    assert {type(error) for error in world.errors.values()} <= {Killed}
    first, *later = answers["w1"]
    assert first is None
    assert all(info is not None and info.preempted_node_ids == ["w1"] for info in later) and len(later) == 2
    for worker in ("w2", *(["n0"] if newcomers else [])):
        assert answers[worker][-2:] == later
