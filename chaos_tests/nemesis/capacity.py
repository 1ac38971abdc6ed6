"""Machines that are taken away: a worker is killed, and its place stays empty until there is another machine."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Sequence
from typing import Any

from chaos_tests.nemesis import signals
from chaos_tests.nemesis.membership_view import slot_of
from chaos_tests.nemesis.scene import NotNow, RunningFault, Scene
from chaos_tests.nemesis.signals import Impossible
from chaos_tests.scenario.schedule import Planned


def reclaim(scene: Scene, planned: Planned) -> None:
    """Whatever the agent starts in that place meanwhile stands still from its first moment on, as if it had not been
    started. The place and the time are the plan's."""
    slot, healthy = planned.slot, scene.victims.healthy()
    if slot is None:
        if len(healthy) < 2:
            raise NotNow("one member has to be spared")
        slot = slot_of(scene.victims.any_of(planned, healthy))
    there = scene.world.living(slot)
    if there in healthy and len(healthy) < 2:
        raise Impossible(f"{there} is the last that holds the state")
    begun_ns = time.monotonic_ns()
    hit = (there,) if there is not None and there not in scene.victims.targeted else ()
    pids = scene.victims.pids(hit)
    signals.send(pids.values(), signal.SIGKILL)
    text = f"the machine of place {slot} is taken away ({', '.join(hit)}), for {planned.lasts_s:g} s"
    scene.hits(planned, pids, begun_ns, text, target=f"place {slot}").slot = slot
    if not hit:
        scene.teller.seen(planned, "nobody was there just then")


def hold(scene: Scene, running: RunningFault, lines: Sequence[dict[str, Any]]) -> None:
    """Whatever was started in a place that has no machine stands still. lines: new ones of the journals."""
    for line in lines:
        worker = line["worker_id"]
        if line["event"] == "worker_started" and slot_of(worker) == running.slot:
            begun_ns = time.monotonic_ns()
            with contextlib.suppress(Impossible):  # it has ended already
                signals.send([scene.world.pids[worker]], signal.SIGSTOP)
                running.held.append(worker)
                scene.victims.frozen.add(worker)
                scene.teller.held(running.planned, worker, begun_ns)


def let_go(scene: Scene, running: RunningFault) -> None:
    for worker in running.held:
        scene.victims.frozen.discard(worker)
        with contextlib.suppress(Impossible):  # the agent may have ended it
            signals.send([scene.world.pids[worker]], signal.SIGCONT)
