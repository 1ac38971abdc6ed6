"""Orders to workers to do something to themselves at a point of their own work, and what becomes of those orders."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

from chaos_tests.nemesis import kept, scripts, signals, workers
from chaos_tests.nemesis.scene import NotNow, RunningFault, Scene
from chaos_tests.nemesis.signals import Impossible
from chaos_tests.scenario.failpoints import (
    ANYBODY,
    EARLY_SENT,
    FLIPS,
    IN_REPETITION,
    IN_SCRIPT,
    MIRROR,
    OF_ROUNDS,
    Act,
    FailpointOrder,
)
from chaos_tests.scenario.faults import Effect, When
from chaos_tests.scenario.schedule import Planned
from elastic.agent.worker.environment import VERIFY
from elastic.config import JobSpec, Overlap, Reduction

PLACE_S = 10.0
"""How long a fault waits for its place once it has made a recovery or a join begin."""
DECIDE = 3
"""With fewer members than these, two values that differ are one against one, and nobody can say which is wrong."""
ARMED_S = 45.0
"""Seconds for which a failpoint waits for a worker to come there: checkpoints and evaluations are rare."""


def arm(scene: Scene, planned: Planned, worker: str = "", *, act: Act) -> None:
    """worker: who is hit when it comes by; "": as the fault's row says."""
    if planned.place in OF_ROUNDS:
        scripts.check(scene)
    if act in FLIPS:
        _check_verified(scene)
    step = {When.FIRST: 0, When.LAST: scene.steps - 1, None: None}[planned.fault.step]
    order = FailpointOrder(planned.number, planned.place, act, step, planned.lasts_s)
    if planned.fault.spark:
        _spark(scene, planned, order)
        return
    if not worker:
        (worker,) = workers.targets(scene, planned)
    scene.orders.give(order, worker)
    scene.victims.targeted.add(worker)
    scene.running.append(RunningFault(planned, armed=(order, worker), alone=planned.place in OF_ROUNDS))


def _check_verified(scene: Scene) -> None:
    """Raises Impossible if nobody would see a flipped bit, or NotNow if nobody could say whose it is."""
    if not any(setting.startswith(f"{VERIFY}=") for setting in scene.spec.env):
        raise Impossible("nobody would see it: the job needs --verify every=N")
    if len(scene.victims.healthy()) < DECIDE:
        raise NotNow(f"with fewer than {DECIDE} members nobody could say whose value is wrong")


def never_reached(place: str, spec: JobSpec, *, on_nodes: bool) -> str:
    """Why no worker of such a job comes to a point; "": they may."""
    if spec.restart and place not in OF_ROUNDS:
        return "a script in rounds has no steps, evaluations and checkpoints of ours"
    if place in OF_ROUNDS and not spec.restart:
        return "only scripts in rounds keep their state: say --restart, or restart = true in the job"
    if place == EARLY_SENT and (spec.overlap is Overlap.OFF or (spec.overlap is Overlap.AUTO and not on_nodes)):
        return 'its gradients are sent when backward has ended: say overlap = "on" in the job'
    if place == IN_REPETITION and spec.reduction not in (Reduction.FIXED, Reduction.FIXED64):
        return 'only gradients that are summed as integers may not fit them: say reduction = "fixed" in the job'
    return ""


def _spark(scene: Scene, planned: Planned, order: FailpointOrder) -> None:
    """Kill any member, so that somebody comes to the place of an order to anybody."""
    worker = scene.victims.any_of(planned, scene.victims.healthy())
    scene.orders.give(order)
    try:
        workers.hit(scene, planned, (worker,), signal.SIGKILL, awaits_place=True, armed=(order, ANYBODY))
    except Impossible:
        scene.orders.withdraw(order)
        raise


def fired(scene: Scene, done: Mapping[str, Any]) -> None:
    """A worker came to its place and did what it was ordered to."""
    running = next(one for one in scene.running if one.armed and one.planned.number == done["number"])
    assert running.armed is not None
    (order, _), planned, worker = running.armed, running.planned, str(done["worker_id"])
    if order.point == IN_SCRIPT:
        scripts.hangs(scene, running, worker, int(done["t_mono_ns"]))
        return
    if order.point in MIRROR:
        kept.struck(scene, running, done)
        return
    scene.world.pids[worker] = int(done["pid"])
    running.armed, running.awaits_place = None, False
    if planned.fault.effect is not Effect.ENDS:
        scene.running.remove(running)
        scene.victims.targeted.discard(worker)
    if planned.fault.effect is Effect.FREEZES:
        begun_ns, text = int(done["t_mono_ns"]), f"at {planned.place} SIGSTOP to"
        workers.hold(scene, planned, (worker,), signals.thaw_later, text, begun_ns)
        return
    if planned.fault.effect is Effect.NONE:  # nothing happens to the worker itself: it may not be lost for it
        scene.teller.injected(planned, {}, int(done["t_mono_ns"]), target=f"disk of {worker}")
        scene.lasts(planned, None, f"{worker} {order.act}, for {planned.lasts_s:g} s")
        return
    scene.teller.injected(planned, scene.victims.pids([worker]), int(done["t_mono_ns"]))
    scene.teller.told(planned, f"{worker} {order.act} at {planned.place}")
    scene.victims.targeted.add(worker)
    running.injected = True
    running.hit.add(worker)


def still_armed(scene: Scene, running: RunningFault, now_s: float) -> bool:
    """Whether the fault waits on for a worker to come to its failpoint. One that has waited too long is given up."""
    if running.armed is None:
        return False
    order, worker = running.armed
    patience_s = PLACE_S if worker == ANYBODY else ARMED_S
    gone = worker in scene.world.ended
    if (now_s - running.since_s <= patience_s and not gone) or not scene.orders.withdraw(order, worker):
        return True  # or somebody has just come, and will be heard of
    running.armed, running.awaits_place = None, False
    because = f"nobody came to {order.point}" + (f", and {worker} has ended" if gone else "")
    if running.injected:
        scene.teller.incomplete(running.planned, because)
        return False
    scene.victims.targeted.discard(worker)
    scene.running.remove(running)
    scene.teller.skipped(running.planned, because)
    return True
