"""Run by Python itself at the start of every process of a job with --restart that has this directory on its path: a
worker waits at the gate "newcomer" before it joins the job."""

from typing import Any

from chaos_tests.failpoints.import_patch import patch_when_imported
from tests.live.scripts.gates import hold


def _held(supervisor: Any) -> None:
    run = supervisor.run

    def held_run(*args: Any) -> None:
        hold("newcomer")
        run(*args)

    supervisor.run = held_run


patch_when_imported("runtime.frontends.restart.supervisor", _held)
