"""Processes that tests start beside the product."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def child(*command: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is gone afterwards, whatever becomes of the test, and also if the test's own process is killed.

    options: of subprocess.Popen, which by itself would wait for the process's own end.
    """
    with subprocess.Popen(["setpriv", "--pdeathsig", "KILL", "--", *command], **options) as process:
        try:
            yield process
        finally:
            process.kill()
