"""Faults are done here, to the processes of a world; each that lasts is undone by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic.protocol.worker_state import Phase
from tests.sim.agent import KEEPALIVE_S, Agent
from tests.sim.faults import WHOLE, Fault
from tests.sim.leader import Leader
from tests.sim.worker import Worker

if TYPE_CHECKING:
    from tests.sim.world import World

HARMLESS = ("drain", "add_node", "resize", "stop_job", "stop_in_order")
"""After these nobody is lost."""


def strike(world: World, fault: Fault, here: Worker | None) -> None:
    """here: the worker that has reached the trigger."""
    if world.healed or world.over:
        return
    victim = None if fault.what in WHOLE else _victim(world, fault, here)
    world.say("world", f"FAULT {fault} -> {victim.me if victim else '-'}")
    if victim is None and fault.what not in WHOLE:
        return
    world.reach(f"fault {fault.what}")
    world.disturbed |= fault.what not in HARMLESS
    if victim is not None:
        _strike_worker(world, fault, victim)
    elif fault.what.endswith(("_leader", "_store")):
        _strike_leader(world, fault)
    else:
        _strike_all(world, fault)


def _victim(world: World, fault: Fault, here: Worker | None) -> Worker | None:
    living = [worker for worker in world.workers.values() if worker.alive]
    if fault.what == "stick":
        return next((worker for worker in living if worker.p.phase is Phase.FRESH), None)
    if not living:
        return None
    match fault.whom:
        case "self" if here and here.alive:
            return here
        case "donor" if donors := [worker for worker in living if worker.p.donor]:
            return donors[-1]
        case "ahead" if others := [worker for worker in living if worker is not here]:
            return max(others, key=lambda worker: worker.p.reduced)
        case "third" if here and (others := [worker for worker in living if worker is not here and worker.p.entered]):
            ahead = max(others, key=lambda worker: worker.p.reduced)
            return next((worker for worker in others if worker is not ahead), ahead)
        case "leaver" if leavers := [worker for worker in living if worker.p.leaving]:
            return leavers[0]
        case "asleep" if asleep := [worker for worker in living if worker.paused]:
            return asleep[0]
        case int(number):
            return living[number % len(living)]
    return living[0]


def _strike_worker(world: World, fault: Fault, victim: Worker) -> None:
    clock, agent = world.clock, victim.agent
    match fault.what:
        case "crash":
            victim.die(-9, "killed")
        case "pause" | "burn":
            how = "burning" if fault.what == "burn" else clock.random.choice(["stopped", "asleep"])
            victim.pause(how)
            clock.after(fault.for_s, victim.resume)
        case "cut" if agent.stream:
            agent.stream.cut("the link broke")
        case "hang" if victim.p.phase is Phase.FRESH:
            victim.newcomer.hung = True
        case "stick":
            victim.newcomer.stuck = True
        case "stall" if victim.p.phase in (Phase.READY, Phase.COLLECTING) and not victim.paused:
            victim.stall()
            world.beat()
        case "mute" | "mute_all" if others := [
            w for w in world.workers.values() if w.alive and w.agent is not agent and w.p.entered
        ]:
            for other in others if fault.what == "mute_all" else [clock.random.choice(others)]:
                world.network.mute(agent.node, other.agent.node)
            clock.after(fault.for_s, world.network.unmute)
        case "uncarried":
            agent.uncarried = True
            clock.after(fault.for_s, agent.is_carried)
        case "isolate":
            world.network.part(one_way=False, apart={agent.node})
            _heal_parts(world, fault)
        case "crash_others":
            _crash(world, [w for w in world.workers.values() if w.alive and w.agent is not agent])
        case "raise":
            victim.raises = clock.random.choice(("line 0", "line 1", "device"))
        case "raise_there":
            victim.raises = "line 0"
        case "guard":
            victim.raises = "guard"
        case "drift":
            victim.drifted = True
        case "crash_node":
            agent.crash()
        case "stop_node" if agent.alive and not agent.paused:
            agent.stop()
        case "pause_node" | "pause_agent" if agent.alive:
            _pause_node(world, agent, fault)
        case "drain" if agent.alive and not agent.paused:
            agent.drain(fault.for_s)


def _pause_node(world: World, agent: Agent, fault: Fault) -> None:
    workers = list(agent.workers.values()) if fault.what == "pause_node" else []
    agent.pause()
    for worker in workers:
        worker.pause("stopped")

    def resume() -> None:
        agent.resume()
        for worker in workers:
            worker.resume()

    world.clock.after(world.spec.timing.suspect_s / 2, world.beat)
    world.clock.after(fault.for_s, resume)


def _strike_leader(world: World, fault: Fault) -> None:
    clock, leader = world.clock, world.leader
    match fault.what:
        case "crash_store":
            world.store_away = True
            clock.after(fault.for_s, world.store_returns)
            if leader is not None:
                leader.store_is_gone()
        case _ if leader is None or not leader.alive:
            return
        case "crash_leader":
            leader.crash()
            clock.after(clock.between(0.1, 3.0), world.replace_leader)
        case "isolate_leader":
            asleep = {worker.agent.node for worker in world.workers.values() if worker.paused}
            world.network.part(one_way=False, apart={leader.host, *asleep})
            _heal_parts(world, fault)
        case "cut_store":
            leader.cut_off = True
            leader.store_is_gone()
            clock.after(fault.for_s, lambda: _reconnect(leader))
            clock.after(clock.between(3.0, 5.0), lambda: _usurp(world, leader))
        case "pause_leader":
            leader.pause()
            clock.after(fault.for_s, leader.resume)
            if fault.for_s > 2.0:
                clock.after(2.0, lambda: _usurp(world, leader))


def _reconnect(leader: Leader) -> None:
    leader.cut_off = False


def _usurp(world: World, old: Leader) -> None:
    """The lease of a leader that is paused, or cut off, is over. Agents find the new one when they look."""
    if world.leader is not old or not (old.paused or old.cut_off or not old.alive):
        return
    world.elect()
    for stream in list(old.streams.values()):
        world.clock.after(world.clock.between(0.0, 8.0), lambda stream=stream: stream.cut("a new leader"))  # type: ignore[misc]


def _strike_all(world: World, fault: Fault) -> None:
    leader = world.leader
    match fault.what:
        case "add_node":
            world.start_agent(1)
        case "stop_job" if leader is not None:
            leader.stop(at_once=True)
        case "stop_in_order" if leader is not None:
            leader.stop(at_once=False)
            for agent in world.agents:
                agent.do(lambda agent=agent: agent.drain(fault.for_s))  # type: ignore[misc]
        case "resize":
            _resize(world, fault)
        case "crash_all":
            _crash(world, [worker for worker in world.workers.values() if worker.alive])
        case "part" | "part_one_way":
            world.network.part(one_way=fault.what == "part_one_way")
            _heal_parts(world, fault)


def _crash(world: World, workers: list[Worker]) -> None:
    """All within a moment."""
    for worker in workers:
        world.clock.after(world.clock.between(0.0, 0.005), lambda worker=worker: worker.die(-9, "killed"))  # type: ignore[misc]


def _heal_parts(world: World, fault: Fault) -> None:
    world.clock.after(KEEPALIVE_S, world.look_at_streams)
    world.clock.after(world.spec.timing.suspect_s / 2, world.beat)
    world.clock.after(fault.for_s, world.network.heal)


def _resize(world: World, fault: Fault) -> None:
    """As a fleet does: nodes are added, or whole ones leave."""
    assert isinstance(fault.whom, int)
    size = fault.whom + 1
    world.resize(size)
    there = [agent for agent in world.agents if agent.alive and not agent.draining]
    for _ in range(size - sum(agent.slots for agent in there)):
        world.start_agent(1)
    for agent in there:
        if sum(other.slots for other in there if not other.draining) - agent.slots >= size and not agent.paused:
            agent.drain(60.0)
