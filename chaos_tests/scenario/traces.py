"""Traces of nodes that come and go, as spot markets were seen to give and take them.

Three forms are read: lines ``ms,add,NODE`` and ``ms,remove,NODE``; lines ``ms,COUNT``; and JSON lists of counts, plain
(one for each minute) or as ``{"metadata": {"gap_seconds": 600}, "data": [8, 7, ...]}``. Lines that begin with # are
comments. A count says how many nodes are there; of those that go, the ones that came first go first.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, groupby

from elastic.errors import ConfigError

GAP_S = 60.0
"""Between two counts of a list that does not say."""
NODES_MAX = 10_000
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")

MEDIAN_GAP_S = 120.0
"""Between two events of a generated trace, as published traces have it."""
SPREAD = 1.0
"""The spread of the logarithm of gaps: most are shorter than ten minutes, a few last an hour."""
BURSTS = {1: 50, 2: 22, 3: 12, 4: 8, 5: 5, 6: 3}
"""How many nodes come or go at one instant, with weights."""
FILLED = 0.75
"""Share of its nodes that a generated trace has most of the time."""


@dataclass(frozen=True, slots=True)
class Change:
    """A node comes or goes. at_s: from the begin of the trace."""

    at_s: float
    node: str
    there: bool


@dataclass(frozen=True, slots=True)
class Absence:
    """A worker's place is without a node: from at_s, for for_s."""

    at_s: float
    slot: int
    for_s: float


def read_trace(text: str, where: str) -> tuple[Change, ...]:
    """By time. where: the file's name, for messages. Raises ConfigError, with the line where there is one."""
    if text.lstrip()[:1] in ("[", "{"):
        changes = list(_of_counts(_listed(text, where), where))
    else:
        rows = [(number, line.strip()) for number, line in enumerate(text.splitlines(), start=1)]
        fields = [(number, line.split(",")) for number, line in rows if line and not line.startswith("#")]
        if fields and len(fields[0][1]) == 2:
            changes = list(_of_counts(_counted(fields, where), where))
        else:
            changes = list(_of_lines(fields, where))
    if not any(not change.there for change in changes):
        raise ConfigError(f"{where}: no node ever goes; lines are ms,add,NODE and ms,remove,NODE, or ms,COUNT")
    return tuple(changes)


def _of_lines(fields: Iterable[tuple[int, list[str]]], where: str) -> Iterator[Change]:
    there: set[str] = set()
    last_s = 0.0
    for number, words in fields:
        at = f"{where}, line {number}"
        if len(words) != 3 or words[1] not in ("add", "remove"):
            raise ConfigError(f"{at}: {','.join(words)!r:.80} is not ms,add,NODE or ms,remove,NODE")
        at_s, node = _seconds(words[0], last_s, at), words[2]
        if not NAME.fullmatch(node):
            raise ConfigError(f"{at}: {node!r:.80} is no name of a node: letters, digits and . _ : -")
        if (words[1] == "add") == (node in there):
            has = "is there already" if node in there else "is not there"
            raise ConfigError(f"{at}: {words[1]} of {node}, which {has}")
        there ^= {node}
        if len(there) > NODES_MAX:
            raise ConfigError(f"{at}: more than {NODES_MAX} nodes at a time")
        yield Change(at_s, node, words[1] == "add")
        last_s = at_s


def _counted(fields: Iterable[tuple[int, list[str]]], where: str) -> Iterator[tuple[float, object]]:
    last_s = 0.0
    for number, words in fields:
        at = f"{where}, line {number}"
        if len(words) != 2 or not re.fullmatch(r"[0-9]{1,9}", words[1]):
            raise ConfigError(f"{at}: {','.join(words)!r:.80} is not ms,COUNT, as the first line is")
        last_s = _seconds(words[0], last_s, at)
        yield last_s, int(words[1])


def _listed(text: str, where: str) -> Iterator[tuple[float, object]]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid JSON: {error!s:.200}") from error
    gap_s: object = GAP_S
    if isinstance(document, dict):
        about = document.get("metadata")
        gap_s = about.get("gap_seconds", GAP_S) if isinstance(about, dict) else GAP_S
        document = document.get("data")
    if not isinstance(document, list):
        raise ConfigError(f'{where}: neither a list of counts nor an object with a list "data"')
    if isinstance(gap_s, bool) or not isinstance(gap_s, int | float) or not 0 < gap_s <= 1e9:
        raise ConfigError(f"{where}: gap_seconds={gap_s!r:.40} must be a positive number of seconds")
    yield from ((number * float(gap_s), value) for number, value in enumerate(document))


