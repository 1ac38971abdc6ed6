"""The ledger must not lack steps that a checkpoint has, or a resumed run could not tell them."""

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
    """Wait until the first `steps` steps are on file, and make them durable if they have to be.

    The agent appends them in order, one line each, a moment after they are applied. Raises CheckpointError.
    """
    deadline_s = time.monotonic() + within_s
    try:
        with path.open("rb", buffering=0) as file:
            while (there := steps_on(file)) < steps:
                if time.monotonic() > deadline_s:
                    raise CheckpointError(f"{path} has {there} steps and not {steps} within {within_s:g} s")
                time.sleep(LEDGER_POLL_S)  # another process's file: there is nothing to wait on
            if durable:
                os.fsync(file.fileno())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is not there, and a checkpoint without it could not be resumed from") from error


def steps_on(file: BinaryIO) -> int:
    """How many steps a ledger has, told by its last whole line: it may have millions, and is looked at every few
    seconds. Raises CheckpointError for what is no ledger."""
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
