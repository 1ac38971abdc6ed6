"""A script for torchrun that is unwell in its first round, and ends well in the next: `unwell.py HOW DIRECTORY`.

Each process writes a file `RANK.ROUND` with its pid. The functions say how it is unwell; `always-hang` is so in each
round, and waits for a file `end` in no round.
"""

import multiprocessing.shared_memory
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.elastic.timer

timer: Any = torch.distributed.elastic.timer
HOW, HOME = sys.argv[1], Path(sys.argv[2])
RANK, ROUND = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def wait_for_ever() -> None:
    time.sleep(3600)


def all_wait_for_rank_1() -> None:
    dist.init_process_group("gloo")
    if RANK == 1:
        wait_for_ever()
    dist.all_reduce(torch.zeros(1))


def rank_0_is_through() -> None:
    if RANK != 0:
        wait_for_ever()


def a_timer_expires() -> None:
    timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
    dist.init_process_group("gloo")
    with timer.expires(after=3600):
        dist.barrier()
    if RANK == 1:
        with timer.expires(after=1, scope="the second barrier"):
            wait_for_ever()
    dist.barrier()


def a_timer_is_caught() -> None:
    """It ends well by the signal of the timer, which is none the less its failure."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"], signal=signal.SIGTERM))
    if RANK == 1:
        with timer.expires(after=1, scope="its wait"):
            wait_for_ever()
    wait_for_ever()


def is_deaf() -> None:
    """SIGTERM is ignored, and children have left the session."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    helper = subprocess.Popen(["sleep", "3600"], start_new_session=True)
    orphan = subprocess.run(["sh", "-c", "setsid sleep 3600 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True)
    memory = multiprocessing.shared_memory.SharedMemory(create=True, size=64)
    (HOME / f"children.{RANK}").write_text(f"{helper.pid} {int(orphan.stdout)} {memory.name}")
    (HOME / f"there.{RANK}").touch()
    wait_for_ever()


def dozes() -> None:
    """Until the directory has a file `end`, and a moment longer."""
    while not (HOME / "end").exists():
        time.sleep(0.05)
    time.sleep(0.5)


def prints_a_lot() -> None:
    for _ in range(300):
        print("x" * 100_000)
    print("y" * 300_000, flush=True)


UNWELL: dict[str, Callable[[], None]] = {
    "hang": all_wait_for_rank_1,
    "always-hang": all_wait_for_rank_1,
    "part": rank_0_is_through,
    "timer": a_timer_expires,
    "caught-timer": a_timer_is_caught,
    "deaf": is_deaf,
    "doze": dozes,
    "print": prints_a_lot,
    "well": lambda: None,
}

if __name__ == "__main__":
    (HOME / f"{RANK}.{ROUND}").write_text(str(os.getpid()))
    if ROUND == 0 or HOW == "always-hang":
        UNWELL[HOW]()
