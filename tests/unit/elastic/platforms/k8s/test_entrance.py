"""Which job the pods of a Job come to, with which exit code they end, and which of them tells of the progress."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from elastic.checkpoints.naming import EntryName
from elastic.config import JobSpec
from elastic.errors import ExitCode
from elastic.fleet.client import FleetClient
from elastic.platforms.k8s import agent_pods, entrance
from elastic.platforms.k8s.agent_pod import exit_code, speaker

OWNER = "5f1c0c3e"


@dataclass
class Fleet:
    """What the entrance asks of a client."""

    jobs: list[dict[str, Any]]
    submitted: list[str] = field(default_factory=list)
    resumed: list[str] = field(default_factory=list)

    def overview(self) -> dict[str, Any]:
        return {"jobs": self.jobs}

    def submit(self, spec: JobSpec, resume: str, *, token: str) -> dict[str, Any]:
        self.submitted.append(token)
        self.resumed.append(resume)
        return {"job": f"{spec.name}-{len(self.jobs) + 1}"}


def ended(code: int, *, stopped: bool) -> dict[str, Any]:
    told = {"job": "train-1", "request": f"{OWNER}-0", "state": "ended", "exit_code": int(code), "stopped": stopped}
    return {**told, "checkpoints": "/nowhere/train-1", "identity": "0"}


def entered(fleet: Fleet) -> str:
    spec = JobSpec(name="train", command=("python", "t.py"), workers=2, checkpoint_dir="/nowhere")
    return entrance._enter(cast(FleetClient, fleet), spec, OWNER)


@pytest.mark.parametrize("code", [ExitCode.DRAINED, ExitCode.BELOW_QUORUM, ExitCode.TERMINATED])
def test_a_job_that_was_interrupted_goes_on_in_the_next_pods(code: ExitCode) -> None:
    fleet = Fleet([ended(code, stopped=False)])
    assert entered(fleet) == "train-2" and fleet.submitted == [f"{OWNER}-1"]


@pytest.mark.parametrize("code", [ExitCode.DRAINED, ExitCode.TERMINATED])
def test_a_job_that_an_operator_has_stopped_does_not_begin_again_and_its_job_is_given_up(code: ExitCode) -> None:
    fleet = Fleet([ended(code, stopped=True)])
    assert entered(fleet) == "train-1" and not fleet.submitted
    assert exit_code(fleet.jobs[0]) in agent_pods.GIVE_UP


def test_a_job_that_is_applied_again_begins_anew_if_the_one_before_was_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(entrance, "newest_at", lambda url, identity: EntryName(7, 0, 1, "0" * 8))
    interrupted = {**ended(ExitCode.DRAINED, stopped=False), "request": "an earlier Job-0"}
    complete = {**ended(ExitCode.DONE, stopped=False), "job": "train-2", "request": "an earlier Job-1"}
    fleet = Fleet([interrupted, complete])
    assert entered(fleet) == "train-3" and fleet.resumed == [""]
    fleet = Fleet([interrupted])
    assert entered(fleet) == "train-2" and fleet.resumed == ["train-1@step-000000000007.0.g1-00000000"]


def test_pods_end_with_the_exit_code_of_their_job() -> None:
    assert [exit_code(ended(code, stopped=False)) for code in (0, 1, 6)] == [0, 1, 6]


def test_a_pod_that_has_left_the_training_does_not_tell_its_old_step_when_the_job_has_ended() -> None:
    told = {node: node for node in ("train-agents-a", "train-agents-b")}
    places: list[dict[str, int]] = [{"train-agents-b": 1, "train-agents-a": 1}, {"train-agents-b": 1}, {}]
    for slots in places:
        told = {node: speaker({"slots": slots}, before) for node, before in told.items()}
    assert [node for node, speaks in told.items() if node == speaks] == ["train-agents-b"]
