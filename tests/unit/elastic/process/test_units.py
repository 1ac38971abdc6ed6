"""The units for systemd that are shipped."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from elastic.cli import parser
from elastic.cli.fleet.daemons import GRACE_S
from elastic.fleet.node.job_runner import SLACK_S, STOP_S
from tests.live.jobs import ROOT

UNITS = sorted((ROOT / "docs" / "systemd").glob("*.service"))


def values(unit: Path, key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", unit.read_text(), re.MULTILINE)


def test_there_is_a_unit_for_each_daemon() -> None:
    assert [unit.name for unit in UNITS] == ["elastic-agent.service", "elastic-rendezvous.service"]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_the_command_of_a_unit_is_one_that_the_program_takes(unit: Path) -> None:
    (command,) = values(unit, "ExecStart")
    program, *words = shlex.split(command)
    assert program.endswith("/elastic") and parser().parse_args(words).verb
    assert values(unit, "Type") == ["notify"], "what the daemons say is waited for"


def test_an_agent_has_time_to_leave_its_jobs_and_is_not_ended_for_one_worker() -> None:
    unit = UNITS[0]
    assert values(unit, "KillMode") == ["mixed"] and values(unit, "OOMPolicy") == ["continue"]
    assert int(values(unit, "TimeoutStopSec")[0]) >= GRACE_S + SLACK_S + STOP_S
    assert values(unit, "TimeoutStartSec") == ["infinity"], "it is ready when a leader has admitted it"
    forbidden = (
        *("PrivateTmp", "PrivateIPC", "ProtectHome", "MemoryDenyWriteExecute", "SystemCallFilter"),
        *("PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectClock"),  # the last one brings a DeviceAllow
    )
    assert not any(values(unit, key) for key in forbidden), "jobs need them"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_understands_a_unit(unit: Path, tmp_path: Path) -> None:
    program = tmp_path / "elastic"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    copy = tmp_path / unit.name
    text = re.sub(r"^ExecStart=\S+", f"ExecStart={program}", unit.read_text(), flags=re.MULTILINE)
    copy.write_text(re.sub(r"^User=.*", "User=root", text, flags=re.MULTILINE))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True)
    assert [line for line in done.stderr.splitlines() if unit.name in line] == [] and done.returncode == 0, done.stderr
