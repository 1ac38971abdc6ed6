"""What the report shows, told from a run: who lived when, what was done to whom, how fast it went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from chaos_tests.checkers.history import Event, Injected, Run, injected


@dataclass(frozen=True, slots=True)
class Life:
    """One process of a slot, in seconds of the run. member_s: since when it is a member, None: never."""

    slot: str
    worker: str
    born_s: float
    member_s: float | None
    ended_s: float
    because: str


@dataclass(frozen=True, slots=True)
class Blow:
    """One injected fault. slots: those it hit; empty: a service or the machine."""

    number: int
    kind: str
    targets: tuple[str, ...]
    slots: tuple[str, ...]
    begun_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class Story:
    """Times are seconds from the first line of the journals. rates: steps applied in each second. skipped: (number,
    kind, why) of what was not done; what was done in its first part only is among the blows, too."""

    length_s: float
    lives: tuple[Life, ...]
    generations: tuple[tuple[float, int, str], ...]
    blows: tuple[Blow, ...]
    skipped: tuple[tuple[int, str, str], ...]
    rates: tuple[float, ...]


def tell(run: Run) -> Story:
    """The story of a run, which has at least one event."""
    begin_ns, end_ns = run.events[0].t_ns, run.events[-1].t_ns

    def at(t_ns: int) -> float:
        return max(0.0, (t_ns - begin_ns) / 1e9)

    return Story(
        at(end_ns),
        tuple(_lives(run, begin_ns, end_ns)),
        tuple((at(event.t_ns), event.generation, str(event.line["kind"])) for event in run.of("committed")),
        tuple(
            Blow(f.number, f.kind, f.targets, _slots(run, f), at(f.begun_ns), at(f.ended_ns(f.begun_ns)))
            for f in injected(run.events)
        ),
        tuple(_skipped(run)),
        _rates(run, begin_ns, end_ns),
    )


def _lives(run: Run, begin_ns: int, end_ns: int) -> list[Life]:
    started = {event.worker: event for event in run.of("worker_started")}
    members: dict[str, Event] = {}
    for event in run.of("entered"):
        members.setdefault(event.worker, event)
    ended = {event.worker: event for event in run.of("worker_exited")}
    return [
        Life(
            slot_of(worker),
            worker,
            (born.t_ns - begin_ns) / 1e9,
            (members[worker].t_ns - begin_ns) / 1e9 if worker in members else None,
            ((ended[worker].t_ns if worker in ended else end_ns) - begin_ns) / 1e9,
            str(ended[worker].line["because"]) if worker in ended else "still there",
        )
        for worker, born in started.items()
    ]


def _slots(run: Run, fault: Injected) -> tuple[str, ...]:
    workers = {event.worker for event in run.of("worker_started")}
    return tuple(slot_of(target) for target in fault.targets if target in workers)


def _skipped(run: Run) -> Iterator[tuple[int, str, str]]:
    for event in run.of("fault_skipped"):
        yield int(event.line["number"]), str(event.line["fault"]), str(event.line["because"])
    for fault in injected(run.events):
        if fault.incomplete is not None:
            yield fault.number, fault.kind, f"only its first part was done: {fault.incomplete.line['because']}"


def slot_of(worker: str) -> str:
    """`<node>.<slot>.<incarnation>` -> `<node>.<slot>`."""
    return worker.rpartition(".")[0]


def _rates(run: Run, begin_ns: int, end_ns: int) -> tuple[float, ...]:
    counts: Counter[int] = Counter()
    before = 0
    for event in run.of("steps_seen"):
        counts[int((event.t_ns - begin_ns) / 1e9)] += int(event.line["applied"]) - before
        before = int(event.line["applied"])
    return tuple(float(counts[second]) for second in range(int((end_ns - begin_ns) / 1e9) + 1))
