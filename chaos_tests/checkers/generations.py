"""I1 to I4: who is a member, by whose word, in which order, and what those who are not any more still did."""

from __future__ import annotations

from collections.abc import Iterator

from chaos_tests.checkers.history import Event, History, Run, injected
from chaos_tests.checkers.verdict import CheckerVerdict, broken, first_broken, holds, unknown
from chaos_tests.scenario.faults import Effect

EFFECTS = frozenset({"op_complete", "joined", "ring_up"})
"""What only a member of the generation it names may do."""

THAWED_LIVES_S = 5.0
"""A thawed worker learns within this time that it is fenced."""

FENCED = "found itself fenced"


def one_owner(history: History) -> CheckerVerdict:
    """I1: for each number at most one member list was ever written, and numbers only grow."""
    run = history.faulty
    if gap := next(run.of("etcd_gap"), None):
        return unknown(f"etcd's history has a gap: {gap.line['because']}")
    written = sorted(run.of("etcd_put"), key=lambda event: int(event.line["revision"]))
    if not written:
        return unknown("etcd's history was not recorded")
    return first_broken(_two_owners(run, written), holds(f"{len(written)} generations, each written once"))


def _two_owners(run: Run, written: list[Event]) -> Iterator[CheckerVerdict]:
    records: dict[int, Event] = {}
    highest = 0
    for event in written:
        number = int(event.line["number"])
        if number in records:
            yield broken(f"generation {number} was written twice", records[number].at, event.at)
        if number <= highest:
            yield broken(f"generation {number} was written after {highest}", event.at)
        records[number], highest = event, max(highest, number)
    for event in run.of("committed"):
        record = records.get(event.generation)
        if record is None:
            yield broken(f"generation {event.generation} was announced, but etcd never had it", event.at)
        elif list(record.line["members"]) != list(event.line["members"]):
            yield broken(f"generation {event.generation} was announced with other members", record.at, event.at)


def agreement(history: History) -> CheckerVerdict:
    """I2: all workers that enter a generation, and the leader, name the same members in the same order."""
    run = history.faulty
    entered = list(run.of("entered"))
    if not entered:
        return unknown("no worker has entered a generation")
    return first_broken(_disagreements(run), holds(f"{len(entered)} entries into generations agree with their records"))


def _disagreements(run: Run) -> Iterator[CheckerVerdict]:
    said: dict[int, Event] = {event.generation: event for event in run.of("committed")}
    for event in run.of("entered"):
        first = said.setdefault(event.generation, event)
        if list(first.line["members"]) != list(event.line["members"]) or first.line["kind"] != event.line["kind"]:
            yield broken(f"{event.worker} entered another generation {event.generation}", first.at, event.at)


def ranks(history: History) -> CheckerVerdict:
    """I3: each member has the rank of its place in the list, once; survivors keep their order, newcomers follow."""
    run = history.faulty
    if next(run.of("entered"), None) is None:
        return unknown("no worker has entered a generation")
    return first_broken(_wrong_ranks(run), holds("ranks are the places in the list, survivors first"))


def _wrong_ranks(run: Run) -> Iterator[CheckerVerdict]:
    lists: dict[int, Event] = {}
    for event in run.of("entered"):
        members = list(event.line["members"])
        rank = int(event.line["rank"])
        if len(set(members)) != len(members) or not 0 <= rank < len(members) or members[rank] != event.worker:
            yield broken(f"{event.worker} has rank {rank} in {members}", event.at)
        lists.setdefault(event.generation, event)
    before: Event | None = None
    for number in sorted(lists):
        event = lists[number]
        if before is not None:
            older = list(before.line["members"])
            members = list(event.line["members"])
            survivors = [worker for worker in older if worker in members]
            if members[: len(survivors)] != survivors:
                yield broken(f"the order of {older} became {members}", before.at, event.at)
        before = event


