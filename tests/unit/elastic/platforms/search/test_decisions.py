"""What becomes of a trial, as a table."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from elastic.errors import ExitCode
from elastic.platforms.search.decisions import ATTEMPTS, Deed, JobState, TrialJobView, decide, values_of
from elastic.records.job_follower import parsed_steps

VALUES = {0: 3.0, 10: 1.0, 5: 2.0}


def ended(code: int, **fields: Any) -> TrialJobView:
    return TrialJobView(JobState.ENDED, code, **{"values": VALUES, **fields})


@pytest.mark.parametrize(
    ("job", "trial", "deed"),
    [
        (TrialJobView(JobState.ABSENT), {}, Deed.BEGIN),
        (TrialJobView(JobState.WAITS), {}, Deed.WAIT),
        (TrialJobView(JobState.RUNS), {}, Deed.WAIT),
        (TrialJobView(JobState.RUNS), {"pruned": True}, Deed.STOP),
        (TrialJobView(JobState.WAITS), {"pruned": True}, Deed.STOP),
        (TrialJobView(JobState.ABSENT), {"pruned": True}, Deed.PRUNED),
        (ended(ExitCode.DRAINED, stopped=True), {"pruned": True}, Deed.PRUNED),
        (ended(ExitCode.DONE), {"pruned": True}, Deed.PRUNED),  # it was written down, so it is so after a kill, too
        (ended(ExitCode.DONE), {}, Deed.COMPLETE),
        (ended(ExitCode.SCRIPT_FAILED), {}, Deed.FAIL),
        (ended(ExitCode.DISAGREE), {}, Deed.FAIL),
        (ended(ExitCode.DRAINED), {}, Deed.BEGIN),
        (ended(ExitCode.STATE_LOST), {}, Deed.BEGIN),
        (ended(ExitCode.DRAINED, stopped=True), {}, Deed.FAIL),
        (ended(ExitCode.DRAINED, stopped=True), {"interrupted": True}, Deed.BEGIN),
        (ended(ExitCode.TERMINATED, stopped=True), {"interrupted": True}, Deed.BEGIN),
        (ended(ExitCode.DRAINED), {"attempts": ATTEMPTS}, Deed.FAIL),
        (ended(ExitCode.DONE, values={}), {}, Deed.FAIL),
        (ended(ExitCode.DONE, values={3: math.nan}), {}, Deed.FAIL),
    ],
)
def test_what_becomes_of_a_trial(job: TrialJobView, trial: dict[str, Any], deed: Deed) -> None:
    given = {"pruned": False, "interrupted": False, "attempts": 0, **trial}
    assert decide(job, "loss", **given).deed is deed


def test_the_value_of_a_trial_is_what_was_logged_last() -> None:
    assert decide(ended(0), "loss", pruned=False, interrupted=False, attempts=0).value == 1.0


def test_what_has_failed_is_told_with_what_to_do() -> None:
    def because(job: TrialJobView, attempts: int = 0) -> str:
        return decide(job, "loss", pruned=False, interrupted=False, attempts=attempts).because

    assert because(ended(0, values={})) == ("its script never logged 'loss'; step.log or job.log gives it a value")
    assert because(ended(0, values={3: math.nan})) == "its last loss is not a number"
    assert because(ended(1, because="ValueError: no")) == "ValueError: no"
    assert because(ended(6, because="drained"), ATTEMPTS) == "it was interrupted 5 times in a row: drained"


def test_the_metric_is_read_from_the_lines_of_a_ledger() -> None:
    lines = [
        {"step": 0, "samples": [], "scalars": {"loss": 2.5}},
        {"step": 1, "samples": [], "scalars": {"other": 1.0}},
        {"step": 2, "samples": [], "scalars": {"loss": "inf"}},
    ]
    texts = [json.dumps(line).encode() for line in lines]
    assert values_of(parsed_steps([*texts, texts[0][:10]]), "loss") == {0: 2.5, 2: math.inf}
