"""What the harness finds in entries that a job calls complete: no manifest, half of one, or one that is removed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import pytest

from chaos_tests.checkers.durability import GONE
from chaos_tests.run import checkpoint_audit
from chaos_tests.run.checkpoint_audit import NO_MANIFEST, Auditor
from elastic.checkpoints.naming import MANIFEST, PERIODIC
from elastic.checkpoints.series import Series
from elastic.checkpoints.settings import Settings
from elastic.checkpoints.storage import LocalStorage
from elastic.records.journal import Journal
from tests.unit.chaos_tests.nemesis.test_nodes import checkpoint


class Lines:
    def __init__(self) -> None:
        self.problems: list[tuple[int, str, str]] = []

    def write(self, event: str, **fields: Any) -> None:
        self.problems.append((fields["step"], fields["at"], fields["problem"]))


class Told:
    """An auditor of a job's checkpoints on disk, and what it has noted."""

    def __init__(self, home: Path) -> None:
        self.series = Series(LocalStorage(str(home / "checkpoints")))
        settings = Settings(root=self.series.storage.url, job_id="feed")
        (home / "checkpoints.json").write_text(json.dumps(asdict(settings)))
        self.lines = Lines()
        self.auditor = Auditor({"n": home}, cast(Journal, self.lines))

    def complete(self, step: int) -> None:
        entry = f"step-{step:012}.0.g1-c105d2d3"
        self.auditor.look([{"event": "checkpoint_complete", "node": "n", "entry": entry, "series": PERIODIC}])


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Told:
    monkeypatch.setattr(checkpoint_audit, "AGAIN_S", 3600.0)
    return Told(tmp_path)


def entry_of(told: Told, step: int) -> Path:
    return Path(told.series.storage.url) / told.series.path(checkpoint(told.series, step, b"abc"))


def never_written(entry: Path) -> None:
    (entry / MANIFEST).unlink()


def torn(entry: Path) -> None:
    (entry / MANIFEST).write_bytes((entry / MANIFEST).read_bytes()[:20])


def unreadable(entry: Path) -> None:
    (entry / MANIFEST).unlink()
    (entry / MANIFEST).mkdir()


@pytest.mark.parametrize(
    ("spoil", "said", "at"),
    [
        (never_written, NO_MANIFEST, ["completion"]),
        (torn, "manifest", ["completion", "the end"]),
        (unreadable, "its manifest cannot be read", ["completion", "the end"]),
    ],
)
def test_what_has_no_good_manifest_is_not_taken_for_gone(
    told: Told, spoil: Callable[[Path], None], said: str, at: list[str]
) -> None:
    spoil(entry_of(told, 10))
    told.complete(10)
    told.auditor.look_at_all()
    assert [when for _, when, _ in told.lines.problems] == at
    assert all(said in problem for _, _, problem in told.lines.problems)


def test_who_is_without_a_manifest_is_looked_at_again_while_the_job_runs(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_written(entry_of(told, 10))
    told.complete(10)
    assert told.lines.problems == [], "it may be on its way out"
    monkeypatch.setattr(checkpoint_audit, "AGAIN_S", 0.0)
    told.auditor.look([])
    assert told.lines.problems == [(10, "completion", NO_MANIFEST)]


def test_what_was_removed_is_gone(told: Told) -> None:
    entry_of(told, 10)
    told.series.remove(told.series.names()[0])
    told.complete(10)
    told.auditor.look_at_all()
    assert told.lines.problems == [(10, "completion", GONE)]


def test_what_is_half_removed_is_gone_where_another_one_was_completed_after_it(told: Told) -> None:
    """Whoever removes it may be killed between the manifest and the rest."""
    never_written(entry_of(told, 10))
    told.complete(10)
    entry_of(told, 20)
    told.complete(20)
    told.auditor.look_at_all()
    assert told.lines.problems == [(20, "completion", ""), (10, "completion", GONE), (20, "the end", "")]


def test_what_is_removed_while_it_is_read_is_gone(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = entry_of(told, 10)
    whole = Series.look

    def look(series: Series, name: Any) -> Any:
        found = whole(series, name)
        (entry / MANIFEST).unlink()
        (entry / "part-0").unlink()
        return found

    monkeypatch.setattr(Series, "look", look)
    told.complete(10)
    assert told.lines.problems == [(10, "completion", GONE)]
