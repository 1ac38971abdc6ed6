"""The ledger must not lack steps that a checkpoint has, or a resumed run could not tell them."""

from __future__ import annotations

import os
import time
from pathlib import Path

from elastic.errors import CheckpointError

POLL_S = 0.02
_CHUNK_BYTES = 1 << 20


def await_step(path: Path, steps: int, within_s: float, *, durable: bool) -> None:
    """Wait until the first `steps` steps are on file, and make them durable if they have to be.

    The agent appends them in order, one line each, a moment after they are applied. Raises CheckpointError.
    """
    deadline_s = time.monotonic() + within_s
    try:
        with path.open("rb", buffering=0) as file:
            lines = 0
            while True:
                while chunk := file.read(_CHUNK_BYTES):
                    lines += chunk.count(b"\n")
                if lines >= steps:
                    if durable:
                        os.fsync(file.fileno())
                    return
                if time.monotonic() > deadline_s:
                    raise CheckpointError(f"{path} has {lines} steps and not {steps} within {within_s:g} s")
                time.sleep(POLL_S)  # another process's file: there is nothing to wait on
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is not there, and a checkpoint without it could not be resumed from") from error
