"""Which faults come when: a pure function of a preset, a seed and a duration."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from chaos_tests.scenario.catalogue import CATALOGUE
from chaos_tests.scenario.failpoints import Act
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
    """gap_s: mean time between two faults. weights: how often each kind comes. each: whether the kinds come in turn,
    so that few faults already hold all of them."""

    about: str
    gap_s: float
    weights: Mapping[str, float]
    each: bool = False


KILLS = {"kill": 4.0, "kill-rank-0": 2.0, "kill-two": 2.0, "kill-in-recovery": 3.0, "kill-newcomer": 1.0}


def _every(*grounds: Ground) -> dict[str, float]:
    """All usual kinds that are done to such a job, equally often."""
    return {kind: 1.0 for kind, fault in CATALOGUE.items() if fault.usual and fault.ground in grounds}


PRESETS: Mapping[str, Preset] = {
    "kill": Preset("members are killed, one or two, rank 0, and again while the others recover", 4.0, KILLS),
    "freeze": Preset(
        "members stand still, shorter and longer than it takes to be expelled",
        8.0,
        {"freeze-short": 2.0, "freeze-long": 2.0, "freeze-rank-0": 1.0, "freeze-for-good": 0.5, "freeze-all": 1.0},
        each=True,
    ),
    "stuck": Preset(
        "scripts hang, raise, run out of memory and are slow",
        10.0,
        {"hang": 1.0, "hang-gil": 1.0, "raise": 1.0, "interrupt": 1.0, "no-memory": 1.0, "slow": 1.0},
        each=True,
    ),
    "places": Preset(
        "members are killed at points of a step, an evaluation, a checkpoint, a rebuild and a copy",
        4.0,
        {kind: 1.0 for kind, fault in CATALOGUE.items() if fault.given.get("act") is Act.KILL},
        each=True,
    ),
    "batch": Preset(
        "several members are killed at one instant, as spot markets do it",
        6.0,
        {"kill-two": 2.0, "kill-all-but-one": 1.0},
        each=True,
    ),
    "spot": Preset(
        "nodes are taken without a word, by notice, or by a signal to all their processes, and come back soon or late",
        10.0,
        dict.fromkeys(
            ("kill-node-0s", "kill-node-1s", "kill-node-10s", "signal-node", "notice-node", "false-notice"), 1.0
        ),
        each=True,
    ),
    "flap": Preset("the member that came last is killed again and again", 2.0, {"kill-youngest": 3.0, "kill": 1.0}),
    "etcd": Preset(
        "etcd stands still, forgets its history, rewrites its database, revokes all leases, and members are killed",
        5.0,
        {"kill": 1.0, "freeze-etcd": 1.0, "compact-etcd": 1.0, "defragment-etcd": 1.0, "revoke-leases": 1.0},
        each=True,
    ),
    "control": Preset(
        "what decides is killed or stands still, and members are killed meanwhile",
        5.0,
        {
            "kill": 2.0,
            **dict.fromkeys(("kill-rendezvous", "freeze-rendezvous", "freeze-agent", "freeze-etcd", "signal-all"), 1.0),
        },
        each=True,
    ),
    "storage": Preset(
        "disks fail and are slow, the newest checkpoint is damaged while all workers and copies in memory are lost",
        20.0,
        {
            **dict.fromkeys(("disk-error", "disk-slow", "kill-in-checkpoint"), 1.0),
            **{kind: 1.0 for kind, fault in CATALOGUE.items() if "damage" in fault.given},
        },
        each=True,
    ),
    "partition": Preset(
        "nodes are cut off from all, from what decides, from each other; links are late, lossy, narrow, reset (root)",
        15.0,
        {**_every(Ground.NETWORK), "kill": 1.0},
        each=True,
    ),
    "cluster": Preset(
        "of a job over several nodes: agents, nodes, leaders, members of etcd and all workers die, and strangers come",
        12.0,
        {**_every(Ground.CLUSTER), "kill": 1.0},
        each=True,
    ),
    "rounds": Preset(
        "of a job in rounds (--restart): scripts are killed, stopped and hang; members are killed and stand still",
        8.0,
        {**_every(Ground.ROUNDS), **dict.fromkeys(("kill", "kill-rank-0", "kill-two", "freeze-long"), 1.0)},
        each=True,
    ),
    "everything": Preset(
        "every kind that a job of one machine has, in turn, in an order drawn by the seed",
        4.0,
        _every(Ground.ANY, Ground.MACHINE),
        each=True,
    ),
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
    return Preset(", ".join(kinds), KINDS_GAP_S, dict.fromkeys(kinds, 1.0), each=True)


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
    while at_s < duration_s:
        if preset.each:
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
