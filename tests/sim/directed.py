"""Scenes that lead to what chance alone hardly ever reaches: each is a story of two or three faults, with its moments
drawn from the seed."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from elastic.config import Stragglers
from tests.sim.faults import Fault, Scene, draw_by_chance
from tests.sim.replicas import with_quorum

SHARE = 0.4
"""Of all seeds."""

QUORUM_EVERY = 8
"""One of so many seeds has rounds of replicas with a quorum instead of passes."""

HORIZON_S = 12.0


def draw(seed: int) -> Scene:
    """What happens in the run of this seed."""
    scene = _drawn(seed)
    return with_quorum(scene, seed) if seed % QUORUM_EVERY == QUORUM_EVERY - 1 else scene


def _drawn(seed: int) -> Scene:
    random = Random(f"directed {seed}")
    if random.random() >= SHARE:
        return draw_by_chance(seed)
    name = random.choice([*STORIES, *AGAIN])
    return STORIES[name](random, name)


def _scene(random: Random, name: str, *faults: Fault, **changes: Any) -> Scene:
    nodes, slots = changes.get("nodes", 3), changes.get("slots", 1)
    calm: dict[str, Any] = {
        "name": name, "nodes": nodes, "slots": slots, "min_workers": 1, "max_workers": nodes * slots, "spares": 0,
        "steps": random.randint(14, 24), "epoch_steps": 1000, "units": random.choice([2, 4, 6]), "faults": faults,
        "store_trouble": 0.0, "copy_trouble": 0.0, "link_trouble": 0.0, "short_log": False, "heal_s": HORIZON_S,
        "retains": random.random() < 0.8, "skewed": random.random() < 0.5, "batch": random.choice([1, 256]),
        "snapshot_every": random.choice([0, 3]), "revives": random.random() < 0.5,
    }  # fmt: skip
    return Scene(**{**calm, **changes})


def _early(random: Random, what: str = "crash", **more: Any) -> Fault:
    return Fault(what, random.randrange(8), at_s=random.uniform(0.4, 1.0), **more)


def _split(random: Random, nodes: int) -> tuple[Fault, Fault]:
    """The last member to sum dies when all but one of the others have its sums: that one is an operation behind."""
    nth = nodes * random.randint(2, 8)
    last = Fault("crash", "self", hook="summed", nth=nth, delay_s=random.uniform(0.006, 0.03))
    return Fault("mute", "self", hook="summed", nth=nth, for_s=2.0), last


# ----------------------------------------------------------------------------------------- beginnings and ends


def _slow_start(random: Random, name: str) -> Scene:
    """Too few have come when the join window is over; those that have say so twice."""
    nodes = random.choice([2, 3])
    resize = (Fault("resize", random.randrange(6), at_s=random.uniform(0.1, 15.0)),) * random.randint(0, 1)
    late_s = tuple(random.choice([0.0, 0.0, 8.0]) for _ in range(nodes))
    return _scene(
        random, name, *resize, nodes=nodes, min_workers=nodes, import_s=20.0, late_s=late_s, twice=0.5, heal_s=30.0
    )  # fmt: skip


def _ring_breaks_at_the_end(random: Random, name: str) -> Scene:
    """In the last operation a node dies whose sums have reached all but one; that one notices when another one, which
    has slept, has just finished."""
    again_s = 0.2 * random.randint(1, 3)  # what is held up is sent again
    asleep = Fault("pause", "self", hook="last_summed", nth=1, for_s=again_s - random.uniform(0.025, 0.06))
    mute = Fault("mute", "self", hook="last_summed", nth=2, for_s=again_s - 0.1)
    gone = Fault("crash_node", "self", hook="last_summed", nth=2, delay_s=random.uniform(0.004, 0.01))
    return _scene(random, name, asleep, mute, gone, units=2, steps=random.randint(12, 16))


def _strange_newcomer(random: Random, name: str) -> Scene:
    nodes = random.choice([1, 2])
    faults = (Fault("add_node", at_s=random.uniform(0.4, 1.0)), Fault("add_node", at_s=random.uniform(0.4, 2.0)))
    return _scene(random, name, *faults, nodes=nodes, max_workers=nodes + 2, strange=nodes, steps=40)


def _raised_for_good(random: Random, name: str) -> Scene:
    """A script that raises: where nobody is replaced, or again in the one that replaces it."""
    again = tuple(Fault("raise_there", "self", hook="joined", nth=nth) for nth in (1, 2))
    replace = random.random() < 0.7
    return _scene(random, name, _early(random, "raise_there"), *again, replace=replace, max_restarts=3, steps=40)


def _never_joins(random: Random, name: str) -> Scene:
    """One node's script ends before it has joined, and so does the next one."""
    nodes = random.choice([2, 3])
    return _scene(random, name, nodes=nodes, never_joins=random.randrange(nodes), max_restarts=3)


