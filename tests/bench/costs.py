"""Figures of large jobs as a table with its targets, and as images of cost against size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from elastic.store.election import lease_of
from tests.bench import report
from tests.bench.curves import Curve, Panel, drawing
from tests.bench.machine import Part
from tests.bench.report import Row

if TYPE_CHECKING:
    from tests.bench.scale import Figures

EVEN = 1.2
"""What does not depend on the size may differ so many times: numbers have more digits."""

GROWTH = 2.0
"""And what a decision costs: more members do not fit into a processor's caches."""

DRAWN = ("form", "train", "report", "adopt")
"""Of the machine's parts; the others look like one of these."""


def table(found: Sequence[Figures], alone: Mapping[int, Sequence[Part]]) -> list[Row]:
    """A row per figure of each size, with the targets of 1000 and 5000 agents."""
    rows = [row for one in found for row in _rows(one)]
    if len(found) > 1:
        least, most = (pick(one.loss_down for one in found) for pick in (min, max))
        even = report.target(most <= EVEN * least, "independent of size")
        rows.append(Row("bytes to an agent for a loss, least and most", f"{least:.0f}, {most:.0f}", target=even))
    each = {members: _decision_us(parts) for members, parts in alone.items()}
    for members, parts in alone.items():
        rows.append(Row(f"the machine alone, {members} members", f"{1e6 / each[members]:.0f} decisions/s", told(parts)))
    if len(each) > 1:
        few, many = each[min(each)], each[max(each)]
        linear = report.target(many <= GROWTH * few, f"at most {GROWTH:g} times as much")
        what = f"a decision of the machine, {min(each)} and {max(each)} members"
        rows.append(Row(what, f"{few:.0f} us, {many:.0f} us", target=linear))
    return rows


def told(parts: Sequence[Part]) -> str:
    """Microseconds of each part's decisions, of those that have many."""
    return "us each: " + ", ".join(f"{p.name} {p.decision_us:.0f}" for p in parts if p.decisions > 1)


def _decision_us(parts: Sequence[Part]) -> float:
    return 1e6 * sum(part.seconds for part in parts) / sum(part.decisions for part in parts)


def _rows(one: Figures) -> list[Row]:
    at, both_s = f"{one.agents} agents", one.form_s + one.shrink_ms / 1000
    of_1000, of_5000 = one.agents == 1000, one.agents == 5000
    rows = [
        Row(f"{at}: formed", f"{one.form_s:.2f} s", target=report.target(one.form_s < 2.0, "< 2 s") * of_1000),
        Row(
            f"{at}: a loss announced to all",
            f"{one.loss_ms:.0f} ms",
            target=report.target(one.loss_ms < 500.0, "< 500 ms") * of_1000,
        ),
        Row(f"{at}: the generation without it known to all", f"{one.shrink_ms:.0f} ms"),
        Row(f"{at}: etcd writes a generation", f"{one.etcd_writes:.0f}", target=_writes_target(one)),
        Row(f"{at}: bytes to an agent to form", f"{one.form_down:.0f}", f"{one.form_orders:.1f} messages"),
        Row(f"{at}: bytes to an agent for a loss", f"{one.loss_down:.0f}", f"{one.loss_orders:.1f} messages"),
        Row(f"{at}: bytes from an agent for a loss", f"{one.loss_up:.0f}", f"{one.loss_words:.1f} messages"),
        Row(
            f"{at}: leader resigned, next one leads",
            f"{one.resign_ms:.0f} ms",
            f"its lease lasts {lease_of(one.agents):g} s",
            report.target(one.resign_ms < 1000 * lease_of(one.agents), "before the lease is over"),
        ),
        Row(f"{at}: and has heard of all members", f"{one.adopt_s:.2f} s", f"{one.resign_down:.0f} bytes an agent"),
        Row(f"{at}: leader's CPU time to form, for a loss", f"{one.form_cpu_s:.2f} s, {one.loss_cpu_ms:.0f} ms"),
        Row(f"{at}: next leader's CPU time until then", f"{one.adopt_cpu_s:.2f} s"),
        Row(f"{at}: leader while all train", f"{one.idle_percent:.0f} % of a core", f"{one.memory_mb:.0f} MiB"),
    ]
    if of_5000:
        target = report.target(both_s < 10.0, "< 10 s")
        rows.insert(3, Row(f"{at}: formed, and one loss handled", f"{both_s:.2f} s", target=target))
    rows = [row for row in rows if "nan" not in row.figure or row.target]
    if one.failed:
        because = one.failed.replace("|", "/").replace("\n", " ")
        rows.append(Row(f"{at}: to the end", "stuck", because, report.target(False, "all of it")))
    return rows


def _writes_target(one: Figures) -> str:
    return report.target(one.etcd_writes <= 3, "<= 3")


def plot(found: Sequence[Figures]) -> str:
    """Of sizes in ascending order."""

    def curve(name: str, cost: Callable[[Figures], float]) -> Curve:
        return Curve(name, [(one.agents, cost(one)) for one in found if cost(one) > 0])

    times = [
        curve("formed", lambda one: 1000 * one.form_s),
        curve("loss announced", lambda one: one.loss_ms),
        curve("loss, new generation", lambda one: one.shrink_ms),
        curve("leader's CPU, loss", lambda one: one.loss_cpu_ms),
    ]
    sent = [
        curve("to form, to an agent", lambda one: one.form_down),
        curve("loss, to an agent", lambda one: one.loss_down),
        curve("loss, from an agent", lambda one: one.loss_up),
        curve("next leader, to an agent", lambda one: one.resign_down),
    ]
    panels = [Panel("milliseconds", "agents", times), Panel("bytes", "agents", sent)]
    return drawing(panels, "cost against the number of agents")


def plot_machine(alone: Mapping[int, Sequence[Part]]) -> str:
    """Of sizes in ascending order."""

    def curves(cost: Callable[[Part], float]) -> list[Curve]:
        by_name = {members: {part.name: part for part in parts} for members, parts in alone.items()}
        return [Curve(name, [(members, cost(parts[name])) for members, parts in by_name.items()]) for name in DRAWN]

    panels = [
        Panel("milliseconds for all members", "members", curves(lambda part: 1e3 * part.seconds)),
        Panel("microseconds a decision", "members", curves(lambda part: part.decision_us)),
    ]
    return drawing(panels, "cost of the membership machine against the number of members")
