"""What goes wrong in a run, drawn from its seed before it starts.

A fault has a trigger, a moment or the n-th time that something happens, and an action. Everything is healed at a
known time, and the run is judged after that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any

from elastic.config import Reduction, Stragglers

if TYPE_CHECKING:
    from tests.sim.replicas import Rounds

HOOKS = (
    "begin", "unit", "header", "summed", "obtained", "reported", "fetch", "ring_built", "copy_begun", "copied",
    "joined", "finished", "entered_loss", "entered_planned", "leader_commit", "leader_committed_loss",
    "leader_quiescing", "leader_rebuilding", "leader_closing", "leader_crash",
)  # fmt: skip
LATE = ("begin", "unit", "header", "summed", "obtained")
"""Hooks that are reached so often that the n-th time may be anywhere in the run."""

TROUBLES = ("store_trouble", "copy_trouble", "link_trouble", "slow_links", "binds", "loss", "twice")
"""What may go wrong at any moment, with a probability: of the Scene's fields."""

LEADERS = ("crash_leader", "pause_leader", "isolate_leader", "cut_store", "crash_store")
WHOLE = ("add_node", "resize", "crash_all", "part", "part_one_way", "stop_job", "stop_in_order", *LEADERS)
"""What strikes no worker in particular."""


@dataclass(frozen=True, slots=True)
class Fault:
    """what: a kind of strikes.py.

    whom: "self" (where the trigger was reached), "donor", "ahead" (another one that is furthest), "third" (neither of
    these two), "leaver" (one that a planned generation has left out), "asleep" (one that does not run), or a number
    that picks one of the living.
    """

    what: str
    whom: str | int = 0
    at_s: float | None = None
    hook: str = ""
    nth: int = 0
    delay_s: float = 0.0
    for_s: float = 0.0

    def __str__(self) -> str:
        when = f"at {self.at_s:.3f}" if self.at_s is not None else f"at {self.hook} #{self.nth} + {self.delay_s:.4f}"
        return f"{self.what} {self.whom} {when}" + (f" for {self.for_s:.2f}" if self.for_s else "")


@dataclass(frozen=True, slots=True)
class Scene:
    """Size of a run and what goes wrong in it."""

    name: str
    nodes: int
    slots: int
    min_workers: int
    max_workers: int
    spares: int
    steps: int
    epoch_steps: int
    units: int
    faults: tuple[Fault, ...]
    store_trouble: float
    copy_trouble: float
    link_trouble: float
    short_log: bool
    """States are too large for a window, and members train so fast that no result is kept until it is asked for."""
    heal_s: float
    slowness: tuple[float, ...] = ()
    """How many times longer the workers of each node take for a unit; nodes beyond: once."""
    stragglers: Stragglers = Stragglers.NAME
    uneven_s: float = 30.0
    retains: bool = True
    """Whether members keep a result for those behind."""
    loss: float = 0.0
    """How often a packet has to be sent again."""
    twice: float = 0.0
    """How often a word or an order comes twice."""
    skewed: bool = True
    """Clocks differ, and go a little too fast or too slow."""
    import_s: float = 0.0
    """How long at most a process takes to announce itself."""
    late_s: tuple[float, ...] = ()
    """When the agents of the first nodes start."""
    absent: int = 0
    """Workers that the job asks for besides, and nobody starts."""
    strange: int = -1
    """A node whose workers compute other bits."""
    cannot_start: int = -1
    """A node that lacks the program."""
    never_joins: int = -1
    """A node whose script ends before it has joined."""
    poison: int = -1
    """Unit 0 of this operation makes the script raise, whoever computes it."""
    replace: bool = True
    max_restarts: int = 3
    reduction: Reduction = Reduction.EXACT
    batch: int = 256
    """How many words a leader takes at once, if they are there."""
    snapshot_every: int = 0
    """Members keep their state in the memory of their nodes before operations whose place is a multiple; 0: never."""
    checkpoints: float = 0.1
    """How often the donor writes one, at the beginning of a step."""
    revives: bool = False
    slow_links: float = 0.0
    """How often a member gives up a link in an operation, because next to nothing comes through it."""
    binds: float = 0.0
    """How often what a newcomer's script does as it is handed a step holds for no other step."""
    joins_once: bool = False
    """Only later processes of `never_joins` end before they have joined."""
    rounds: Rounds | None = None
    """Passes are rounds of replicas with a quorum."""