def _drifted(random: Random, name: str) -> Scene:
    """A member's state is not what it should be, and no sum shows it."""
    return _scene(random, name, _early(random, "drift"), nodes=random.choice([2, 3]))


def _started_as_the_job_ends(random: Random, name: str) -> Scene:
    """A member dies when all have what it had to give, and its slot starts another one; or one freezes that is done."""
    gone = Fault("crash", "self", hook="last_summed", nth=3, delay_s=random.uniform(0.004, 0.03))
    frozen = Fault("pause", "self", hook="finished", nth=1, for_s=8.0)
    return _scene(random, name, random.choice([gone, gone, frozen]))


def _dead_before_its_invitation(random: Random, name: str) -> Scene:
    die = Fault("crash", "self", hook="announced", nth=random.randint(4, 5), delay_s=random.uniform(0.0, 0.004))
    return _scene(random, name, _early(random), die, steps=30)


def _resized(random: Random, name: str) -> Scene:
    """Somebody gives the job another size, before it has begun or later."""
    nodes, slots = random.choice([(1, 1), (2, 1), (3, 1), (1, 3), (2, 2)])
    times = sorted(random.uniform(0.0, 3.0) for _ in range(random.randint(1, 3)))
    sizes = tuple(Fault("resize", random.randrange(6), at_s=at_s) for at_s in times)
    late_s = tuple(random.choice([0.0, 0.0, 3.0]) for _ in range(nodes))
    trouble = random.choice([(), (_early(random),), (Fault("crash_leader", at_s=random.uniform(0.5, 3.0)),)])
    spares = random.choice([0, 0, 1])
    return _scene(random, name, *sizes, *trouble, nodes=nodes, slots=slots, max_workers=6, late_s=late_s, spares=spares,
                  steps=30, uneven_s=0.5)  # fmt: skip


def _news_while_all_leave(random: Random, name: str) -> Scene:
    """All members stop after one step, one of them slowly; meanwhile somebody comes."""
    stop = Fault("stop_in_order", at_s=random.uniform(0.5, 1.0), for_s=5.0)
    slow = Fault("pause", "self", hook="leaving", nth=1, for_s=1.0)
    come = Fault("add_node", hook="leaving", nth=1, delay_s=random.uniform(0.0, 0.3))
    return _scene(random, name, stop, slow, come, nodes=random.choice([2, 3]), max_workers=4, steps=30)


def _left_too_late(random: Random, name: str) -> Scene:
    """Who drains has left, but when its agent says so, one that stays has been lost."""
    slow = Fault("pause_agent", "self", hook="leaving", nth=1, for_s=0.4)
    gone = Fault("crash", "ahead", hook="leaving", nth=1, delay_s=random.uniform(0.005, 0.02))
    return _scene(random, name, _early(random, "drain", for_s=20.0), slow, gone, nodes=random.choice([2, 3]), steps=30)


def _drainer_and_leader_die(random: Random, name: str) -> Scene:
    delay_s = random.uniform(0.0, 0.005)
    leaver = Fault("crash", "leaver", hook="leaving", nth=1, delay_s=delay_s)
    lead = Fault("crash_leader", hook="leaving", nth=1, delay_s=delay_s)
    return _scene(random, name, _early(random, "drain", for_s=20.0), leaver, lead, steps=30)


def _drained_while_a_slot_waits(random: Random, name: str) -> Scene:
    """A worker has died, and before the next one is there its node is to go, or its agent is asked to."""
    at_s, left_s = random.uniform(0.5, 1.0), random.choice([2.0, 20.0])
    drain = Fault("drain", 0, at_s=at_s + random.uniform(0.02, 0.18), for_s=left_s)
    stop = Fault("stop_node", 0, at_s=at_s + random.uniform(0.22, 0.4))
    crash, nodes = Fault("crash", 0, at_s=at_s), random.choice([1, 2])
    return _scene(random, name, crash, random.choice([drain, stop]), nodes=nodes, slots=2, max_workers=5, steps=30)


