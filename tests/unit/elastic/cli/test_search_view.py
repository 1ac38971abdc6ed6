"""What `elastic search` shows, and prints for programs."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from elastic.cli.platforms.search import SearchView
from elastic.platforms.search.decisions import JobState, TrialJobView


def test_infinite_numbers_are_text_as_in_a_ledger(capsys: pytest.CaptureFixture[str]) -> None:
    params = {"clip": float("-inf"), "lr": 0.1}
    trial = SimpleNamespace(number=0, state=SimpleNamespace(name="COMPLETE"), value=float("inf"), params=params)
    trial.intermediate_values, trial.user_attrs = {}, {}
    jobs: Any = SimpleNamespace(name=lambda number: f"t{number}")
    study: Any = SimpleNamespace(study=SimpleNamespace(best_trial=trial, get_trials=lambda deepcopy: [trial]))
    view = SearchView(study, jobs, "loss", as_json=True)
    view.ended(trial, TrialJobView(JobState.ENDED))
    view.summary()
    one, last = (json.loads(line, parse_constant=pytest.fail) for line in capsys.readouterr().out.splitlines())
    assert one["value"] == last["best"]["value"] == "inf" and one["params"] == {"clip": "-inf", "lr": 0.1}


def test_brackets_in_names_and_values_are_shown_as_they_are() -> None:
    seen = TrialJobView(JobState.WAITS, because="needs [bold]a slot", values={3: 0.5})
    trial = SimpleNamespace(params={"end": "[/INST]"})
    search: Any = SimpleNamespace(active={7: SimpleNamespace(seen=seen, trial=trial)})
    jobs: Any = None
    console = Console(file=io.StringIO(), width=120)
    console.print(SearchView(search, jobs, "loss[/x]", as_json=False)._table())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "loss[/x]" in text and "end=[/INST]" in text and "waits: needs [bold]a slot" in text
