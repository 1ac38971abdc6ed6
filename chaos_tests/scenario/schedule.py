"""Which faults come when: a pure function of a preset, a seed and a duration."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from chaos_tests.scenario.catalogue import CATALOGUE
from chaos_tests.scenario.faults import Fault, Ground
from chaos_tests.scenario.traces import Change, absences
from elastic.errors import ConfigError

FIRST_S = 1.0
"""Steps before the first fault."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One fault. at_s: earliest time, from the first applied step. place: the journal event it waits for, or "".

    slot: the place of a worker, of what is done to that and to no other. for_s: how long, where not the kind says it.
    """

    number: int
    at_s: float
    kind: str
    place: str = ""
    slot: int | None = None
    for_s: float | None = None

    @property
    def fault(self) -> Fault:
        return CATALOGUE[self.kind]

    @property
    def lasts_s(self) -> float:
        return self.fault.for_s if self.for_s is None else self.for_s


@dataclass(frozen=True, slots=True)
class Preset:
    """gap_s: mean time between two faults. weights: how often each kind comes; kinds of equal weight come in turn, so
    that few faults already hold all of them."""

    about: str
    gap_s: float
    weights: Mapping[str, float]

    @property
    def in_turn(self) -> bool:
        return len(set(self.weights.values())) == 1


ALL_KINDS = {
    Ground.ANY: "everything",
    Ground.MACHINE: "everything",
    Ground.CLUSTER: "cluster",
    Ground.NETWORK: "partition",
    Ground.ROUNDS: "rounds",
}
"""Ground -> the preset that holds all usual kinds of it."""


def _weights(name: str) -> dict[str, float]:
    """The kinds whose rows name that preset, and those of its ground."""
    usual = {kind: 1.0 for kind, fault in CATALOGUE.items() if fault.usual and ALL_KINDS[fault.ground] == name}
    return usual | {kind: fault.presets[name] for kind, fault in CATALOGUE.items() if name in fault.presets}


PRESETS: Mapping[str, Preset] = {
    name: Preset(about, gap_s, _weights(name))
    for name, gap_s, about in (
        ("kill", 4.0, "members are killed, one or two, rank 0, and again while the others recover"),
        ("freeze", 8.0, "members stand still, shorter and longer than it takes to be expelled"),
        ("stuck", 10.0, "scripts hang, raise, run out of memory and are slow"),
        ("places", 4.0, "members are killed at points of a step, an evaluation, a checkpoint, a rebuild and a copy"),
        ("batch", 6.0, "several members are killed at one instant, as spot markets do it"),
        (
            "spot",
            10.0,
            "nodes are taken without a word, by notice, or by a signal to all their processes, and come back soon or "
            "late",
        ),
        ("flap", 2.0, "the member that came last is killed again and again"),
        (
            "etcd",
            5.0,
            "etcd stands still, forgets its history, rewrites its database, revokes all leases, and members are killed",
        ),
        ("control", 5.0, "what decides is killed or stands still, and members are killed meanwhile"),
        (
            "storage",
            20.0,
            "disks fail and are slow, the newest checkpoint is damaged while all workers and copies in memory are lost",
        ),
        (
            "partition",
            15.0,
            "nodes are cut off from all, from what decides, from each other; links are late, lossy, narrow, reset "
            "(root)",
        ),
        (
            "cluster",
            12.0,
            "of a job over several nodes: agents, nodes, leaders, members of etcd and all workers die, and strangers "
            "come",
        ),
        (
            "replicas",
            15.0,
            "of a job over several nodes: members are killed and slow, and all that hold the state while a replacement "
            "is fresh",
        ),
        (
            "unwaiting",
            6.0,
            "of a job whose workers never wait for each other: they are killed, also two at once and in an exchange, "
            "stand still and are slow",
        ),
        (
            "rounds",
            8.0,
            "of a job in rounds (--restart): scripts are killed, stopped and hang; members are killed and stand still",
        ),
        (
            "rounds-kept",
            8.0,
            "of a job in rounds with elastic.keep: scripts are killed while they write, and bits of memory are flipped",
        ),
        (
            "rounds-kept-nodes",
            15.0,
            "the same over several nodes: nodes are lost with their memory, also two at once, and while it is copied",
        ),
        ("everything", 4.0, "every kind that a job of one machine has, in turn, in an order drawn by the seed"),
    )
}


KINDS_GAP_S = 6.0
"""Mean time between two faults of kinds that were named one by one."""


def preset_of(name: str) -> Preset:
    """The preset of that name, or one made of kinds: "kill,freeze-etcd". Raises ConfigError if there is none."""
    if name in PRESETS:
        return PRESETS[name]
    kinds = name.split(",")
    if strange := [kind for kind in kinds if kind not in CATALOGUE]:
        raise ConfigError(
            f"there is no preset and no fault {strange[0]!r}; presets are {', '.join(PRESETS)}; faults are shown by "
            "`elastic chaos list`"
        )
    return Preset(", ".join(kinds), KINDS_GAP_S, dict.fromkeys(kinds, 1.0))


def ground_of(kinds: Iterable[str]) -> Ground:
    """What kind of a job these can be done to; those that need another one are skipped there."""
    asked = {CATALOGUE[kind].ground for kind in kinds}
    return next((one for one in (Ground.NETWORK, Ground.CLUSTER) if one in asked), Ground.MACHINE)


def plan(preset: Preset, seed: int, duration_s: float) -> tuple[Planned, ...]:
    """Faults by time, the last before duration_s. Equal arguments give an equal plan."""
    dice = random.Random(seed)
    planned: list[Planned] = []
    bag: list[str] = []
    once: set[str] = set()
    at_s = FIRST_S
    while at_s < duration_s and once < preset.weights.keys():
        if preset.in_turn:
            if not bag:
                bag = sorted(preset.weights)
                dice.shuffle(bag)
            kind = bag.pop()
        else:
            kind = dice.choices(list(preset.weights), list(preset.weights.values()))[0]
        fault = CATALOGUE[kind]
        if kind in once:
            continue
        if fault.step is not None:
            once.add(kind)  # there is one first step
        place = dice.choice(fault.places) if fault.places else ""
        planned.append(Planned(len(planned) + 1, round(at_s, 3), kind, place))
        at_s += dice.uniform(0.5, 1.5) * preset.gap_s
    return tuple(planned)


def plan_of_trace(
    trace: Sequence[Change], workers: int, speed: float, duration_s: float = math.inf
) -> tuple[Planned, ...]:
    """What a trace does to a job of so many workers, until duration_s."""
    found = (one for one in absences(trace, workers, speed) if FIRST_S + one.at_s < duration_s)
    return tuple(
        Planned(number, round(FIRST_S + one.at_s, 3), "reclaim", "", one.slot, round(one.for_s, 3))
        for number, one in enumerate(found, start=1)
    )