PROFILES: dict[str, tuple[str, ...]] = {
    "quiet": (),
    "planned": ("drain", "add_node", "add_node", "drain"),
    "losses": ("crash", "crash", "crash", "pause"),
    "leaders": ("crash_leader", "pause_leader", "crash", "cut", "cut_store", "crash_store", "drain"),
    "mixed": ("crash", "pause", "cut", "crash_leader", "pause_leader", "drain", "add_node", "crash_node", "part"),
    "redo": ("crash",),
    "leaving": ("crash", "crash", "pause", "cut", "add_node", "crash_leader"),
    "stuck": ("crash",),
    "epochs": ("crash",),
    "stall": ("crash", "pause", "drain", "add_node", "crash_leader"),
    "storm": ("crash", "crash", "crash", "crash", "pause", "crash_node", "crash_leader", "cut", "raise"),
    "parted": ("part", "part", "part_one_way", "crash", "cut", "drain"),
    "nodes": ("pause_node", "pause_agent", "stop_node", "crash_node", "pause", "burn"),
    "script": ("raise", "raise", "guard", "drift", "crash", "stop_job", "stop_in_order"),
    "start": ("crash", "crash_leader", "drain", "pause", "add_node"),
    "dark": ("crash", "pause", "drain"),
    "copies": ("crash", "crash", "drain"),
    "twice": ("crash",),
}
RARELY = ("quiet", "dark")


def draw_by_chance(seed: int) -> Scene:
    random = Random(f"scene {seed}")
    profile = random.choice([name for name in PROFILES for _ in range(1 if name in RARELY else 4)])
    nodes, slots = random.choice([(1, 1), (2, 1), (3, 1), (3, 1), (4, 1), (2, 2), (5, 1), (1, 3)])
    if profile in ("parted", "copies", "twice") and nodes == 1:
        nodes, slots = random.choice([(3, 1), (4, 1)])
    workers = nodes * slots
    kinds = PROFILES[profile]
    count = random.randint(1, 9 if profile == "storm" else 6) if kinds else 0
    heal_s = random.uniform(1.0, 12.0)
    heal_s += 16.0 if profile == "nodes" else 0.0  # longer than a newcomer may be frozen
    faults = tuple(_fault(random, random.choice(kinds), heal_s) for _ in range(count))
    own, heal_s = _own_faults(random, profile, faults, heal_s)
    trouble = profile in ("leaders", "mixed", "storm")
    steps = random.choice([random.randint(3, 10), random.randint(8, 40)]) + (20 if workers == 1 else 0)
    scene = Scene(
        name=profile,
        nodes=nodes,
        slots=slots,
        min_workers=random.choice([1, 1, 1, max(1, workers - 1), workers]) if profile != "stuck" else workers,
        max_workers=workers + random.choice([0, 0, 1, 2]),
        spares=random.choice([0, 0, 1]),
        steps=65 if profile == "epochs" else steps,
        epoch_steps=random.randint(1, 3) if profile == "epochs" else 1000,
        units=random.choice([1, 2, 3, 4, 6, 8]),
        faults=own,
        store_trouble=random.choice([0.0, 0.2]) if trouble else 0.0,
        copy_trouble=random.choice([0.0, 0.3]) if profile != "planned" else 0.0,
        link_trouble=random.choice([0.0, 0.0, 0.1]) if trouble else 0.0,
        short_log=random.random() < 0.2,
        heal_s=heal_s,
        retains=Random(f"retains {seed}").random() < 0.7,
    )
    scene = replace(scene, **_speeds(Random(f"speed {seed}"), nodes), **_network(Random(f"network {seed}")))
    scene = replace(scene, **_circumstances(Random(f"circumstances {seed}"), profile, nodes))
    scene = replace(scene, **_kept(Random(f"kept {seed}")))
    random = Random(f"binds {seed}")
    return replace(scene, binds=random.choice([0.0, 0.0, 0.5, 1.0]), slow_links=random.choice([0.0, 0.0, 0.0, 0.02]))


