"""Tries to become its node's daemon, says what came of it in a file, and trains. argv: the file, and another one, which
it waits for in the middle."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import elastic

PTRACE_ATTACH = 16


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def daemon() -> int:
    """The one above this process whose command line names the jobs' user."""
    pid = os.getpid()
    while b"--job-user" not in Path(f"/proc/{pid}/cmdline").read_bytes():
        pid = parent(pid)
    return pid


def outcome(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except OSError as error:
        return type(error).__name__
    return "done"


def attach(pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    if libc.ptrace(PTRACE_ATTACH, pid, None, None) != 0:
        raise OSError(ctypes.get_errno(), "ptrace")


job = elastic.join(seed=1)
above = daemon()
words = Path(f"/proc/{above}/cmdline").read_bytes().decode().split("\0")
certs = Path(words[words.index("--certs") + 1])
found = {
    "user": os.getuid(),
    "groups": os.getgroups(),
    "above": Path(f"/proc/{above}").stat().st_uid,
    "own certificates": sorted(os.listdir(os.environ["ELASTIC_CERTS"])),
    "agent.pem": outcome((certs / "agent.pem").read_bytes),
    "worker.pem": outcome((certs / "worker.pem").read_bytes),
    "memory": outcome(lambda: os.open(f"/proc/{above}/mem", os.O_RDONLY)),
    "environment": outcome(Path(f"/proc/{above}/environ").read_bytes),
    "files": outcome(lambda: os.listdir(f"/proc/{above}/fd")),
    "ptrace": outcome(lambda: attach(above)),
    "signal": outcome(lambda: os.kill(above, 0)),
}
if job.is_leader:
    temporary = Path(sys.argv[1] + ".tmp")
    temporary.write_text(json.dumps(found))
    temporary.rename(sys.argv[1])
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job.register(model=model, optimizer=optimizer)
for step in job.steps(shards=2, total=20):
    for _ in step:
        while step.index == 10 and not Path(sys.argv[2]).exists():
            time.sleep(0.05)  # a file of another process: there is nothing to wait on
        model(torch.randn(4, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
