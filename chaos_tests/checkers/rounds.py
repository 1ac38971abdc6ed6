"""I17 to I20, of a job whose scripts run in rounds: a round is its generation, no worker has a script of two rounds at
a time, nothing outlives its script, rounds go on to the end, and none of them begins before what is kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

from chaos_tests.checkers.history import Event, History, Run, injected
from chaos_tests.checkers.recovery import bad_end, idle_s, lasting_stalls
from chaos_tests.checkers.verdict import CheckerVerdict, broken, first_broken, holds, not_applicable, unknown
from elastic.protocol.worker_id import node_of


def worlds(history: History) -> CheckerVerdict:
    """I17: a script has the rank and the world of its worker in the generation, and is started once in it. With --ranks
    the world is always the same, the workers share its ranks evenly, and those of a node are in a row."""
    run = history.faulty
    count = sum(1 for _ in run.of("script_started"))
    if not count:
        return unknown("no script was started")
    complete = len(list(_complete(run)))
    good = holds(f"{count} scripts started, in {complete} rounds that were complete")
    return first_broken((*_wrong_worlds(run, history.ranks), *_uneven(run, history.ranks)), good)


def _wrong_worlds(run: Run, ranks: int) -> Iterator[CheckerVerdict]:
    records = {event.generation: event for event in run.of("entered", "committed")}
    begun: dict[tuple[int, int], Event] = {}
    for event in run.of("script_started"):
        record = records.get(event.generation)
        if record is None:
            yield broken(f"{event.worker} started a script in generation {event.generation}, never committed", event.at)
            continue
        members, rank, world = list(record.line["members"]), event.line["rank"], event.line["world"]
        wrong = world != (ranks or len(members)) or not 0 <= rank < world or event.worker not in members
        if wrong or (not ranks and members[rank] != event.worker):
            because = f"the script of {event.worker} has rank {rank} of {world} in {members}"
            yield broken(because, record.at, event.at)
        before = begun.setdefault((event.generation, rank), event)
        if before is not event:
            because = f"rank {rank} was started twice in round {event.generation}"
            yield broken(f"{because}, by {before.worker} and {event.worker}", before.at, event.at)


def _uneven(run: Run, ranks: int) -> Iterator[CheckerVerdict]:
    """Find complete rounds in which workers do not share the ranks evenly, or a node has ranks in two places."""
    complete = {event.generation: event for event in _complete(run)} if ranks else {}
    members = {event.generation: list(event.line["members"]) for event in run.of("entered", "committed")}
    homes: dict[int, dict[int, str]] = {}
    for event in run.of("script_started"):
        homes.setdefault(event.generation, {})[event.line["rank"]] = event.worker
    for generation, last in complete.items():
        workers = [homes[generation][rank] for rank in sorted(homes[generation])]
        if not _is_even(workers, members.get(generation, ())):
            yield broken(f"the ranks of round {generation} are those of {workers}, in this order", last.at)


def _is_even(workers: Sequence[str], members: Sequence[str]) -> bool:
    """workers: of each rank."""
    counts = [workers.count(member) for member in members]
    nodes = [node for node, _ in groupby(map(node_of, workers))]
    return max(counts) - min(counts) <= 1 and len(nodes) == len(set(nodes))


def one_script(history: History) -> CheckerVerdict:
    """I18: a script is started when the scripts of earlier rounds of all members have ended, and nothing that a script
    has started is there when it has ended, or its worker."""
    run = history.faulty
    ends = sum(1 for _ in run.of("script_ended"))
    found = (*_overlaps(run), *_outlived(run))
    return first_broken(found, holds(f"{ends} ends of scripts were seen before the next round, and nothing was left"))


def _overlaps(run: Run) -> Iterator[CheckerVerdict]:
    members = {event.generation: list(event.line["members"]) for event in run.of("entered", "committed")}
    running: dict[tuple[str, int], Event] = {}
    for event in run.of("script_started", "script_ended", "worker_exited"):
        if event.name == "script_ended":
            running.pop((event.worker, event.line["script"]), None)
        elif event.name == "worker_exited":
            running = {key: other for key, other in running.items() if other.worker != event.worker}
        else:
            for other in running.values():
                if other.worker in members.get(event.generation, ()) and other.generation != event.generation:
                    because = f"{event.worker} started round {event.generation} while the script of {other.worker}"
                    yield broken(f"{because} still ran in round {other.generation}", other.at, event.at)
            running[event.worker, event.line["script"]] = event


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
    longest_s, at, stalls = 0.0, "", lasting_stalls(run)
    for before, after in pairwise(begun):
        over = _first_end(run, before, after)
        gap_s = idle_s(stalls, over.t_ns, after.t_ns)
        longest_s, at = max((longest_s, at), (gap_s, after.at))
    if longest_s > history.limits.step_s:
        return broken(f"no round for {longest_s:.1f} s while no fault stopped everybody", at)
    return holds(f"the job came to its end; the longest time from the end of a round to the next was {longest_s:.1f} s")


def kept(history: History) -> CheckerVerdict:
    """I20: no round begins with an earlier step than a round before it, unless a fault between them takes memory."""
    run = history.faulty
    first = {event.generation: int(event.line["step"]) for event in run.of("kept_found")}
    if not first:
        return not_applicable("no round went on from memory: the script does not call elastic.keep")
    takes = [fault.begun_ns for fault in injected(run.events) if fault.row.forgets]
    begun = list(_complete(run))
    for before, after in pairwise(begun):
        least, step = (first.get(event.generation, 0) for event in (before, after))
        if step < least and not any(before.t_ns < taken_ns < after.t_ns for taken_ns in takes):
            because = f"round {after.generation} begins with step {step}, and round {before.generation} with {least}"
            return broken(because, before.at, after.at)
    on = sum(event.generation in first for event in begun)
    return holds(f"{on} of {len(begun)} rounds went on from memory, up to step {max(first.values())}")


def _complete(run: Run) -> Iterator[Event]:
    """The last start of a script of each round of which all ranks have begun."""
    begun: dict[int, set[int]] = {}
    for event in run.of("script_started"):
        there = begun.setdefault(event.generation, set())
        there.add(event.line["rank"])
        if len(there) == event.line["world"]:
            yield event


def _first_end(run: Run, before: Event, after: Event) -> Event:
    """What ended the round of `before`: the first end of a script of it, or the loss of a member."""
    ends = (
        event
        for event in run.of("script_ended", "worker_dying", "worker_exited", "committed")
        if before.t_ns < event.t_ns <= after.t_ns
    )
    return next(ends, before)
