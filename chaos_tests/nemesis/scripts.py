"""What is done to the scripts of a job in rounds, beside their workers: signals, and a script that waits for ever."""

from __future__ import annotations

import signal
import time

from chaos_tests.nemesis import signals, workers
from chaos_tests.nemesis.scene import NotNow, RunningFault, Scene
from chaos_tests.nemesis.signals import Impossible
from chaos_tests.scenario.failpoints import IN_SCRIPT, Act, FailpointOrder
from chaos_tests.scenario.schedule import Planned


def check(scene: Scene) -> None:
    """Raises Impossible if there are no scripts beside the workers, NotNow while not all of them run: what happens to
    one that is just being ended is no fault."""
    if not scene.spec.restart:
        raise Impossible("it is done to scripts in rounds: say --restart, or restart = true in the job")
    if not scene.world.round_runs or len(scene.world.members) < scene.spec.workers or scene.running:
        raise NotNow("not the scripts of all workers run, or another fault lasts")


def strike(scene: Scene, planned: Planned, *, number: signal.Signals) -> None:
    """A signal to the script of a member, whose worker has to end. If another member was lost meanwhile, all scripts
    would be started again, and nobody could say why this one had ended."""
    (worker,) = workers.targets(scene, planned)
    begun_ns, script = time.monotonic_ns(), scene.victims.dice(planned).choice(scene.world.scripts[worker])
    signals.send([script], number)
    scene.teller.injected(planned, scene.victims.pids([worker]), begun_ns, script=script)
    scene.victims.targeted.add(worker)
    scene.running.append(RunningFault(planned, hit={worker}, injected=True, alone=True))
    scene.teller.told(planned, f"{number.name} to the script of {worker}")


def hang(scene: Scene, planned: Planned) -> None:
    """Order a script to wait for ever with Python's lock held; `hangs` is called when it does."""
    (worker,) = workers.targets(scene, planned)
    order = FailpointOrder(planned.number, IN_SCRIPT, Act.HANG_GIL)
    scene.orders.give(order, worker)
    scene.running.append(RunningFault(planned, armed=(order, worker), awaits_event="scripts_hang"))


def hangs(scene: Scene, running: RunningFault, worker: str, begun_ns: int) -> None:
    """The script of a worker waits for ever, and all others will wait for it: any of them may fail for all."""
    running.armed = None
    running.injected = True
    running.since_s = time.monotonic()
    running.until_s = running.since_s + running.planned.lasts_s
    scene.teller.injected(running.planned, scene.victims.pids(scene.world.members), begun_ns, hanging=worker)
    scene.teller.told(running.planned, f"the script of {worker} hangs")


SEEN = {
    "scripts_hang": "the round was ended",
    "kept_damaged": "the bit was found",
    "script_ended": "its end was noted",
    "worker_exited": "the agent saw it end",
}
"""Event of the journals by which a fault is seen -> what that means."""


def seen(scene: Scene, running: RunningFault) -> None:
    """The job has noticed the fault."""
    if not running.injected:
        return
    because, running.awaits_event, running.until_s = SEEN[running.awaits_event], "", 0.0
    running.seen = True
    scene.teller.seen(running.planned, because)
