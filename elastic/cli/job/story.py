"""`elastic logs` and `elastic story`: what workers have printed, and what happened to one, or around a generation."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from elastic.cli.options import EXIT_CODES, add_answer, add_either, answer, client_of, job_dir_of
from elastic.errors import ConfigError, ExitCode
from elastic.records.events import story

if TYPE_CHECKING:
    from elastic.records.journal import Line

LOGS_EXAMPLES = """\
examples:
  elastic logs -f                                              of the newest job in ./elastic-jobs
  elastic logs --rendezvous 127.0.0.1:7070                     of the only job: all its workers
  elastic logs --rendezvous 127.0.0.1:7070 --job train-1 -f gpu-7.0.0
  elastic logs --job-dir elastic-jobs/train-1 local.0.0
"""

EXAMPLES = """\
examples:
  elastic story 2                                            of the newest job in ./elastic-jobs
  elastic story local.1.0 --job-dir elastic-jobs/train-1     a worker, from its start to its end
  elastic story 2 --job-dir elastic-jobs/train-1             a generation: what led to it, until it ends
  elastic story gpu-7.0.0 --rendezvous 127.0.0.1:7070 --job train-1
  elastic story 2 --job-dir elastic-jobs/train-1 --json | jq -r '.moments[].because'
  elastic story --why                                        why the job has ended, or loses workers
  elastic story --flight                                     what each worker did last, and who waits for whom

