"""Waits until the ledger has the steps before a checkpoint, or a resumed run would not know them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import BinaryIO

from elastic.errors import CheckpointError

LEDGER_POLL_S = 0.02
_TAIL_BYTES = 1 << 16


def await_step(path: Path, steps: int, within_s: float, *, durable: bool) -> None:
    """Wait until the first `steps` steps are on file, and make them durable if asked.

    The agent appends them in order, one line each, a moment after they are applied. Raises CheckpointError.
    """
    deadline_s = time.monotonic() + within_s
    try:
        with path.open("rb", buffering=0) as file:
            while (there := steps_on(file)) < steps:
                if time.monotonic() > deadline_s:
                    raise CheckpointError(f"{path} has {there} steps and not {steps} within {within_s:g} s")
                time.sleep(LEDGER_POLL_S)  # another process writes the file, so there is no event to wait for
            if durable:
                os.fsync(file.fileno())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is not there, and a checkpoint without it could not be resumed from") from error


def steps_on(file: BinaryIO) -> int:
    """How many steps a ledger has, by its last whole line only, because it may have millions and is asked often. Raises
    CheckpointError for a file that is no ledger."""
    size, tail = file.seek(0, os.SEEK_END), b""
    for begin in range(size - _TAIL_BYTES, -_TAIL_BYTES, -_TAIL_BYTES):
        file.seek(max(0, begin))
        tail = file.read(min(_TAIL_BYTES, begin + _TAIL_BYTES)) + tail
        *before, last = tail[: tail.rfind(b"\n") + 1].splitlines() or [b""]
        if last and (before or begin <= 0):
            try:
                return int(json.loads(last)["step"]) + 1
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointError(f"the last line of {file.name} is no step: {error}") from error
    return 0
