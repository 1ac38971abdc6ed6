"""The process between a worker and its script: when it takes the worker for one that stands still."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

SILENCE_S = 1.0

WORKER = """
import signal, sys, threading, time
import numpy, torch
from elastic.agent.worker.environment import AGENT_SOCKET
from runtime.frontends.restart.script_host import ScriptHosts
import os
os.environ[AGENT_SOCKET] = "none"
hosts = ScriptHosts(lambda: time.sleep(600), float(sys.argv[1]))
def beat():
    while True:
        hosts.heard()
        time.sleep(0.1)
threading.Thread(target=beat, daemon=True).start()
for host in hosts.first(2):
    print(host.start({"TORCHELASTIC_RUN_ID": "job"}), flush=True)
print(*(host.ended() for host in hosts.first(2)), flush=True)
"""


class Worker:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(SILENCE_S)], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self.process.stdout is not None
        self.script, self.second = (int(self.process.stdout.readline()) for _ in range(2))
        with open(f"/proc/{self.script}/stat") as file:
            self.host = int(file.read().rpartition(")")[2].split()[1])

    def script_ends_within(self, seconds: float, pid: int = 0) -> bool:
        """pid: of the script; 0: the first one."""
        pidfd = os.pidfd_open(pid or self.script)
        try:
            return bool(select.select([pidfd], [], [], seconds)[0])
        finally:
            os.close(pidfd)


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.process.kill()
    made.process.communicate()


def test_the_script_of_a_worker_that_stands_still_is_ended(worker: Worker) -> None:
    os.kill(worker.process.pid, signal.SIGSTOP)
    assert worker.script_ends_within(10 * SILENCE_S)


def test_a_pause_of_the_whole_machine_ends_no_script(worker: Worker) -> None:
    """As of a container that is paused: the worker and this process stand still, and go on together."""
    for pid in (worker.process.pid, worker.host):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(2 * SILENCE_S)
    os.kill(worker.host, signal.SIGCONT)
    time.sleep(SILENCE_S / 2)
    os.kill(worker.process.pid, signal.SIGCONT)
    assert not worker.script_ends_within(2 * SILENCE_S)


def test_the_scripts_of_a_worker_end_with_it(worker: Worker) -> None:
    seen = [os.pidfd_open(pid) for pid in (worker.script, worker.second, worker.host)]
    worker.process.kill()
    for pidfd in seen:
        assert select.select([pidfd], [], [], 60.0)[0]
        os.close(pidfd)


def test_one_script_ends_without_the_other_one(worker: Worker) -> None:
    os.kill(worker.script, signal.SIGKILL)
    assert not worker.script_ends_within(2 * SILENCE_S, worker.second)
    assert worker.process.stdout is not None
    os.kill(worker.second, signal.SIGKILL)
    said = worker.process.stdout.readline()
    assert said.count("status=-9") == 2
    first, second = map(float, re.findall(r"at_s=([\d.]+)", said))
    assert first < second < time.time()