It is told from the journals of the job: with --job-dir of those there, with --rendezvous of its nodes and of the
replicas that are given. Times of several machines are those of their clocks. --flight is told from files that a killed
worker leaves, of the directories given.
"""


def add(verbs: Any) -> None:
    logs = verbs.add_parser(
        "logs",
        help="what workers have printed",
        description="Show the logs of a job's workers, wherever they are.",
        epilog=LOGS_EXAMPLES + EXIT_CODES,
    )
    logs.add_argument("worker", metavar="WORKER", nargs="?", help="one worker (default: all)")
    add_either(logs)
    logs.add_argument("--job", metavar="JOB", help="with --rendezvous (default: the only one that is not over)")
    logs.add_argument("-f", "--follow", action="store_true", help="also print what comes later, until Ctrl-C")
    logs.add_argument("--json", action="store_true", help='as JSON lines: {"log", "text"}')
    logs.set_defaults(verb=_logs)
    verb = verbs.add_parser(
        "story",
        help="what happened to a worker, or around a generation, and why",
        description="Tell what happened to a worker, or around a generation, and why.",
        epilog=EXAMPLES + EXIT_CODES,
    )
    verb.add_argument("about", metavar="WORKER|GENERATION", nargs="?", help="such as gpu-7.0.0, or a number")
    verb.add_argument("--why", action="store_true", help="why the job has ended, or loses workers again and again")
    verb.add_argument("--flight", action="store_true", help="what each worker did last, and who waits for whom")
    add_either(verb, several=True)
    verb.add_argument("--job", metavar="JOB", help="with --rendezvous (default: the only one that is not over)")
    add_answer(verb, _story)


def _logs(options: argparse.Namespace) -> int:
    from elastic.fleet import remote_logs

    if (job_dir := job_dir_of(options)) is not None:
        source: remote_logs.LogSource = remote_logs.DirectoryLogs(job_dir)
    else:
        client = client_of(options)
        source = remote_logs.FleetLogs(client, client.job(options.job or "")["job"])
    remote_logs.show(source, options.worker, follow=options.follow, as_json=options.json)
    return ExitCode.DONE


def _story(options: argparse.Namespace) -> int:
    if (options.about is not None) + options.flight + options.why != 1:
        raise ConfigError(
            "say what the story is about: a worker or a generation; or --why; or --flight, of all workers"
        )
    if options.job_dir is None and (newest := job_dir_of(options)) is not None:
        options.job_dir = [newest]
    if options.flight:
        return _flight(options)
    lines, away = _lines(options)
    for who, because in away.items():
        print(f"elastic: what {who} knows is missing: {because}", file=sys.stderr)
    if options.why:
        why, moments = story.why(lines), story.of_failures(lines)
        document = {"why": why, "moments": _told(moments), "away": away}
        return answer(options, document, f"{why}\n{story_text(moments)}".rstrip())
    if options.about.isdecimal():
        moments = story.of_generation(lines, int(options.about))
        known = ", ".join(map(str, story.generations(lines)))
    else:
        moments = story.of_worker(lines, options.about)
        known = ", ".join(story.workers(lines))
    if not moments:
        what = "generation" if options.about.isdecimal() else "worker"
        raise ConfigError(f"there is no {what} {options.about} in the journals; there are {known or 'none'}")
    document = {"about": options.about, "moments": _told(moments), "away": away}
    return answer(options, document, story_text(moments, _recovery(options, lines)))


def _told(moments: list[story.StoryMoment]) -> list[dict[str, Any]]:
    return [{"t_wall": m.line["t_wall"], "said": m.said, "because": m.because, "line": m.line} for m in moments]


def _flight(options: argparse.Namespace) -> int:
    from elastic.records import flight_recorder, journal, last_notes
    from elastic.records.job_directory import is_live

    if options.job_dir is None:
        raise ConfigError("--flight is told from the directories of the job's nodes: give --job-dir")
    flights = [flight for job_dir in options.job_dir for flight in flight_recorder.read_all(job_dir)]
    if not flights:
        raise ConfigError(f"{options.job_dir[0] / 'flight'} holds no worker's notes")
    ranks = last_notes.ranks(line for job_dir in options.job_dir for line in journal.read_all(job_dir, ("entered",)))
    lasts = last_notes.last_notes(flights, time.time_ns() if any(map(is_live, options.job_dir)) else None, ranks)
    return answer(options, {"workers": [asdict(last) for last in lasts]}, last_notes.text(lasts))


def _lines(options: argparse.Namespace) -> tuple[list[Line], dict[str, str]]:
    """By time; and whose are missing, and why."""
    if options.job_dir is None:
        from elastic.fleet import remote_logs

        client = client_of(options)
        return remote_logs.of_job(client, client.job(options.job or "")["job"])
    from elastic.records import journal
    from elastic.records.job_directory import check_job

    for job_dir in options.job_dir:
        check_job(job_dir)
    lines = [line for job_dir in options.job_dir for line in journal.read_all(job_dir)]
    if len(options.job_dir) > 1:
        lines.sort(key=lambda line: float(line["t_wall"]))
    return lines, {}


def _recovery(options: argparse.Namespace, lines: list[Line]) -> str:
    """Where the time of the recovery went that led to this generation, if there was one and one clock has seen it."""
    from elastic.records.journal import recoveries

    if not options.about.isdecimal() or options.job_dir is None or len(options.job_dir) > 1:
        return ""
    told = next((r for r in recoveries(lines) if r["complete"] and r["generation"] == int(options.about)), None)
    if told is None:
        return ""
    parts = ", ".join(f"{name} {told[f'{name}_ms']:.0f}" for name in ("detect", "abort", "decide", "build", "sync"))
    return f"recovery {told['recovery_ms']:.0f} ms: {parts}; then the operation in {told['redo_ms']:.0f} ms"


def story_text(moments: list[story.StoryMoment], recovery: str = "") -> str:
    days = {time.strftime("%F", time.localtime(moment.line["t_wall"])) for moment in moments}
    lines = []
    for moment in moments:
        at_s = float(moment.line["t_wall"])
        shown = time.strftime("%F %T" if len(days) > 1 else "%T", time.localtime(at_s)) + f"{at_s % 1:.3f}"[1:]
        because = f": {moment.because.partition(chr(10))[0]}" if moment.because else ""
        lines.append(f"{shown}  {moment.said}{because}")
    return "\n".join([*lines, *([recovery] if recovery else [])])
