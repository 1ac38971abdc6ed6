"""I17 to I19, of a job whose scripts run in rounds: a round is its generation, no worker has two scripts at a time,
nothing outlives its script, and rounds go on to the end."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from chaos_tests.checkers.history import Event, History, Run
from chaos_tests.checkers.recovery import bad_end, idle_s
from chaos_tests.checkers.verdict import CheckerVerdict, broken, first_broken, holds, unknown


def worlds(history: History) -> CheckerVerdict:
    """I17: a script has the rank and the world of its worker in the generation, and is started once in it."""
    run = history.faulty
    count = sum(1 for _ in run.of("script_started"))
    if not count:
        return unknown("no script was started")
    complete = len(list(_complete(run)))
    return first_broken(_wrong_worlds(run), holds(f"{count} scripts started, in {complete} rounds that were complete"))


def _wrong_worlds(run: Run) -> Iterator[CheckerVerdict]:
    records = {event.generation: event for event in run.of("entered", "committed")}
    begun: dict[tuple[int, str], Event] = {}
    for event in run.of("script_started"):
        record = records.get(event.generation)
        if record is None:
            yield broken(f"{event.worker} started a script in generation {event.generation}, never committed", event.at)
            continue
        members, rank, world = list(record.line["members"]), event.line["rank"], event.line["world"]
        if world != len(members) or not 0 <= rank < len(members) or members[rank] != event.worker:
            because = f"the script of {event.worker} has rank {rank} of {world} in {members}"
            yield broken(because, record.at, event.at)
        before = begun.setdefault((event.generation, event.worker), event)
        if before is not event:
            because = f"{event.worker} started its script twice in round {event.generation}"
            yield broken(because, before.at, event.at)


def one_script(history: History) -> CheckerVerdict:
    """I18: a script is started when the scripts of earlier rounds of all members have ended, and nothing that a script
    has started is there when it has ended, or its worker."""
    run = history.faulty
    ends = sum(1 for _ in run.of("script_ended"))
    found = (*_overlaps(run), *_outlived(run))
    return first_broken(found, holds(f"{ends} ends of scripts were seen before the next round, and nothing was left"))


def _overlaps(run: Run) -> Iterator[CheckerVerdict]:
    members = {event.generation: list(event.line["members"]) for event in run.of("entered", "committed")}
    running: dict[str, Event] = {}
    for event in run.of("script_started", "script_ended", "worker_exited"):
        if event.name != "script_started":
            running.pop(event.worker, None)
            continue
        for worker in members.get(event.generation, ()):
            other = running.get(worker)
            if other is not None and other.generation != event.generation:
                because = f"{event.worker} started round {event.generation} while the script of {worker} still ran"
                yield broken(f"{because} in round {other.generation}", other.at, event.at)
        running[event.worker] = event


def _outlived(run: Run) -> Iterator[CheckerVerdict]:
    for event in run.of("script_outlived"):
        because = f"process {event.line['script']} outlived the script of {event.worker}: {event.line['because']}"
        yield broken(because, event.at)


def liveness(history: History) -> CheckerVerdict:
    """I19: the job comes to its end, and whatever happens to a round, the next complete one begins in time."""
    run = history.faulty
    if (badly := bad_end(run)) is not None:
        return badly
    begun = list(_complete(run))
    if not begun:
        return unknown("no round was complete")
    longest_s, at = 0.0, ""
    for before, after in pairwise(begun):
        over = _first_end(run, before, after)
        gap_s = idle_s(run, over.t_ns, after.t_ns)
        longest_s, at = max((longest_s, at), (gap_s, after.at))
    if longest_s > history.limits.step_s:
        return broken(f"no round for {longest_s:.1f} s while no fault stopped everybody", at)
    return holds(f"the job came to its end; the longest time from the end of a round to the next was {longest_s:.1f} s")


def _complete(run: Run) -> Iterator[Event]:
    """The last start of a script of each round that all its members have begun."""
    members = {event.generation: set(event.line["members"]) for event in run.of("entered", "committed")}
    begun: dict[int, set[str]] = {}
    for event in run.of("script_started"):
        there = begun.setdefault(event.generation, set())
        there.add(event.worker)
        if there == members.get(event.generation):
            yield event


def _first_end(run: Run, before: Event, after: Event) -> Event:
    """What ended the round of `before`: the first end of a script of it, or the loss of a member."""
    ends = (
        event
        for event in run.of("script_ended", "worker_dying", "worker_exited", "committed")
        if before.t_ns < event.t_ns <= after.t_ns
    )
    return next(ends, before)
