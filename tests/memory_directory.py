"""A directory in the memory of this machine, for tests of what is kept there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from elastic.records.host_memory import PARENT


@contextmanager
def memory_directory() -> Iterator[str]:
    """Open until it is gone: a chaos run beside this test would take it for what its own job has left behind."""
    made = tempfile.TemporaryDirectory(dir=PARENT, prefix="test-")
    in_use = os.open(made.name, os.O_RDONLY)
    try:
        with made as directory:
            yield directory
    finally:
        os.close(in_use)
