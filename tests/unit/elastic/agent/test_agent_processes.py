"""The ends of an agent's processes: its own output, a worker's, and what workers leave behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

from elastic.agent.process.stdout_pump import Stdout

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