def fencing(history: History) -> CheckerVerdict:
    """I4: nobody does anything in a generation it is not in, or after it was told to leave."""
    run = history.faulty
    if next(run.of("committed"), None) is None:
        return unknown("no generation was committed")
    found = (*_strangers(run), *_late_effects(run), *_stale_steps(run, history.ranks), *_zombies(history))
    return first_broken(found, holds("every effect is of a member, in its generation, before it was left out"))


def _records(run: Run) -> dict[int, Event]:
    """generation -> the event that has its members. A leader that stood still while it committed announces nothing; the
    next one adopts what it finds in etcd."""
    stored = {int(event.line["number"]): event for event in run.of("etcd_put")}
    return stored | {event.generation: event for event in run.of("committed")}


def _strangers(run: Run) -> Iterator[CheckerVerdict]:
    lists = _records(run)
    for event in run.events:
        if event.name not in EFFECTS or not event.by_worker:
            continue
        record = lists.get(event.generation)
        if record is None:
            yield broken(f"{event.worker}: {event.name} in generation {event.generation}, never committed", event.at)
        elif event.worker not in record.line["members"]:
            yield broken(f"{event.worker}: {event.name} in generation {event.generation} without it", event.at)


def _late_effects(run: Run) -> Iterator[CheckerVerdict]:
    reports: dict[str, Event] = {}
    gone: dict[str, Event] = {}
    for event in run.events:
        if not event.by_worker:
            continue
        if event.name == "reported":
            reports[event.worker] = event
        elif event.name == "fenced":
            gone.setdefault(event.worker, event)
        elif event.name in EFFECTS:
            report = reports.get(event.worker)
            after_last = None
            if report is not None and event.name == "op_complete" and event.generation == report.generation:
                after_last = int(event.line["op"]) - (int(report.line["reduced"]) - 1)
                if after_last > 0:
                    yield broken(f"{event.worker}: an operation more than it had reported", report.at, event.at)
            # The script's thread may write down the last operation just behind the report that has counted it.
            if event.worker in gone and after_last != 0:
                yield broken(f"{event.worker}: {event.name} after it was fenced", gone[event.worker].at, event.at)


def _stale_steps(run: Run, ranks: int) -> Iterator[CheckerVerdict]:
    """ranks: of a script that is kept, whose world they are; 0: the members are."""
    lists = _records(run)
    newest = 0
    for step in run.steps:
        record = lists.get(step.generation)
        if record is None:
            yield broken(f"step {step.number} is of generation {step.generation}, never committed", step.at)
        elif (ranks or len(record.line["members"])) != step.line["world_size"]:
            because = f"step {step.number} says a world of {step.line['world_size']} in generation {step.generation}"
            yield broken(because, record.at, step.at)
        if step.generation < newest:
            because = f"step {step.number} is of generation {step.generation}, after one of generation {newest}"
            yield broken(because, step.at)
        newest = max(newest, step.generation)


def _zombies(history: History) -> Iterator[CheckerVerdict]:
    """A worker that was expelled while it was frozen and thawed afterwards must have gone by itself."""
    run = history.faulty
    expelled = {event.worker: event for event in run.of("expelled")}
    killed = {event.worker: event for event in run.of("kill")}
    ends = {event.worker: event for event in run.of("worker_exited")}
    for fault in injected(run.events):
        if fault.ended is None or fault.row.effect is not Effect.FREEZES:
            continue
        thawed_ns = fault.ended.t_ns
        for worker in fault.targets:
            out, end = expelled.get(worker), ends.get(worker)
            if out is None or not fault.begun_ns <= out.t_ns <= thawed_ns or (end and end.t_ns < thawed_ns):
                continue
            if worker in killed and (killed[worker].t_ns - thawed_ns) / 1e9 < THAWED_LIVES_S:
                continue  # its grace was over before it could have found out
            if run.over_ns is not None and run.over_ns < thawed_ns + THAWED_LIVES_S * 1e9:
                continue
            if end is None or end.line["because"] != FENCED:
                how = "is still there" if end is None else str(end.line["because"])
                yield broken(f"{worker} was thawed after a generation without it, and {how}", out.at, fault.ended.at)
