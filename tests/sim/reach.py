"""What a search has reached: in how many schedules each arm of the machines, each change of state, each rare path.

A *schedule* is one seed's run with at least EVENTS events, that is calls of a machine. Shorter runs have to pass too,
and what they reach is reached, but they are not counted as schedules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.sim.wanted import CHANGES, EXCLUDED, RARE, SELDOM, Change, excluded

LEAST = 10
"""Runs in which everything wanted has to be reached."""

EVENTS = 200


@dataclass(slots=True)
class Reach:
    schedules: int = 0
    short: int = 0
    """Runs with fewer than EVENTS events."""
    events: int = 0
    arms: Counter[str] = field(default_factory=Counter)
    changes: Counter[Change] = field(default_factory=Counter)
    """(machine, state, event, state after it) -> runs."""
    paths: Counter[str] = field(default_factory=Counter)
    scenes: Counter[str] = field(default_factory=Counter)
    failed: list[tuple[int, str]] = field(default_factory=list)

    def add(
        self, scene: str, events: int, arms: Iterable[str], changes: Iterable[Change], paths: Iterable[str]
    ) -> None:
        """One run that passed."""
        self.short += events < EVENTS
        self.schedules += events >= EVENTS
        self.events += events
        self.scenes[scene] += 1
        self.arms.update(set(arms))
        self.changes.update(set(changes))
        self.paths.update(set(paths))

    def merge(self, other: Reach) -> None:
        self.schedules += other.schedules
        self.short += other.short
        self.events += other.events
        for name in ("arms", "changes", "paths", "scenes"):
            getattr(self, name).update(getattr(other, name))
        self.failed += other.failed

    def states(self) -> Counter[tuple[str, str, str]]:
        """(machine, state, state after it), where they differ -> at least so many runs."""
        pairs: Counter[tuple[str, str, str]] = Counter()
        for (machine, before, _, after), times in self.changes.items():
            if before != after:
                pairs[machine, before, after] = max(pairs[machine, before, after], times)
        return pairs


@dataclass(frozen=True, slots=True)
class Verdict:
    """rare: what is wanted and was reached less than LEAST times, with its count. stale: exclusions of what there is no
    more. unknown: changes of state that nobody has listed. untested: excluded arms that their test does not take."""

    rare: Mapping[str, int]
    stale: Sequence[str]
    unknown: Sequence[str]
    untested: Sequence[str]

    @property
    def holds(self) -> bool:
        return not (self.rare or self.stale or self.unknown or self.untested)


def judge(reach: Reach, names: Sequence[str], taken: Mapping[str, Collection[str]]) -> Verdict:
    """names: all arms there are. taken: test of an exclusion -> arms that it takes."""
    states = reach.states()
    rare: dict[str, int] = {name: reach.arms[name] for name in names if not excluded(name)}
    rare |= {f"{machine}: {before} -> {after}": states[machine, before, after] for machine, before, after in CHANGES}
    rare |= {f"path: {path}": reach.paths[path] for path in RARE}
    missing = {name: times for name, times in rare.items() if times < LEAST}
    known = {*names, *(name.partition(":")[0] for name in names), *(name.partition(" ")[0] for name in names)}
    stale = [name for name in EXCLUDED if name not in known]
    listed = {*CHANGES, *SELDOM}
    unknown = [f"{m}: {before} -> {after}" for m, before, after in states if (m, before, after) not in listed]
    whys = {name: why for name in names if (why := excluded(name)) is not None}
    untested = [f"{name}: {why.test}" for name, why in whys.items() if name not in taken.get(why.test, ())]
    return Verdict(missing, stale, sorted(unknown), untested)


def to_json(reach: Reach, verdict: Verdict, names: Sequence[str], took_s: float) -> dict[str, object]:
    return {
        "schedules": reach.schedules,
        "short_runs": reach.short,
        "events": reach.events,
        "seconds": round(took_s, 1),
        "least": LEAST,
        "failed": [{"seed": seed, "because": because} for seed, because in reach.failed],
        "rare": dict(verdict.rare),
        "stale_exclusions": list(verdict.stale),
        "unknown_changes": list(verdict.unknown),
        "untested_exclusions": list(verdict.untested),
        "scenes": dict(sorted(reach.scenes.items())),
        "paths": {path: reach.paths[path] for path in sorted({*reach.paths, *RARE})},
        "changes": [
            {"machine": machine, "state": before, "event": event, "then": after, "runs": times}
            for (machine, before, event, after), times in sorted(reach.changes.items())
        ],
        "arms": {name: reach.arms[name] for name in names},
        "excluded": {name: why._asdict() for name, why in EXCLUDED.items()},
    }


def to_text(reach: Reach, verdict: Verdict, names: Sequence[str], took_s: float) -> str:
    lines = ["     runs  rare path"]
    lines += [f"{reach.paths[path]:9}  {path}" for path in sorted(RARE)]
    others = sorted(set(reach.paths) - set(RARE))
    lines += ["", "     runs  also reached", *(f"{reach.paths[path]:9}  {path}" for path in others)]
    lines += ["", "     runs  change of state"]
    lines += [f"{times:9}  {m}: {before} -> {after}" for (m, before, after), times in sorted(reach.states().items())]
    lines += ["", "     runs  least reached arms"]
    least = sorted((reach.arms[name], name) for name in names if not excluded(name))[:20]
    lines += [f"{times:9}  {name}" for times, name in least]
    lines += ["", "     runs  excluded, because"]
    whys = ((name, why) for name in names if (why := excluded(name)) is not None)
    lines += [f"{reach.arms[name]:9}  {name}: {why.because}; {why.test}" for name, why in whys]
    if verdict.rare:
        lines += ["", f"reached in fewer than {LEAST} runs, and wanted:"]
        lines += [f"{times:9}  {name}" for name, times in verdict.rare.items()]
    lines += [f"wanted.py excludes what does not exist: {name}" for name in verdict.stale]
    lines += [f"excluded, and not taken by the test that wanted.py names: {name}" for name in verdict.untested]
    lines += [f"a change of state that wanted.py does not list: {change}" for change in verdict.unknown]
    lines += [f"FAILED seed {seed}: {because}" for seed, because in reach.failed[:20]]
    arms = len([name for name in names if not excluded(name)])
    kinds = len(reach.changes)
    lines += [
        "",
        f"sim: {reach.schedules} schedules of at least {EVENTS} events ({reach.short} shorter), {len(reach.failed)} "
        f"failed; {reach.events} events in {took_s:.0f} s; {arms} arms, {kinds} (state, event, state), "
        f"{len(CHANGES)} changes of state, {len(RARE)} rare paths; {len(verdict.rare)} rarer than {LEAST}",
    ]
    return "\n".join(lines)
