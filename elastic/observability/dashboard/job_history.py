"""A job as its page shows it: a document of everything until now, and numbered events of what comes later.

It takes the lines of journals and of the ledger in the order of time, and reads no file and no clock. A page that has
the document of event number n, and then all events after n, shows what a new document would show.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from elastic.metrics.time_spent import TimeSpent
from elastic.observability.dashboard.thinned_series import ThinnedSeries
from elastic.records.events import problems, story
from elastic.records.events.table import ROWS, SAVES, row
from elastic.records.journal import Line, Recoveries, on_wall_clock
from elastic.records.ledger_tail import samples_of

KEPT_EVENTS = 20_000
"""A page that is further behind reads the whole document anew."""

KEPT_VALUES = 200_000
"""Most steps and logged values in the events that are kept: one event may have thousands, of a job whose steps are
short, and the events of a day of such a job would take gigabytes."""

KEPT_MOMENTS = 2000
KEPT_OTHERS = 1000
"""Generations, recoveries, checkpoints and faults: of each, the newest."""

RATE_S = 1.0
"""Least seconds between two points of the rate."""

LIVE_STEPS = 5000
"""Most steps of one look that are news. More are of before the dashboard began: they are no events, which would take
the memory of the whole ledger, and have no rate."""

EVENTS = tuple({row.name for row in ROWS if row.on_page or row.feeds} | {*problems.EVENTS, "steps_planned"})
"""All events of journals that matter here."""


@dataclass(frozen=True, slots=True)
class PageEvent:
    """number: 1 for the first one. kind: moment, generation, recovery, checkpoint, fault, steps, rate or plan."""

    number: int
    kind: str
    data: Mapping[str, Any]


class JobHistory:
    """A JobReader (elastic/records/job_follower.py). Any thread may call its methods. leader_only: the journals are
    those of leaders and agents of several machines, without those of workers."""

    events = EVENTS

    def __init__(self, *, leader_only: bool = False) -> None:
        self._leader_only = leader_only
        self.number = 0
        """Number of the newest event."""
        self.changes = 0
        """How many events may have changed what the job's leader says; steps do not."""
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._log: deque[PageEvent] = deque()
        self._values = 0
        """In the events of the log."""
        self._kept: dict[str, deque[Mapping[str, Any]]] = {
            "moment": deque(maxlen=KEPT_MOMENTS),
            **{kind: deque(maxlen=KEPT_OTHERS) for kind in ("generation", "recovery", "checkpoint", "fault")},
        }
        self._recoveries = Recoveries(leader_only=self._leader_only)
        self._recovery_count = 0
        self._problems = problems.Problems()
        self._spent = TimeSpent()
        self._steps = ThinnedSeries()
        self._rate = ThinnedSeries()
        self._rated: tuple[float, int, int] | None = None
        """Monotonic seconds of the newest point of the rate, and how many steps and samples there were then."""
        self._behind = False
        self._applied = 0
        self._samples = 0
        self._plan: dict[str, Any] = {}
        self._ended_s: float | None = None
        self._seen_s = 0.0

    # ------------------------------------------------------------------------------------------ what comes in

    def anew(self) -> None:
        """Another job has the place of this one. Pages read the document anew."""
        with self._lock:
            self._begin()
            self._skip()

    def see(self, line: Line) -> None:
        """A line that no process of ours has written is shown as such."""
        with self._lock:
            try:
                self._see(line)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                said = f"a line of a journal cannot be read: {type(error).__name__}: {error}"[:200]
                told = {"t": self._seen_s, "generation": 0, "because": "", "event": "unreadable", "level": "warn"}
                self._put("moment", {**told, "said": said, "worker": "", "node": ""})

    def _see(self, line: Line) -> None:
        recovery = self._recoveries.see(on_wall_clock(line) if self._leader_only else line)
        self._spent.see(line, recovery)
        self._seen_s = max(self._seen_s, float(line["t_wall"]))
        event = line["event"]
        if event in problems.EVENTS:
            self._problems.see(line)
        if recovery is not None and recovery["complete"]:
            self._recovery_count += 1
            self._put("recovery", {**recovery, "t": line["t_wall"]})
        if event == "committed":
            members = [str(member) for member in line.get("members", ())]
            self._put("generation", {**_head(line), "kind": line.get("kind", ""), "members": len(members)})
        if SAVES in row(event).feeds:
            kind, _, outcome = event.partition("_")
            told: dict[str, Any] = {
                name: line[name] for name in ("step", "bytes", "series", "entry", "because") if name in line
            }
            self._put("checkpoint", {"t": line["t_wall"], "kind": kind, "outcome": outcome, **told})
        if event in ("fault_injected", "fault_ended"):
            told = {name: line[name] for name in ("number", "fault", "target") if name in line}
            self._put("fault", {"t": line["t_wall"], "event": event, "worker": line["worker_id"], **told})
        plan = {"total": line.get("total"), "shards": line.get("shards")}
        if event == "steps_planned" and plan != self._plan:
            self._plan = plan
            self._put("plan", plan)
        if row(event).on_page:
            said, level = story.moment(line), str(row(event).level)
            told = {**_head(line), "event": event, "level": level, "said": said.said, "because": said.because}
            self._put("moment", {**told, "worker": line["worker_id"], "node": line.get("node", "")})

    def resumed(self, redone: Sequence[int] | None) -> None:
        with self._lock:
            self._spent.run_begins(0 if redone is None else redone[1] - redone[0] + 1)
            self._recoveries.end()
            self._ended_s = None

    def applied(self, steps: Iterable[Mapping[str, Any]], now_s: float) -> None:
        with self._lock:
            shown = [step for step in steps if self._steps.last is None or step["step"] > self._steps.last]
            self._behind = len(shown) > LIVE_STEPS
            told = []
            for step in shown:
                told.append(self._steps.add(step["step"], dict(numbers(step.get("scalars", {})))))
                self._applied += 1
                self._samples += samples_of(dict(step))
            if self._behind:
                self._skip()
            elif shown:
                self._put("steps", {"at": [step["step"] for step in shown], "scalars": told})

    def tick(self, now_s: float, now_wall: float) -> None:
        """A point of the rate is made where steps have come; times without steps have none, so that they show as a
        fall to 0."""
        with self._lock:
            if self._ended_s is not None:
                return
            if self._rated is None or self._behind:
                # What was applied before the first look has no time.
                self._rated = None if self._behind else (now_s, self._applied, self._samples)
                return
            since_s, steps, samples = self._rated
            if now_s - since_s < RATE_S:
                return
            between_s = now_s - since_s
            new = {"steps_per_s": self._applied - steps, "samples_per_s": self._samples - samples}
            rate = {name: count / between_s for name, count in new.items()}
            self._rated = (now_s, self._applied, self._samples)
            if self._applied:
                self._rate.add(now_wall, rate)
                self._put("rate", {"t": now_wall, **rate})

    def ended(self, at_wall: float | None) -> None:
        """The job is over since that time, or its last line; None: it goes on."""
        with self._lock:
            if at_wall is None:
                self._ended_s = None
            elif self._ended_s is None:
                self._ended_s = at_wall

    # ------------------------------------------------------------------------------------------ what goes out

    def document(self) -> dict[str, Any]:
        """Everything that events until `number` have told."""
        with self._lock:
            return {
                "number": self.number,
                **{f"{kind}s": list(kept) for kind, kept in self._kept.items() if kind != "recovery"},
                "recoveries": list(self._kept["recovery"]),
                "steps": self._steps.document(),
                "rate": self._rate.document(),
                "plan": self._plan,
            }

    def summary(self, now_wall: float) -> dict[str, Any]:
        """What changes with time alone, too: counts, and where the time went."""
        with self._lock:
            return {
                "steps": self._applied,
                "samples": self._samples,
                "last_step": self._steps.last,
                "recoveries": self._recovery_count,
                "troubles": [asdict(problem) for problem in self._problems.now],
                "time": self._spent.document(self._now(now_wall), self._applied),
            }

    def _now(self, now_wall: float) -> float:
        return now_wall if self._ended_s is None else max(self._ended_s, self._seen_s)

    def after(self, number: int) -> list[PageEvent] | None:
        """The events after that number, oldest first; None: some of them are not kept any more, or it is of another
        history."""
        with self._lock:
            first = self._log[0].number if self._log else self.number + 1
            if not first - 1 <= number <= self.number:
                return None
            return list(islice(self._log, number - first + 1, None))

    def _skip(self) -> None:
        """No event tells what has changed: pages read the document anew."""
        self.number += 1
        self._log.clear()
        self._values = 0

    def _put(self, kind: str, data: Mapping[str, Any]) -> None:
        self.number += 1
        self.changes += kind in self._kept
        self._log.append(PageEvent(self.number, kind, data))
        self._values += _values(self._log[-1])
        while len(self._log) > KEPT_EVENTS or self._values > KEPT_VALUES:
            self._values -= _values(self._log.popleft())
        if kind in self._kept:
            self._kept[kind].append(data)


def _values(event: PageEvent) -> int:
    """How many steps and logged values it has."""
    return sum(1 + len(scalars) for scalars in event.data["scalars"]) if event.kind == "steps" else 0


def _head(line: Line) -> dict[str, Any]:
    return {"t": line["t_wall"], "generation": line["generation"], "because": line.get("because", "")}


def numbers(scalars: object) -> Iterator[tuple[str, float]]:
    """Finite values; the ledger has "nan" and "inf" as text, and a curve has a gap there."""
    if isinstance(scalars, Mapping):
        for name, value in scalars.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                with contextlib.suppress(OverflowError):  # an integer that no float can hold
                    if math.isfinite(value):
                        yield str(name), float(value)
