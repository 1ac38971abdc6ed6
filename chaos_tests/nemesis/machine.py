"""What is done to the services of a job of one machine, and to the machine itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping

from chaos_tests.nemesis import etcd_api, signals
from chaos_tests.nemesis.scene import NotNow, Scene
from chaos_tests.nemesis.signals import End
from chaos_tests.scenario.faults import ETCD, Ask
from chaos_tests.scenario.schedule import Planned
from chaos_tests.support import processes

ASKED: Mapping[Ask, Callable[[int], None]] = {
    Ask.COMPACT: etcd_api.compact,
    Ask.DEFRAGMENT: etcd_api.defragment,
    Ask.REVOKE: etcd_api.revoke_leases,
}


def kill_service(scene: Scene, planned: Planned, module: str) -> None:
    _on_service(scene, planned, module, lambda pid: signals.kill(pid))


def freeze_service(scene: Scene, planned: Planned, module: str, for_s: float) -> None:
    _on_service(scene, planned, module, lambda pid: signals.freeze([pid]), for_s)


def signal_all(scene: Scene, planned: Planned, for_s: float) -> None:
    pids = [pid for pid in processes.living(scene.mark) if "elastic.cli" not in processes.command_line(pid)]

    def blow() -> None:
        signals.send_to_living(pids, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    scene.lasting(planned, f"{len(pids)} processes", blow, for_s)


def ask_store(scene: Scene, planned: Planned, what: Ask) -> None:
    _on_service(scene, planned, ETCD, ASKED[what])


def hog(scene: Scene, planned: Planned, for_s: float) -> None:
    scene.lasting(planned, "all cores", lambda: signals.hog(2 * (os.cpu_count() or 1)), for_s)


def fill_disk(scene: Scene, planned: Planned, for_s: float) -> None:
    scene.lasting(planned, str(scene.directory), lambda: signals.fill(scene.directory), for_s)


def _on_service(
    scene: Scene, planned: Planned, module: str, blow: Callable[[int], End | None], for_s: float = 0.0
) -> None:
    pid = processes.services(scene.mark).get(module)
    if pid is None:
        raise NotNow(f"no process of {module}")
    scene.lasting(planned, module, lambda: blow(pid), for_s, pid=pid)
