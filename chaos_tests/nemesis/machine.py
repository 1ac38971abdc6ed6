"""What is done to the services of a job of one machine, and to the machine itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from chaos_tests.nemesis import etcd_api, signals
from chaos_tests.nemesis.scene import NotNow, Scene
from chaos_tests.nemesis.signals import End
from chaos_tests.scenario.faults import ETCD
from chaos_tests.scenario.schedule import Planned
from chaos_tests.support import processes


def kill_service(scene: Scene, planned: Planned, *, service: str) -> None:
    _on_service(scene, planned, service, signals.kill)


def freeze_service(scene: Scene, planned: Planned, *, service: str) -> None:
    _on_service(scene, planned, service, lambda pid: signals.freeze([pid]))


_COMMANDS = ("elastic.cli", "chaos_tests.cluster.local_job")
"""Modules of the command that runs the job, which such a signal ends in order: of a script, and of a job in TOML."""


def signal_all(scene: Scene, planned: Planned) -> None:
    """The job may take for_s of the fault to start what ends by them: etcd."""
    lines = {pid: processes.command_line(pid) for pid in processes.living(scene.mark)}
    pids = [pid for pid, line in lines.items() if not any(command in line for command in _COMMANDS)]

    def blow() -> None:
        signals.send_to_living(pids, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    scene.lasting(planned, f"{len(pids)} processes", blow)


def ask_etcd(scene: Scene, planned: Planned, *, to: str) -> None:
    """to: a function of etcd_api.py."""
    _on_service(scene, planned, ETCD, getattr(etcd_api, to))


def hog(scene: Scene, planned: Planned) -> None:
    scene.lasting(planned, "all cores", lambda: signals.hog(2 * (os.cpu_count() or 1)))


def fill_disk(scene: Scene, planned: Planned) -> None:
    scene.lasting(planned, str(scene.directory), lambda: signals.fill(scene.directory))


def _on_service(scene: Scene, planned: Planned, service: str, blow: Callable[[int], End | None]) -> None:
    pid = processes.services(scene.mark).get(service)
    if pid is None:
        raise NotNow(f"no process of {service}")
    scene.lasting(planned, service, lambda: blow(pid), pid=pid)