def _of_counts(counts: Iterable[tuple[float, object]], where: str) -> Iterator[Change]:
    there: list[str] = []
    names = count()
    for at_s, value in counts:
        whole = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= NODES_MAX
        if not whole or value != int(value):  # type: ignore[call-overload]  # it is a number here
            raise ConfigError(f"{where}: {value!r:.40} is no number of nodes, 0 to {NODES_MAX}")
        while len(there) > value:  # type: ignore[operator]
            yield Change(at_s, there.pop(0), False)
        while len(there) < value:  # type: ignore[operator]
            there.append(f"n{next(names)}")
            yield Change(at_s, there[-1], True)


def _seconds(text: str, last_s: float, at: str) -> float:
    if not re.fullmatch(r"[0-9]{1,15}(\.[0-9]{1,6})?", text):
        raise ConfigError(f"{at}: {text!r:.40} is no time in milliseconds")
    if (at_s := float(text) / 1000) < last_s:
        raise ConfigError(f"{at}: {text} ms is before the line above it")
    return at_s


def divided(trace: Sequence[Change], by: int) -> tuple[Change, ...]:
    """The trace of a fleet that is `by` times smaller: its losses come at the same instants.

    Of the nodes that come or go at one instant one in `by` does so here, rounded up, so that no loss is left out. There
    are never more than one in `by` of the most nodes that were there, rounded up. Those that came first go first.
    """
    most = now = 0
    for change in trace:
        now += 1 if change.there else -1
        most = max(most, now)
    there: list[str] = []
    names = count()
    found: list[Change] = []
    for at_s, together in groupby(trace, key=lambda change: change.at_s):
        changes = list(together)
        come = sum(change.there for change in changes)
        for _ in range(min(_share(len(changes) - come, by), len(there))):
            found.append(Change(at_s, there.pop(0), False))
        for _ in range(min(_share(come, by), _share(most, by) - len(there))):
            there.append(f"n{next(names)}")
            found.append(Change(at_s, there[-1], True))
    return tuple(found)


def _share(nodes: int, by: int) -> int:
    return -(-nodes // by)


def absences(trace: Sequence[Change], slots: int, speed: float) -> tuple[Absence, ...]:
    """What a trace means for a job of so many workers: which of their places have no node, and when.

    Places are taken by the nodes that come first; a node for which there is no place is left out, and one that comes
    later takes the place that has been empty for the longest time. Everything happens `speed` times faster, from the
    first change after all places were taken on. Places that are empty when the trace ends stay so to its end.
    """
    holders: dict[str, int] = {}
    empty = list(range(slots))
    since: dict[int, float] = {}
    found: list[Absence] = []
    begin_s: float | None = None
    for change in trace:
        if change.there and empty:
            slot = holders[change.node] = empty.pop(0)
            if slot in since:
                gone_s = since.pop(slot)
                found.append(Absence(gone_s, slot, (change.at_s - gone_s) / speed))
        elif not change.there and change.node in holders:
            begin_s = change.at_s if begin_s is None else begin_s
            slot = holders.pop(change.node)
            empty.append(slot)
            since[slot] = change.at_s
    end_s = trace[-1].at_s if trace else 0.0
    found += [Absence(gone_s, slot, (end_s - gone_s) / speed) for slot, gone_s in since.items()]
    begun = begin_s or 0.0
    moved = (Absence((one.at_s - begun) / speed, one.slot, one.for_s) for one in found)
    return tuple(sorted(moved, key=lambda one: (one.at_s, one.slot)))


def generate(seed: int, nodes: int, duration_s: float) -> tuple[Change, ...]:
    """A trace of the shape that published ones have: bursts of up to six, and a median gap of two minutes.

    All nodes are there at its begin. Equal arguments give an equal trace.
    """
    dice = random.Random(f"trace {seed}")
    there = [f"node-{number}" for number in range(nodes)]
    away: list[str] = []
    changes = [Change(0.0, node, True) for node in there]
    at_s = 0.0
    while (at_s := at_s + dice.lognormvariate(math.log(MEDIAN_GAP_S), SPREAD)) < duration_s:
        goes = dice.random() < len(there) / nodes / (2 * FILLED) or not away
        source, target = (there, away) if goes else (away, there)
        burst = min(dice.choices(list(BURSTS), list(BURSTS.values()))[0], len(source))
        for node in dice.sample(source, burst):
            source.remove(node)
            target.append(node)
            changes.append(Change(round(at_s, 3), node, not goes))
    return tuple(changes)


def as_csv(trace: Iterable[Change]) -> str:
    """Lines that `read_trace` reads."""
    return "".join(
        f"{change.at_s * 1000:.0f},{'add' if change.there else 'remove'},{change.node}\n" for change in trace
    )
