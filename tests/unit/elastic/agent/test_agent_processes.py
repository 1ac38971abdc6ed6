"""The ends of an agent's processes: its own output, a worker's, and what workers leave behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from elastic.agent.process.process_start import PIPE_BYTES, Outlets
from elastic.agent.process.stdout_pump import Stdout
from elastic.agent.process.worker_process import READ_BYTES, WorkerProcess

PATIENCE_S = 60.0


def test_output_goes_on_when_a_full_disk_has_room_again(tmp_path: Path) -> None:
    out = os.open("/dev/full", os.O_WRONLY)
    pump = Stdout(out)
    pump.put(b"lost\n")
    deadline_s = time.monotonic() + PATIENCE_S
    while not pump._dropped:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    with (tmp_path / "out").open("wb") as file:
        os.dup2(file.fileno(), out)
    pump.put(b"kept\n")
    assert pump.close(PATIENCE_S) == 1
    os.close(out)
    assert (tmp_path / "out").read_bytes() == b"kept\n", "nothing of the lost line"


def test_the_end_of_a_worker_waits_for_nobody_who_prints_on(tmp_path: Path) -> None:
    """A process in a session of its own may have the worker's stdout."""
    line, lines = b"x" * 4095 + b"\n", 0
    outlets = Outlets(tmp_path / "log")
    other = os.dup(outlets.out)
    worker = subprocess.Popen(["true"], stdout=outlets.out, process_group=0)
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)

    def on_line(_: bytes) -> None:
        nonlocal lines
        lines += 1
        if lines < 4 * PIPE_BYTES // len(line):
            os.write(other, line)

    async def end() -> None:
        status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        os.write(other, line)
        WorkerProcess(worker.pid, outlets, on_line, status.set_result)
        assert await asyncio.wait_for(status, PATIENCE_S) == 0

    asyncio.run(end())
    worker.returncode = 0  # it was reaped elsewhere
    os.close(other)
    assert lines <= (PIPE_BYTES + 2 * READ_BYTES) // len(line)


AGENT_ENDED = """
import os, sys
from elastic.agent.process import subreaper

if (left := os.fork()) == 0:
    os.read(0, 1)
    os._exit(0)
kill = os.kill

def not_of_this_user(pid, number):
    if pid == left:
        raise PermissionError(1, "Operation not permitted")
    kill(pid, number)

os.kill = not_of_this_user
subreaper.REFUSED_S = 0.1
subreaper.children.dying_with_this = lambda *words: ["/bin/sh", "-c", "exit 7"]
sys.exit(subreaper.main())
"""


def test_a_process_that_may_not_be_killed_changes_nothing_of_how_the_agent_has_ended() -> None:
    """Such as one of sudo."""
    with subprocess.Popen(
        [sys.executable, "-c", AGENT_ENDED], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as reaper:
        assert reaper.stdin is not None and reaper.stderr is not None
        with contextlib.closing(reaper.stdin):  # then that process ends
            assert reaper.wait(PATIENCE_S) == 7
        assert "may not be killed" in reaper.stderr.read()