def _own_faults(
    random: Random, profile: str, faults: tuple[Fault, ...], heal_s: float
) -> tuple[tuple[Fault, ...], float]:
    """What a profile is for, besides what chance brings."""
    early_s = random.uniform(0.3, 1.0)
    match profile:
        case "redo":
            fetch = Fault("crash", "ahead", hook="fetch", nth=1, delay_s=random.choice([0.0, random.uniform(0, 0.05)]))
            alone = Fault("crash", "ahead", hook="alone", nth=random.randint(1, 3), delay_s=random.uniform(0, 0.03))
            last = Fault(
                "crash", "self", hook="last_summed", nth=random.randint(1, 3), delay_s=random.uniform(0, 0.004)
            )
            return (_split(random), fetch, alone, last, *faults[:1]), heal_s
        case "leaving":
            drain = Fault("drain", random.randrange(8), at_s=random.uniform(0.1, 1.0))
            return (drain, *_during_change(random), *faults), heal_s
        case "stuck":
            stick = [
                Fault("stick", hook="ready", nth=random.randint(1, 2), delay_s=random.uniform(0, 0.1)) for _ in "ab"
            ]
            hang = [Fault("hang", "self", hook="invited", nth=1) for _ in range(random.randint(0, 1))]
            return (Fault("crash", random.randrange(8), at_s=early_s), *stick, *hang, *faults[:2]), heal_s
        case "epochs":
            return (Fault("crash", random.randrange(8), at_s=early_s), *faults[:1]), heal_s
        case "stall":
            nth = random.randint(1, 40)
            if nth % 5 == 0:  # all that are there freeze in one moment
                frozen = tuple(Fault("pause", whom, hook="unit", nth=nth, for_s=60.0) for whom in range(8))
                return (*frozen, *faults[:1]), heal_s + 75.0
            stall = Fault("stall", "self", hook="unit", nth=nth, delay_s=random.uniform(0, 0.04))
            again = (Fault("stall", "self", hook="unit", nth=nth + random.randint(1, 8)),) * random.randint(0, 1)
            return (stall, *again, *faults[:2]), heal_s + 30.0
        case "dark":
            away = Fault("crash_store", at_s=random.uniform(0.5, 3.0), for_s=random.uniform(45.0, 60.0))
            long = Fault("part", at_s=random.uniform(0.5, 3.0), for_s=random.uniform(50.0, 70.0))
            return (random.choice([away, long]), *faults[:2]), heal_s + 75.0
        case "copies":
            begun = Fault("crash", "donor", hook="copy_begun", nth=random.randint(1, 3), delay_s=random.uniform(0, 0.1))
            joined = Fault("crash", "donor", hook=random.choice(["joined", "copied"]), nth=1)
            mute = Fault("mute", "donor", hook="copied", nth=1, delay_s=random.uniform(0, 0.04), for_s=3.0)
            split = random.choice([(begun, joined), (mute, Fault("crash", "donor", hook="joined", nth=1))])
            return (Fault("crash", random.randrange(8), at_s=early_s), *split, *faults[:2]), heal_s
        case "twice":
            hook = random.choice(["entered_loss", "leader_rebuilding", "ring_built"])
            delay_s = random.choice([0.0, random.uniform(0.0, 0.02)])
            both = [Fault("crash", whom, hook=hook, nth=1, delay_s=delay_s) for whom in (0, 1)]
            lead = [Fault("crash_leader", hook="leader_quiescing", nth=random.randint(1, 2))] * random.randint(0, 1)
            return (Fault("crash", random.randrange(8), at_s=early_s), *both, *lead, *faults[:1]), heal_s
    return faults, heal_s


def _speeds(random: Random, nodes: int) -> dict[str, Any]:
    """In some runs machines differ, and the leader looks at it often."""
    if random.random() < 0.5:
        return {}
    slowness = tuple(random.choice([1.0, 1.0, 1.5, 4.0]) for _ in range(nodes))
    policy = random.choice([Stragglers.NAME, Stragglers.DEMOTE, Stragglers.DEMOTE, Stragglers.IGNORE])
    return {"slowness": slowness, "stragglers": policy, "uneven_s": random.choice([0.1, 0.5])}


