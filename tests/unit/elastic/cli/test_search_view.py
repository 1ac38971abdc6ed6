"""What `elastic search` shows, and prints for programs."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from elastic.cli.platforms.search import SearchView
from elastic.platforms.search.decisions import JobState, TrialJobView


def test_brackets_in_names_and_values_are_shown_as_they_are() -> None:
    seen = TrialJobView(JobState.WAITS, because="needs [bold]a slot", values={3: 0.5})
    trial = SimpleNamespace(params={"end": "[/INST]"})
    search: Any = SimpleNamespace(active={7: SimpleNamespace(seen=seen, trial=trial)})
    jobs: Any = None
    console = Console(file=io.StringIO(), width=120)
    console.print(SearchView(search, jobs, "loss[/x]", as_json=False)._table())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "loss[/x]" in text and "end=[/INST]" in text and "waits: needs [bold]a slot" in text
