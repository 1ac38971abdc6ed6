"""What goes wrong in a run, drawn from its seed before it starts.

A fault has a trigger, a moment or the n-th time that something happens, and an action. Everything is healed at a
known time, and the run is judged after that.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from elastic.config import Stragglers

HOOKS = (
    "begin", "unit", "header", "summed", "obtained", "reported", "fetch", "ring_built", "copy_begun", "copied",
    "joined", "finished", "entered_loss", "entered_planned", "leader_commit", "leader_committed_loss",
    "leader_quiescing", "leader_rebuilding", "leader_closing", "leader_crash",
)  # fmt: skip
LATE = ("begin", "unit", "header", "summed", "obtained")
"""Hooks that are reached so often that the n-th time may be anywhere in the run."""


@dataclass(frozen=True, slots=True)
class Fault:
    """what: crash, pause, cut, crash_node, stall (each of `whom`; of a stalled one only the script waits), stick (a
    newcomer), hang (one before it is ready), crash_leader, pause_leader, drain, add_node.

    whom: "self" (where the trigger was reached), "donor", "ahead" (another one that is furthest), or a number that
    picks one of the living.
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


PROFILES: dict[str, tuple[str, ...]] = {
    "quiet": (),
    "planned": ("drain", "add_node", "add_node", "drain"),
    "losses": ("crash", "crash", "crash", "pause"),
    "leaders": ("crash_leader", "pause_leader", "crash", "cut"),
    "mixed": ("crash", "pause", "cut", "crash_leader", "pause_leader", "drain", "add_node", "crash_node"),
    "redo": ("crash",),
    "leaving": ("crash", "crash", "pause", "cut", "add_node", "crash_leader"),
    "stuck": ("crash",),
    "epochs": ("crash",),
    "stall": ("crash", "pause", "drain", "add_node", "crash_leader"),
    "storm": ("crash", "crash", "crash", "crash", "pause", "crash_node", "crash_leader", "cut"),
}


def draw(seed: int) -> Scene:
    random = Random(f"scene {seed}")
    profile = random.choice([name for name in PROFILES for _ in range(1 if name == "quiet" else 4)])
    nodes, slots = random.choice([(1, 1), (2, 1), (3, 1), (3, 1), (4, 1), (2, 2), (5, 1), (1, 3)])
    workers = nodes * slots
    kinds = PROFILES[profile]
    count = random.randint(1, 9 if profile == "storm" else 6) if kinds else 0
    heal_s = random.uniform(1.0, 12.0)
    faults = tuple(_fault(random, random.choice(kinds), heal_s) for _ in range(count))
    if profile == "redo":
        faults = (_split(random), Fault("crash", "ahead", hook="fetch", nth=1), *faults[:1])
    if profile == "leaving":
        faults = (Fault("drain", random.randrange(8), at_s=random.uniform(0.1, 1.0)), _during_change(random), *faults)
    if profile == "stuck":
        stick = (Fault("stick", hook="ready", nth=random.randint(1, 2), delay_s=random.uniform(0, 0.1)) for _ in "ab")
        hang = (Fault("hang", "self", hook="invited", nth=1) for _ in range(random.randint(0, 1)))
        faults = (Fault("crash", random.randrange(8), at_s=random.uniform(0.3, 1.0)), *stick, *hang, *faults[:2])
    if profile == "epochs":
        faults = (Fault("crash", random.randrange(8), at_s=random.uniform(0.3, 1.0)), *faults[:1])
    if profile == "stall":
        heal_s += 30.0
        stall = Fault("stall", "self", hook="unit", nth=random.randint(1, 40), delay_s=random.uniform(0, 0.04))
        faults = (stall, *faults[:2])
    trouble = profile in ("leaders", "mixed", "storm")
    return Scene(
        name=profile,
        nodes=nodes,
        slots=slots,
        min_workers=random.choice([1, 1, 1, max(1, workers - 1), workers]) if profile != "stuck" else workers,
        max_workers=workers + random.choice([0, 0, 1, 2]),
        spares=random.choice([0, 0, 1]),
        steps=150 if profile == "epochs" else random.choice([random.randint(1, 8), random.randint(8, 40)]),
        epoch_steps=random.randint(1, 3) if profile == "epochs" else 1000,
        units=random.choice([1, 2, 3, 4, 6, 8]),
        faults=faults,
        store_trouble=random.choice([0.0, 0.2]) if trouble else 0.0,
        copy_trouble=random.choice([0.0, 0.3]) if profile != "planned" else 0.0,
        link_trouble=random.choice([0.0, 0.0, 0.1]) if trouble else 0.0,
        short_log=random.random() < 0.2,
        heal_s=heal_s,
        retains=Random(f"retains {seed}").random() < 0.7,
        **_speeds(Random(f"speed {seed}"), nodes),
    )


def _speeds(random: Random, nodes: int) -> dict[str, Any]:
    """In some runs machines differ, and the leader looks at it often."""
    if random.random() < 0.5:
        return {}
    slowness = tuple(random.choice([1.0, 1.0, 1.5, 4.0]) for _ in range(nodes))
    policy = random.choice([Stragglers.NAME, Stragglers.DEMOTE, Stragglers.DEMOTE])
    return {"slowness": slowness, "stragglers": policy, "uneven_s": random.choice([0.1, 0.5])}


def _split(random: Random) -> Fault:
    """A death that leaves some members with a result and others without."""
    whom = random.choice(["self", "ahead"])
    return Fault("crash", whom, hook=random.choice(["summed", "obtained"]), nth=random.randint(1, 60))


def _during_change(random: Random) -> Fault:
    """A death while a planned generation takes effect: some have entered it, and the leaver has not left."""
    hook = random.choice(["obtained", "entered_planned", "leaving"])
    nth = random.randint(1, 30) if hook == "obtained" else random.randint(1, 3)
    return Fault("crash", random.choice(["self", "ahead"]), hook=hook, nth=nth, delay_s=random.uniform(0, 0.02))


def _fault(random: Random, what: str, heal_s: float) -> Fault:
    whom: str | int = random.choice(("self", "donor", random.randrange(8), random.randrange(8)))
    for_s = random.choice([random.uniform(0.01, 1.0), random.uniform(1.0, 8.0)])
    if what in ("drain", "add_node") or random.random() < 0.3:
        return Fault(what, whom, at_s=random.uniform(0.3, max(0.4, heal_s)), for_s=for_s)
    hook = random.choice(HOOKS)
    nth = random.randint(1, random.choice([8, 80])) if hook in LATE else random.randint(1, 4)
    delay_s = random.choice([0.0, 0.0, random.uniform(0, 0.02)])
    return Fault(what, whom, hook=hook, nth=nth, delay_s=delay_s, for_s=for_s)
