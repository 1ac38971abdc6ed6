"""The processes of a script that a worker has: how they are waited for, and what they need of its memory."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any, cast

from runtime.frontends.restart.scripts import Scripts, _own_memory, too_much

MB = 1_000_000


def test_a_wait_ends_when_it_is_woken() -> None:
    """Also if it was woken before it began."""
    scripts = Scripts(cast(Any, None), 1.0)
    begun_s = time.monotonic()
    scripts.wake()
    scripts.wake()
    assert scripts.wait(600.0) == []
    later = threading.Timer(0.1, scripts.wake)
    later.start()
    assert scripts.wait(600.0) == [], "the two wakes before have ended one wait"
    assert time.monotonic() - begun_s >= 0.1
    later.join()
    assert scripts.wait(0.0) == []


def test_ranks_that_a_worker_takes_over_are_asked_for_their_memory() -> None:
    assert too_much(3, 300 * MB, 900 * MB) == ""
    said = too_much(4, 300 * MB, 900 * MB)
    assert said == "4 processes of the script with about 300 MB each are to run here, and 900 MB are left"
    assert too_much(4, 0, 0) == "", "none has run here: nothing is known"


def test_memory_counts_what_a_process_does_not_share() -> None:
    """Not what it has of the process that it was forked from."""
    ready, go = os.pipe(), os.pipe()
    ballast = bytearray(b"x" * (64 * MB))
    if (pid := os.fork()) == 0:
        os.close(go[1])
        own = bytearray(b"y" * (48 * MB))
        os.write(ready[1], b"!")
        os.read(go[0], 1)
        os._exit(len(own) == 0)
    os.read(ready[0], 1)
    here = _own_memory(pid)
    os.close(go[1])
    os.waitpid(pid, 0)
    assert 48 * MB <= here < 64 * MB, f"{len(ballast)} bytes are shared"
    assert _own_memory(pid) == 0


def test_a_kernel_without_that_line_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "smaps_rollup").write_text("Rss:  7 kB\n")
    assert _own_memory(7, tmp_path) == 0
