"""`elastic trace`: a job on a time axis, for Perfetto or an OpenTelemetry collector."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from elastic.cli.options import EXIT_CODES, job_dirs_here
from elastic.errors import ConfigError, ExitCode
from elastic.observability.timeline import chrome_trace, spans
from elastic.records import flight_recorder, journal
from elastic.records.job_directory import check_job, is_live, read_json

EXAMPLES = """\
examples:
  elastic trace --job-dir elastic-jobs/train-1 > train-1.trace.json     open it in ui.perfetto.dev or chrome://tracing
  elastic trace --job-dir node-1/train-1 --job-dir node-2/train-1 --output train-1.trace.json
  elastic trace --job-dir elastic-jobs/train-1 --otlp http://127.0.0.1:4318

Generations, recoveries with their phases, copies, checkpoints and faults are those of the whole job, told from the
journals. Shards, waits and exchanges are those of the last 4096 notes of each worker, some 500 steps.
"""

_LIVES = ("worker_started", "worker_exited")


def add(verbs: Any) -> None:
    """The verb."""
    verb = verbs.add_parser(
        "trace",
        help="a job on a time axis, for Perfetto or an OpenTelemetry collector",
        description="Write what the workers of a job did, and when: as JSON in the trace event format, or by OTLP.",
        epilog=EXAMPLES + EXIT_CODES,
    )
    verb.add_argument(
        "--job-dir",
        type=Path,
        action="append",
        metavar="DIR",
        help="of a job of several machines: those of its nodes, one by one (default: the newest in ./elastic-jobs)",
    )
    verb.add_argument("--output", type=Path, metavar="FILE", help="where the JSON goes (default: the standard output)")
    verb.add_argument("--otlp", metavar="URL", help="send it to this collector instead, by OTLP over HTTP")
    verb.set_defaults(verb=_trace)


def _trace(options: argparse.Namespace) -> int:
    job_dirs = options.job_dir or job_dirs_here()[0][:1]
    for job_dir in job_dirs:
        check_job(job_dir)
    if options.otlp and options.output:
        raise ConfigError("--otlp sends the trace, and --output writes it; give one of them")
    by_dir = {job_dir: journal.read_all(job_dir) for job_dir in job_dirs}
    living = {worker for job_dir, lines in by_dir.items() if is_live(job_dir) for worker in _living(lines)}
    flights = [flight for job_dir in job_dirs for flight in flight_recorder.read_all(job_dir)]
    lines = sorted(chain(*by_dir.values()), key=lambda line: float(line["t_wall"]))
    if len(job_dirs) > 1:
        lines = list(map(journal.on_wall_clock, lines))
    found = spans.of_job(lines, flights, living, time.time_ns())
    job = str((read_json(job_dirs[0] / "job.json") or {}).get("name", ""))
    if options.otlp:
        from elastic.observability.timeline import otlp

        sent = otlp.export(found, job, options.otlp)
        print(f"elastic: {sent} spans of {job} sent to {options.otlp}", file=sys.stderr)
        return ExitCode.DONE
    text = json.dumps(chrome_trace.document(found, job), separators=(",", ":"))
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text + "\n", encoding="utf-8")
        print(f"elastic: {len(found)} events in {options.output}; open it in ui.perfetto.dev", file=sys.stderr)
    return ExitCode.DONE


def _living(lines: Sequence[journal.Line]) -> set[str]:
    """The workers that were started and have not ended."""
    of = {event: {line["worker_id"] for line in lines if line["event"] == event} for event in _LIVES}
    return of["worker_started"] - of["worker_exited"]