def _smaller_on_one_node(random: Random, name: str) -> Scene:
    """The node stays, and the youngest of its workers become spares."""
    slots = random.choice([2, 3, 4])
    less = Fault("resize", random.randrange(slots - 1), at_s=random.uniform(0.4, 0.9))
    more = (Fault("resize", slots - 1, at_s=random.uniform(1.5, 2.5)),) * random.randint(0, 1)
    return _scene(random, name, less, *more, nodes=1, slots=slots, steps=50, units=4, uneven_s=0.5)


# --------------------------------------------------------------------------------------------- frozen and silent


def _all_silent_and_one_frozen(random: Random, name: str) -> Scene:
    """A leader that hears of a frozen member is cut off from all other agents; then the first one is back."""
    whom: str | int = random.choice(("donor", 0, 1, 2))
    frozen = Fault("pause", whom, at_s=random.uniform(0.5, 1.0), for_s=22.0)
    apart = Fault("isolate_leader", hook="leader_quiescing", nth=1, delay_s=random.uniform(0.0, 0.002),
                  for_s=random.uniform(5.5, 9.0))  # fmt: skip
    return _scene(random, name, frozen, apart, heal_s=25.0)


def _another_node_while_one_is_awaited(random: Random, name: str) -> Scene:
    """All that were to stay are dead, and who was to leave has not reported yet."""
    slow = Fault("pause_agent", 2, hook="leader_commit", nth=2, for_s=0.8)
    dead = [Fault("crash", 0, hook="leader_commit", nth=2, delay_s=random.uniform(0.001, 0.01)) for _ in "ab"]
    come = Fault("add_node", hook="leader_commit", nth=2, delay_s=random.uniform(0.05, 0.5))
    drain = Fault("drain", 2, at_s=random.uniform(0.5, 1.0), for_s=20.0)
    return _scene(random, name, drain, slow, *dead, come, max_workers=4, steps=30)


def _refused_commit(random: Random, name: str) -> Scene:
    """A leader sleeps until another one has written the record that it is about to write."""
    sleep = Fault("pause_leader", hook="leader_commit", nth=2, for_s=random.uniform(4.5, 7.0))
    return _scene(random, name, _early(random), sleep, store_trouble=0.8, heal_s=15.0, steps=40)


def _frozen_newcomer(random: Random, name: str) -> Scene:
    """Its own agent ends it, while the members wait below quorum."""
    pause = Fault("pause", "self", hook="invited", nth=1, for_s=random.uniform(14.0, 18.0))
    return _scene(random, name, _early(random), pause, min_workers=3, heal_s=22.0)


def _frozen_then_busy(random: Random, name: str) -> Scene:
    """A frozen process uses its processor again, and does not beat yet. Later a new leader hears that it was frozen."""
    at_s = random.uniform(0.5, 1.0)
    whom: str | int = random.choice(("donor", "donor", 1))
    burn = Fault("burn", "asleep", at_s=at_s + random.uniform(3.5, 5.5), for_s=3.0)
    lead = (Fault("crash_leader", at_s=at_s + random.uniform(3.2, 8.0)),) * random.randint(0, 1)
    return _scene(random, name, Fault("pause", whom, at_s=at_s, for_s=9.0), burn, *lead, heal_s=16.0, steps=30,
                  min_workers=random.choice([1, 3, 3]))  # fmt: skip


def _two_stand_still(random: Random, name: str) -> Scene:
    """One does not get on with its shard, and another one that waits for it would not either."""
    nth = random.randint(3, 20)
    others = [Fault("stall", whom, hook="unit", nth=nth) for whom in random.choice([(), (0, 1, 2)])]
    heal_s = random.choice([45.0, random.uniform(10.5, 20.0)])
    return _scene(random, name, Fault("stall", "self", hook="unit", nth=nth), *others, units=1, heal_s=heal_s)


# ------------------------------------------------------------------------------------------------------ copies


def _dead_as_its_generation_begins(random: Random, name: str) -> Scene:
    """A newcomer holds the state and dies, and the members may have its generation in effect."""
    die = Fault("crash", "self", hook="copied", nth=1, delay_s=random.uniform(0.0, 0.04))
    return _scene(random, name, _early(random), die, steps=30, units=random.choice([6, 8]))


