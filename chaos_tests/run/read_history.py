"""From the files of two job directories to a history."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from chaos_tests.checkers.history import Event, History, HistoryStep, Limits, Run
from elastic.errors import ConfigError
from elastic.records.files import read_job
from elastic.records.job_directory import read_json
from elastic.records.journal import parse


def read_run(job_dir: Path) -> Run:
    """What an ended job has left; lines that a kill has torn are left out. Raises ConfigError if there was no job."""
    if not (job_dir / "job.json").exists():
        raise ConfigError(f"{job_dir} holds no job; give the directory of `elastic chaos run`")
    events = [
        Event(line, f"journal/{path.name}:{offset}")
        for path in sorted((job_dir / "journal").glob("*.jsonl"))
        for offset, text in _lines(path)
        if (line := parse(text)) is not None
    ]
    steps = [HistoryStep(json.loads(text), f"steps.jsonl:{offset}") for offset, text in _lines(job_dir / "steps.jsonl")]
    return Run(tuple(sorted(events, key=lambda event: event.t_ns)), tuple(steps), read_json(job_dir / "result.json"))


def read_history(faulty: Path, quiet: Path) -> History:
    runs, spec = (read_run(faulty), read_run(quiet)), read_job(faulty)
    keeps = (spec.checkpoint_every, spec.snapshot_every) != ("off", "off")
    ranks, limits = spec.ranks if spec.restart else 0, Limits(stopped_s=spec.timing.stopped_s)
    return History(*runs, keeps=keeps, rounds=spec.restart, ranks=ranks, limits=limits)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(offset, text) of each complete line."""
    if not path.exists():
        return
    offset = 0
    for text in path.read_bytes().splitlines(keepends=True):
        if text.endswith(b"\n"):
            yield offset, text
        offset += len(text)
