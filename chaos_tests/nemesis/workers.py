"""What is done to workers from outside: signals that end them or make them stand still, no memory, lost connections."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence, Set

from chaos_tests.nemesis import out_of_memory, signals, tcp_reset
from chaos_tests.nemesis.scene import NotNow, RunningFault, Scene
from chaos_tests.nemesis.signals import End, Impossible
from chaos_tests.scenario.failpoints import FailpointOrder
from chaos_tests.scenario.faults import Aim
from chaos_tests.scenario.schedule import Planned


def targets(scene: Scene, planned: Planned) -> tuple[str, ...]:
    """Whom to hit. Raises NotNow if there is nobody."""
    if not (chosen := scene.victims.of(planned)):
        raise NotNow("nobody to do it to")
    return chosen


def strike(
    scene: Scene, planned: Planned, *, number: signal.Signals = signal.SIGKILL, grace_s: float = math.inf
) -> None:
    """grace_s: after which those that still live get SIGKILL."""
    if planned.fault.spark:
        hit(scene, planned, (scene.victims.any_of(planned, scene.victims.healthy()),), number, awaits_place=True)
    else:
        hit(scene, planned, targets(scene, planned), number).insist_s = time.monotonic() + grace_s


def hit(
    scene: Scene,
    planned: Planned,
    workers: tuple[str, ...],
    number: signal.Signals,
    *,
    awaits_place: bool = False,
    armed: tuple[FailpointOrder, str] | None = None,
) -> RunningFault:
    """armed: the failpoint to which this makes a worker come."""
    begun_ns, pids = time.monotonic_ns(), scene.victims.pids(workers)
    signals.send(pids.values(), number)
    place = f", and again at {planned.place}" if awaits_place else ""
    running = scene.hits(planned, pids, begun_ns, f"{number.name} to {', '.join(workers)}{place}")
    running.awaits_place, running.armed = awaits_place, armed
    return running


def hit_again(scene: Scene, running: RunningFault) -> None:
    """The place has come for which a strike in two parts has waited."""
    planned = running.planned
    if not (workers := scene.victims.of(planned)):
        return  # this place may come once more
    begun_ns, pids = time.monotonic_ns(), scene.victims.pids(workers)
    try:
        signals.send(pids.values(), signal.SIGKILL)
    except Impossible:
        return
    running.awaits_place = False
    if planned.fault.aim is Aim.HOLDERS:
        scene.world.lose_all()
    scene.teller.injected(planned, pids, begun_ns)
    scene.victims.targeted.update(workers)
    running.hit.update(workers)
    scene.teller.told(planned, f"SIGKILL to {', '.join(workers)} at {planned.place}")


def insist(running: RunningFault, pids: Mapping[str, int], ended: Set[str], now_s: float) -> None:
    """SIGKILL for those that have not ended within the grace of a strike. pids, ended: of all workers."""
    if now_s > running.insist_s:
        for worker in running.hit - ended:
            with contextlib.suppress(Impossible):  # it has just ended
                signals.send([pids[worker]], signal.SIGKILL)


def starve(scene: Scene, planned: Planned) -> None:
    (worker,) = targets(scene, planned)
    pids = scene.victims.pids([worker])
    begun_ns = out_of_memory.starve(pids[worker])
    scene.hits(planned, pids, begun_ns, f"there is no memory for {worker}")


def reset(scene: Scene, planned: Planned) -> None:
    """Raises NotNow if it has no connection, Impossible where nodes are no hosts of their own."""
    if scene.on_nodes().network is None:
        raise Impossible("workers on one host are connected without TCP; the preset partition has hosts of their own")
    (worker,) = targets(scene, planned)
    begun_ns = time.monotonic_ns()
    if not (count := tcp_reset.reset_connections(scene.world.pids[worker])):
        raise NotNow(f"{worker} has no connection")
    scene.teller.injected(planned, {}, begun_ns, target=f"connections of {worker}")
    scene.lasts(planned, None, f"{count} connections of {worker} are reset")


def freeze(scene: Scene, planned: Planned) -> None:
    hold(scene, planned, targets(scene, planned), signals.freeze, "SIGSTOP to")


def slow(scene: Scene, planned: Planned) -> None:
    hold(scene, planned, targets(scene, planned), signals.slow, "a fifth of the time for")


def hold(
    scene: Scene,
    planned: Planned,
    workers: tuple[str, ...],
    blow: Callable[[Sequence[int]], End],
    text: str,
    begun_ns: int | None = None,
) -> None:
    """begun_ns: since when they stand still, if they have done that by themselves."""
    begun_ns, pids = begun_ns or time.monotonic_ns(), scene.victims.pids(workers)
    let_go = blow(tuple(pids.values()))
    scene.teller.injected(planned, pids, begun_ns)
    running = scene.spares(planned, workers, let_go, f"{text} {', '.join(workers)} for {planned.lasts_s:g} s")
    running.frozen = frozenset(workers)
