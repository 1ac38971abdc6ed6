"""How much a process holds, read from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class HeldResources:
    """What one process holds. rss_mb: resident memory in MiB."""

    fds: int
    threads: int
    rss_mb: float

    def since(self, earlier: HeldResources) -> HeldResources:
        return HeldResources(self.fds - earlier.fds, self.threads - earlier.threads, self.rss_mb - earlier.rss_mb)


def held(pid: int) -> HeldResources:
    """Raises OSError if the process is gone."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    rss_kib = int(status["VmRSS"].split()[0])
    return HeldResources(len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"]), rss_kib / 1024)


def least(samples: Iterable[HeldResources]) -> HeldResources:
    """Each figure at its smallest: what is held between two short-lived needs."""
    seen = list(samples)
    return HeldResources(min(s.fds for s in seen), min(s.threads for s in seen), min(s.rss_mb for s in seen))