def _drained_while_one_copies(random: Random, name: str) -> Scene:
    """Who drains does not wait for the newcomer."""
    drain = Fault("drain", random.randrange(6), hook="ready", nth=1, delay_s=random.uniform(0.0, 0.3), for_s=20.0)
    return _scene(random, name, _early(random), drain, nodes=random.choice([3, 4]), steps=30, short_log=True)


def _stuck_as_its_generation_begins(random: Random, name: str) -> Scene:
    stick = Fault("stick", hook="copied", nth=random.randint(1, 2), delay_s=random.uniform(0.0, 0.004))
    return _scene(random, name, _early(random), stick, steps=30)


def _newcomer_alone_is_past_k(random: Random, name: str) -> Scene:
    """The donor's sums do not reach the other member, but a newcomer has come in after them; then the donor dies."""
    mute = Fault("mute", "donor", hook="effect_summed", nth=2, for_s=3.0)
    gone = Fault("crash", "ahead", hook="joined", nth=1, delay_s=random.choice([0.0, random.uniform(0.0, 0.01)]))
    return _scene(random, name, _early(random), mute, gone, steps=30)


def _waited_for_in_vain(random: Random, name: str) -> Scene:
    """Epochs are shorter than a start, so the ring stands still for the third newcomer; and that one hangs."""
    hang = Fault("hang", "self", hook="invited", nth=3)
    return _scene(random, name, _early(random), hang, nodes=2, epoch_steps=random.randint(1, 2), steps=60, units=2)


def _copied_result_comes_too_late(random: Random, name: str) -> Scene:
    """Who is behind fetches a result; whoever has it sleeps, and a third one dies meanwhile."""
    nodes = random.choice([4, 5])
    asleep = Fault("pause", "ahead", hook="fetch", nth=1, for_s=random.uniform(0.2, 0.8))
    third = Fault("crash", "third", hook="fetch", nth=1, delay_s=random.uniform(0.0, 0.1))
    source = Fault("crash", "ahead", hook="fetch", nth=1)
    others = random.choice([(asleep, third), (asleep, third), (asleep, third), (third,), (source,)])
    trouble = random.choice([0.0, 0.5])
    return _scene(random, name, *_split(random, nodes), *others, nodes=nodes, retains=True, copy_trouble=trouble)


def _computed_alone_in_vain(random: Random, name: str) -> Scene:
    """Who could not fetch a result computes it; the next plan has somebody again who holds it."""
    nodes = random.choice([4, 5])
    third = Fault("crash", random.randrange(8), hook="alone", nth=random.randint(1, 4), delay_s=random.uniform(0, 0.06))
    return _scene(random, name, *_split(random, nodes), third, nodes=nodes, units=8, retains=True, copy_trouble=0.8)


# ------------------------------------------------------------------------------------------------------- rings


def _pending_ring_not_built(random: Random, name: str) -> Scene:
    """What one member sends does not arrive while the ring of a planned generation is built."""
    mute = Fault("mute_all", 0, hook="leader_commit", nth=2, for_s=random.uniform(5.2, 7.0))
    change = Fault("drain", 3, at_s=random.uniform(0.6, 1.0), for_s=20.0)
    second = (Fault("add_node", at_s=random.uniform(0.6, 3.0)),) * random.randint(0, 1)
    return _scene(random, name, change, mute, *second, nodes=4, max_workers=5, heal_s=14.0)


def _newcomer_cannot_be_connected(random: Random, name: str) -> Scene:
    """What carries the gradients fails on the node of a newcomer, each time that a ring with it is built."""
    fails = Fault("uncarried", "self", hook="invited", nth=1, for_s=random.choice([8.0, 40.0]))
    later = (Fault("crash", random.randrange(8), at_s=random.uniform(2.0, 9.0)),) * random.randint(0, 1)
    steps, spares = random.choice([200, 600]), random.choice([0, 0, 1])
    return _scene(random, name, _early(random), fails, *later, spares=spares, steps=steps, units=2, heal_s=45.0)


