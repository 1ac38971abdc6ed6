"""What is done to workers from outside: signals that end them or make them stand still, no memory, lost connections."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Mapping, Sequence, Set

from chaos_tests.nemesis import out_of_memory, signals, tcp_reset
from chaos_tests.nemesis.scene import NotNow, RunningFault, Scene
from chaos_tests.nemesis.signals import End, Impossible
from chaos_tests.scenario.failpoints import FailpointOrder
from chaos_tests.scenario.faults import Strike, Targeted
from chaos_tests.scenario.schedule import Planned


def targets(scene: Scene, planned: Planned, fault: Targeted) -> tuple[str, ...]:
    """Whom to hit. Raises NotNow if there is nobody."""
    if not (chosen := scene.victims.of(planned, fault)):
        raise NotNow("nobody to do it to")
    return chosen


def hit(
    scene: Scene,
    planned: Planned,
    workers: tuple[str, ...],
    number: signal.Signals,
    *,
    awaits_place: bool = False,
    laid: tuple[FailpointOrder, str] | None = None,
) -> None:
    """laid: the ambush that this makes somebody come to."""
    begun_ns, pids = time.monotonic_ns(), scene.victims.pids(workers)
    signals.send(pids.values(), number)
    scene.teller.injected(planned, pids, begun_ns)
    scene.victims.condemned.update(workers)
    now_s = time.monotonic()
    scene.running.append(RunningFault(planned, now_s, awaits_place, laid, hit=set(workers), injected=True))
    place = f", and again at {planned.place}" if awaits_place else ""
    scene.teller.told(planned, f"{number.name} to {', '.join(workers)}{place}")


def hit_again(scene: Scene, running: RunningFault) -> None:
    """The place has come for which a strike in two parts has waited."""
    fault, planned = running.fault, running.planned
    if not isinstance(fault, Strike) or not (workers := scene.victims.of(planned, fault)):
        return  # this place may come once more
    begun_ns, pids = time.monotonic_ns(), scene.victims.pids(workers)
    try:
        signals.send(pids.values(), fault.number)
    except Impossible:
        return
    running.awaits_place = False
    scene.teller.injected(planned, pids, begun_ns)
    scene.victims.condemned.update(workers)
    running.hit.update(workers)
    scene.teller.told(planned, f"{fault.number.name} to {', '.join(workers)} at {planned.place}")


def insist(running: RunningFault, pids: Mapping[str, int], ended: Set[str], now_s: float) -> None:
    """SIGKILL for those that have not ended within the grace of a strike. pids, ended: of all workers."""
    fault = running.fault
    if isinstance(fault, Strike) and now_s - running.since_s > fault.grace_s:
        for worker in running.hit - ended:
            with contextlib.suppress(Impossible):  # it has just ended
                signals.send([pids[worker]], signal.SIGKILL)


def starve(scene: Scene, planned: Planned, worker: str) -> None:
    pids = scene.victims.pids([worker])
    begun_ns = out_of_memory.starve(pids[worker])
    scene.teller.injected(planned, pids, begun_ns)
    scene.victims.condemned.add(worker)
    scene.running.append(RunningFault(planned, time.monotonic(), hit={worker}, injected=True))
    scene.teller.told(planned, f"there is no memory for {worker}")


def reset(scene: Scene, planned: Planned, worker: str) -> None:
    """Raises NotNow if it has no connection, Impossible where nodes are no hosts of their own."""
    if scene.on_nodes().network is None:
        raise Impossible("workers on one host are connected without TCP; the preset partition has hosts of their own")
    begun_ns = time.monotonic_ns()
    if not (count := tcp_reset.reset_connections(scene.world.pids[worker])):
        raise NotNow(f"{worker} has no connection")
    scene.teller.injected(planned, {}, begun_ns, target=f"connections of {worker}")
    scene.lasts(planned, 0.0, None, f"{count} connections of {worker} are reset")


def freeze(
    scene: Scene,
    planned: Planned,
    workers: tuple[str, ...],
    blow: Callable[[Sequence[int]], End],
    for_s: float,
    text: str,
) -> None:
    begun_ns, pids = time.monotonic_ns(), scene.victims.pids(workers)
    let_go = blow(tuple(pids.values()))
    scene.teller.injected(planned, pids, begun_ns)
    scene.victims.frozen.update(workers)

    def end() -> None:
        let_go()
        # Whoever was expelled meanwhile counts as lost by the journal; the others are healthy again.
        scene.victims.frozen.difference_update(workers)

    scene.lasts(planned, for_s, end, f"{text} {', '.join(workers)} for {for_s:g} s", frozenset(workers))
