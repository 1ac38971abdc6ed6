"""What a run has left behind, as values: the only thing the checkers look at.

A history is the journals of all processes by time, the ledger of applied steps, the generations as etcd had them, how
the job ended, and the same of the quiet run. Every line knows the file and the byte at which it stands, so that a
counterexample can be looked up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from chaos_tests.scenario.catalogue import CATALOGUE, UNKNOWN
from chaos_tests.scenario.faults import Fault
from elastic.config import Timing

Line: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Event:
    """A journal line. at: ``<file>:<byte>``."""

    line: Line
    at: str = ""

    @property
    def name(self) -> str:
        return str(self.line["event"])

    @property
    def worker(self) -> str:
        return str(self.line.get("worker_id", ""))

    @property
    def generation(self) -> int:
        return int(self.line.get("generation", 0))

    @property
    def t_ns(self) -> int:
        return int(self.line["t_mono_ns"])

    @property
    def by_worker(self) -> bool:
        """Whether a worker wrote it of itself."""
        return bool(self.worker) and self.line.get("who") == self.worker


@dataclass(frozen=True, slots=True)
class HistoryStep:
    """A line of the ledger. at: ``<file>:<byte>``."""

    line: Line
    at: str = ""

    @property
    def number(self) -> int:
        return int(self.line["step"])

    @property
    def generation(self) -> int:
        return int(self.line["generation"])


@dataclass(frozen=True)
class Run:
    """One job, ended. result: its result.json, None if there is none. events: by time."""

    events: tuple[Event, ...]
    steps: tuple[HistoryStep, ...]
    result: Line | None

    def of(self, *names: str) -> Iterator[Event]:
        """Events of these names, by time."""
        found = sorted(place for name in set(names) for place in self._places.get(name, ()))
        return (self.events[place] for place in found)

    @cached_property
    def _places(self) -> Mapping[str, Sequence[int]]:
        """Name -> where its events are: checkers ask for few of very many, again and again."""
        places: dict[str, list[int]] = {}
        for place, event in enumerate(self.events):
            places.setdefault(event.name, []).append(place)
        return places

    @property
    def over(self) -> Event | None:
        """The first member says that it is at the end; exits after that are no losses."""
        return next(self.of("finished", "job_over", "job_ended"), None)

    @property
    def over_ns(self) -> int | None:
        return self.over.t_ns if self.over is not None else None


@dataclass(frozen=True, slots=True)
class Limits:
    """What counts as in time, in seconds. The promises are shorter; a loaded machine pauses.

    exit_s: from a fault that ends a worker until its loss is noted. freeze_s: the same for a frozen one.
    step_s: the longest time without an applied step while no fault that stops everybody lasts. stopped_s: for how long
    a worker may stand still before it may be declared lost.
    """

    exit_s: float = 5.0
    freeze_s: float = 10.0
    step_s: float = 30.0
    stopped_s: float = Timing().stopped_s


@dataclass(frozen=True, slots=True)
class History:
    """faulty: the run to be judged. quiet: the same job, undisturbed. keeps: whether the job is to take checkpoints or
    snapshots. rounds: whether its scripts run in rounds, so that there are no steps. ranks: how many processes the
    script has in each round; 0: as many as there are workers, or no rounds."""

    faulty: Run
    quiet: Run
    keeps: bool = True
    rounds: bool = False
    ranks: int = 0
    limits: Limits = Limits()


@dataclass(frozen=True, slots=True)
class Injected:
    """A fault as the harness's journal tells it. None: that never came.

    struck: when it was done to each worker, or to the service: a fault in two parts strikes twice.
    held: processes that were kept from beginning, while it lasted. noted_s: within which the others must know, if it is
    not as the limits say. incomplete: its second part never came, so what its kind is there for was not done.
    """

    number: int
    kind: str
    struck: Mapping[str, Event]
    lethal: bool
    event: Event
    seen: Event | None
    ended: Event | None
    held: tuple[str, ...] = ()
    noted_s: float | None = None
    incomplete: Event | None = None

    @property
    def row(self) -> Fault:
        """What is known of its kind."""
        return CATALOGUE.get(self.kind, UNKNOWN)

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(self.struck)

    @property
    def begun_ns(self) -> int:
        return self.event.t_ns

    def ended_ns(self, otherwise: int) -> int:
        return self.ended.t_ns if self.ended is not None else otherwise

    def lasted_s(self, otherwise: int) -> float:
        return (self.ended_ns(otherwise) - self.begun_ns) / 1e9


def injected(events: Iterable[Event]) -> tuple[Injected, ...]:
    """All injected faults, each with every worker it was done to."""
    first: dict[int, Event] = {}
    struck: dict[int, dict[str, Event]] = {}
    held: dict[int, list[str]] = {}
    later: dict[tuple[str, int], Event] = {}
    for event in events:
        number = event.line.get("number")
        match event.name:
            case "fault_injected" if isinstance(number, int):
                first.setdefault(number, event)
                struck.setdefault(number, {}).setdefault(event.worker or str(event.line.get("target", "")), event)
            case "fault_held" if isinstance(number, int):
                held.setdefault(number, []).append(event.worker)
            case "fault_seen" | "fault_ended" | "fault_incomplete" if isinstance(number, int):
                later.setdefault((event.name, number), event)
    return tuple(
        Injected(
            number,
            str(event.line.get("fault", "")),
            struck[number],
            bool(event.line.get("lethal", False)),
            event,
            later.get(("fault_seen", number)),
            later.get(("fault_ended", number)),
            tuple(held.get(number, ())),
            event.line.get("noted_s"),
            later.get(("fault_incomplete", number)),
        )
        for number, event in first.items()
    )


def every_kind_came(run: Run) -> bool:
    """Whether at least one fault of every planned kind was injected, in both its parts if it has two. If so, a longer
    run of this plan would show nothing more."""
    faults = injected(run.events)
    came = {fault.kind for fault in faults if fault.incomplete is None}
    planned = {fault.kind for fault in faults} | {str(event.line["fault"]) for event in run.of("fault_skipped")}
    return bool(came) and came >= planned