def _network(random: Random) -> dict[str, Any]:
    return {
        "loss": random.choice([0.0, 0.0, 0.002, 0.02]),
        "twice": random.choice([0.0, 0.0, 0.05]),
        "skewed": random.random() < 0.5,
    }


def _kept(random: Random) -> dict[str, Any]:
    return {
        "batch": random.choice([1, 256]),
        "snapshot_every": random.choice([0, 1, 3]),
        "revives": random.random() < 0.5,
    }


def _circumstances(random: Random, profile: str, nodes: int) -> dict[str, Any]:
    """How the job starts, and what its users have chosen."""
    chosen: dict[str, Any] = {
        "import_s": random.choice([0.0, 0.0, 0.5]),
        "replace": random.random() < 0.95,
        "max_restarts": random.choice([0, 1, 3]),
        "reduction": Reduction.EXACT if random.random() < 0.9 else Reduction.ALLREDUCE,
    }
    if chosen["reduction"] is not Reduction.EXACT:
        chosen["retains"] = True
    if profile == "start":
        chosen["twice"] = random.choice([0.0, 0.3])
        chosen["import_s"] = random.choice([0.5, 4.0, 20.0])
        chosen["late_s"] = tuple(random.choice([0.0, 0.0, 3.0, 7.0, 30.0]) for _ in range(nodes))
        chosen["absent"] = random.choice([0, 0, 1, 2])
        what = random.choice(["strange", "cannot_start", "never_joins", "", "", ""])
        if what:
            chosen[what] = random.randrange(nodes + 1)
    if profile == "script" and random.random() < 0.5:
        chosen["poison"] = random.randint(1, 20)
    return chosen


def _split(random: Random) -> Fault:
    """A death that leaves some members with a result and others without."""
    whom = random.choice(["self", "ahead"])
    return Fault("crash", whom, hook=random.choice(["summed", "obtained"]), nth=random.randint(1, 60))


def _during_change(random: Random) -> tuple[Fault, ...]:
    """A death while a planned generation takes effect: some have entered it, and the leaver has not left. Sometimes the
    leaver and the leader die in one moment."""
    if random.random() < 0.2:
        delay_s = random.uniform(0, 0.005)
        leaver = Fault("crash", "leaver", hook="leaving", nth=1, delay_s=delay_s)
        return leaver, Fault("crash_leader", hook="leaving", nth=1, delay_s=delay_s)
    hook = random.choice(["obtained", "entered_planned", "leaving"])
    nth = random.randint(1, 30) if hook == "obtained" else random.randint(1, 3)
    whom = random.choice(["self", "ahead"])
    return (Fault("crash", whom, hook=hook, nth=nth, delay_s=random.uniform(0, 0.02)),)


def _fault(random: Random, what: str, heal_s: float) -> Fault:
    whom: str | int = random.choice(("self", "donor", random.randrange(8), random.randrange(8)))
    for_s = random.choice([random.uniform(0.01, 1.0), random.uniform(1.0, 8.0)])
    if what == "pause" and heal_s > 16.0:
        for_s = random.uniform(1.0, 16.0)
    if what in ("part", "part_one_way", "pause_node", "pause_agent", "burn"):
        for_s = random.choice([random.uniform(0.1, 2.0), random.uniform(3.0, 14.0)])
    if what == "burn":
        for_s += random.choice([0.0, 8.0])
    if what in ("drain", "add_node") or random.random() < 0.3:
        return Fault(what, whom, at_s=random.uniform(0.3, max(0.4, heal_s)), for_s=for_s)
    hook = random.choice(HOOKS)
    nth = random.randint(1, random.choice([8, 80])) if hook in LATE else random.randint(1, 4)
    delay_s = random.choice([0.0, 0.0, random.uniform(0, 0.02)])
    return Fault(what, whom, hook=hook, nth=nth, delay_s=delay_s, for_s=for_s)
