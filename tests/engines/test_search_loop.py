"""The loop of a search over jobs that are scripted here: what it does while the fleet has no leader."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from elastic.errors import ElasticError, ExitCode
from elastic.platforms.search import search
from elastic.platforms.search.decisions import ATTEMPTS, JobState, TrialJobView
from elastic.platforms.search.search import Search
from elastic.platforms.search.study_file import StudyFile

optuna = pytest.importorskip("optuna", reason="make test-engines installs it")

pytestmark = pytest.mark.filterwarnings("default")

PREEMPTED = TrialJobView(JobState.ENDED, ExitCode.DRAINED, "preempted")
DONE = TrialJobView(JobState.ENDED, ExitCode.DONE, values={9: 0.5})
WITHOUT_LEADER = 3 * ATTEMPTS


class ScriptedJobs:
    """One job, of which each look sees the next view; the last one stays. begin and stop raise while there is no
    leader, which are the first calls of them."""

    def __init__(self, views: Sequence[TrialJobView], refused: int) -> None:
        self._views = list(views)
        self._refused = refused
        self.done: list[str] = []

    def name(self, trial: int) -> str:
        return f"trial-{trial}"

    def look(self, trial: int) -> TrialJobView:
        return self._views.pop(0) if len(self._views) > 1 else self._views[0]

    def begin(self, trial: int, words: Sequence[str]) -> None:
        self._do("begin", [DONE])

    def stop(self, trial: int) -> None:
        self._do("stop", [PREEMPTED])

    def close(self) -> None:
        """Nothing runs."""

    def _do(self, what: str, then: list[TrialJobView]) -> None:
        if self._refused:
            self._refused -= 1
            raise ElasticError("nobody leads the fleet")
        self.done.append(what)
        self._views = then


def outcome(jobs: ScriptedJobs, home: Path, pruner: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the only trial of a search ends."""
    monkeypatch.setattr(search, "POLL_S", 0.0)
    file = StudyFile(
        lambda trial: ["train.py"], lambda seed: optuna.samplers.RandomSampler(seed), pruner, "loss", "minimize"
    )
    one = Search(file, home / "study.py", home, jobs, trials=1, parallel=1)
    one.run(lambda trial, seen: None, lambda: None)
    one.close(interrupted=False)
    return str(one.study.trials[0].state.name)


def test_a_trial_is_begun_again_however_long_there_is_no_leader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = ScriptedJobs([PREEMPTED], WITHOUT_LEADER)
    assert outcome(jobs, tmp_path, optuna.pruners.NopPruner(), monkeypatch) == "COMPLETE"
    assert jobs.done == ["begin"]


def test_a_pruned_trial_is_stopped_when_there_is_a_leader_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = ScriptedJobs([TrialJobView(JobState.RUNS, values={0: 1.0})], WITHOUT_LEADER)
    assert outcome(jobs, tmp_path, optuna.pruners.ThresholdPruner(upper=0.0), monkeypatch) == "PRUNED"
    assert jobs.done == ["stop"]