def _unreachable_member(random: Random, name: str) -> Scene:
    """What one member sends does not arrive while two rings in a row are built after a loss."""
    what, replace = random.choice(["mute", "mute_all", "mute_all"]), random.random() < 0.7
    whom: str | int = random.choice(("donor", "donor", 1, 2))
    mute = Fault(what, whom, hook="leader_committed_loss", nth=1, for_s=random.uniform(11.0, 14.0))
    return _scene(random, name, _early(random), mute, nodes=random.choice([3, 4, 4]), replace=replace, heal_s=16.0)


def _loss_as_a_change_takes_effect(random: Random, name: str) -> Scene:
    """A member has given its sums for the step after which a planned generation begins, and dies; perhaps the leader
    hears of that before it hears that somebody has entered the generation."""
    nodes, change = random.choice([2, 2, 3]), random.choice(["drain", "drain", "add_node"])
    whom, nth = random.choice(["self", "self", "ahead"]), random.randint(1, nodes)
    gone = Fault("crash", whom, hook="effect_summed", nth=nth, delay_s=random.uniform(0.0, 0.01))
    late = (Fault("pause_agent", "ahead", hook="effect_summed", nth=nth, for_s=0.3),) * random.randint(0, 1)
    faults = (_early(random, change, for_s=20.0), *late, gone)
    return _scene(random, name, *faults, nodes=nodes, max_workers=4, steps=30)


def _untold_change(random: Random, name: str) -> Scene:
    """A planned generation becomes durable while its leader asks for reports, and another one tells of it."""
    change = Fault("drain", 2, at_s=0.8, for_s=20.0) if random.random() < 0.5 else Fault("add_node", at_s=0.8)
    crash = Fault("crash", 0, hook="leader_commit", nth=2, delay_s=random.uniform(0.0, 0.01))
    lead = Fault("crash_leader", hook="leader_quiescing", nth=1, delay_s=random.uniform(0.1, 1.2))
    return _scene(random, name, change, crash, lead, max_workers=4, store_trouble=0.8, steps=30)


# ------------------------------------------------------------------------------------------------------- speed


def _uneven_and_struck(random: Random, name: str) -> Scene:
    """Shards follow the speed of machines when one is lost."""
    slowness = random.choice([(1.0, 4.0, 1.0), (4.0, 1.0, 1.0), (1.0, 1.0, 4.0)])
    crash = Fault("crash", random.randrange(8), at_s=random.uniform(2.0, 3.5))
    return _scene(random, name, crash, units=8, steps=30, slowness=slowness, uneven_s=0.1)


def _demoted_and_struck(random: Random, name: str) -> Scene:
    """A straggler is about to give its place to a spare when a member is lost."""
    slowness = random.choice([(1.0, 4.0, 1.0), (4.0, 1.0, 1.0), (1.0, 1.0, 4.0)])
    crash = Fault("crash", random.randrange(6), hook="demoted", nth=1, delay_s=random.uniform(0.0, 0.3))
    return _scene(random, name, crash, units=6, steps=40, slowness=slowness, spares=1, uneven_s=0.1,
                  stragglers=Stragglers.DEMOTE)  # fmt: skip


# ----------------------------------------------------------------------------------------- every copy is lost


def _all_die(random: Random, name: str) -> Scene:
    """All workers die at once, perhaps twice; a node with what it has kept may go too, and so may the leader."""
    nodes, slots = random.choice([(1, 1), (2, 1), (3, 1), (2, 2), (3, 1)])
    begun = nodes * slots * random.randint(3, 14)
    faults = [Fault("crash_all", hook="begin", nth=begun)]
    if random.random() < 0.5:
        faults.append(Fault("crash_all", hook="revived", nth=1, delay_s=random.uniform(0.0, 1.5)))
    if random.random() < 0.3:
        faults.append(Fault("crash_node", random.randrange(6), hook="begin", nth=begun))
    if random.random() < 0.4:
        hook = random.choice(["leader_quiescing", "leader_forming"])
        faults.append(Fault("crash_leader", hook=hook, nth=1, delay_s=random.uniform(0.0, 0.5)))
    if random.random() < 0.6:
        faults.append(Fault("crash", "self", hook="revived", nth=1, delay_s=random.choice([0.0, 0.05])))
    return _scene(
        random, name, *faults, nodes=nodes, slots=slots, snapshot_every=random.choice([0, 0, 1, 2, 5]), revives=True,
        min_workers=random.choice([1, nodes * slots]), checkpoints=random.choice([0.1, 0.5]),
        import_s=random.choice([0.0, 0.5, 20.0]), steps=random.randint(14, 24), twice=random.choice([0.0, 0.1]),
        heal_s=30.0,
    )  # fmt: skip


def _all_die_in_the_first_step(random: Random, name: str) -> Scene:
    """Perhaps again and again, perhaps when there is a newcomer, or as the first of them have applied it."""
    nodes, slots = random.choice([(1, 1), (2, 1), (2, 2)])
    members = nodes * slots
    faults = [Fault("crash_all", hook="begin", nth=random.randint(1, members + 1), delay_s=random.uniform(0.0, 0.2))]
    again = random.choice([0, 0, 1, 5])
    faults += [Fault("crash_all", hook="anew", nth=nth + 1, delay_s=random.uniform(0.0, 0.1)) for nth in range(again)]
    if random.random() < 0.3:
        faults.append(Fault("add_node", at_s=random.uniform(0.2, 1.0)))
    if random.random() < 0.2:
        hook = random.choice(["leader_quiescing", "leader_forming"])
        faults.append(Fault("crash_leader", hook=hook, nth=1, delay_s=random.uniform(0.0, 0.5)))
    return _scene(
        random, name, *faults, nodes=nodes, slots=slots, spares=random.choice([0, 0, 1]), max_workers=members + 1,
        min_workers=random.choice([1, members]), import_s=random.choice([0.0, 0.5, 20.0]), checkpoints=0.0, heal_s=30.0,
        max_restarts=random.choice([0, 1, 3]),
    )  # fmt: skip


def _held_after_all(random: Random, name: str) -> Scene:
    """All die but those of a node that nobody reaches, for as long as it takes until it is given up."""
    nodes, whom = random.choice([2, 3]), random.randrange(6)
    begun = nodes * random.randint(3, 12)
    apart = Fault("isolate", whom, hook="begin", nth=begun, for_s=random.uniform(44.7, 49.0))
    rest = Fault("crash_others", whom, hook="begin", nth=begun, delay_s=0.001)
    return _scene(random, name, apart, rest, nodes=nodes, snapshot_every=random.choice([0, 1, 3]), revives=True,
                  import_s=random.choice([0.5, 4.0, 4.0]), heal_s=60.0)  # fmt: skip


def _slot_fails_after_all_died(random: Random, name: str) -> Scene:
    """A node's next process ends before it has joined, while the others wait for it."""
    crash = Fault("crash_all", at_s=random.uniform(0.6, 1.2))
    nodes = random.choice([2, 3])
    return _scene(random, name, crash, nodes=nodes, snapshot_every=1, revives=True, never_joins=random.randrange(nodes),
                  joins_once=True, max_restarts=0, import_s=0.5, steps=30)  # fmt: skip


STORIES: dict[str, Callable[[Random, str], Scene]] = {
    story.__name__.lstrip("_").replace("_", " "): story
    for story in (
        _slow_start, _ring_breaks_at_the_end, _strange_newcomer, _raised_for_good, _never_joins, _drifted,
        _started_as_the_job_ends, _dead_before_its_invitation, _resized, _news_while_all_leave, _left_too_late,
        _drainer_and_leader_die, _drained_while_a_slot_waits, _smaller_on_one_node, _all_silent_and_one_frozen,
        _another_node_while_one_is_awaited, _refused_commit, _frozen_newcomer, _frozen_then_busy, _two_stand_still,
        _drained_while_one_copies, _dead_as_its_generation_begins, _stuck_as_its_generation_begins,
        _newcomer_alone_is_past_k, _waited_for_in_vain, _copied_result_comes_too_late, _computed_alone_in_vain,
        _pending_ring_not_built, _newcomer_cannot_be_connected, _unreachable_member,
        _loss_as_a_change_takes_effect, _untold_change,
        _uneven_and_struck, _demoted_and_struck, _all_die, _all_die_in_the_first_step, _held_after_all,
        _slot_fails_after_all_died,
    )
}  # fmt: skip

AGAIN = (
    "all die", "copied result comes too late", "dead as its generation begins", "frozen then busy",
    "newcomer cannot be connected", "started as the job ends", "two stand still", "unreachable member",
    "unreachable member",
)  # fmt: skip
"""Told once more for each time that they stand here, because they seldom end as they are meant to."""
