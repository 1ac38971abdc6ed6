"""The notice of a node as its workers and their scripts have it.

With --restart the script is a child process of its worker, which keeps the notice in a file for it. Times in the file
are CLOCK_MONOTONIC of the machine, which is the same for all of its processes.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

from elastic.records.files import read_regular, write_atomically

NOTICE_FILE = "ELASTIC_NOTICE_FILE"
"""Environment variable of a script under --restart: path of the file in which its worker keeps the notice."""

REPEATED_S = 5.0
"""A notice is repeated, as by an agent to its worker. The repetition ends at the same time, give or take these seconds,
because this worker may hear of it late. A notice in the same words that ends at another time is another notice: the
first was taken back, or the end has moved."""


@dataclass(frozen=True, slots=True)
class NodeNotice:
    """This worker's node has to go. signalled: SIGTERM has told its agent."""

    until_s: float
    """When the machine may be gone: a time of time.monotonic()."""
    because: str
    """In the words of the source."""
    signalled: bool = False
    kind: str = ""
    """"reclaim", "maintenance", "time limit" or "asked"."""
    source: str = ""
    """Where the notice comes from: "EC2", "Slurm", "SIGTERM", "operator" for `elastic drain`, ..."""
    deadline: float = field(default=0.0, compare=False)
    """The same time as until_s, in seconds since 1970."""

    @classmethod
    def begins(cls, left_s: float, because: str, kind: str, source: str, *, signalled: bool) -> Self:
        """left_s: from now."""
        return cls(time.monotonic() + left_s, because, signalled, kind, source, time.time() + left_s)

    @property
    def seconds_left(self) -> float:
        """From now until the machine may be gone; at least 0."""
        return max(0.0, self.until_s - time.monotonic())

    def is_repeated_by(self, later: NodeNotice) -> bool:
        """Whether a leader or the agent says the same again, in all it says, but for the time that it took."""
        told = (later.because, later.signalled, later.kind, later.source)
        same = told == (self.because, self.signalled, self.kind, self.source)
        return same and self.until_s <= later.until_s <= max(self.until_s, time.monotonic()) + REPEATED_S


class NoticeFile:
    """The notice of a worker, for its script. Used by one thread."""

    def __init__(self, path: Path) -> None:
        """A file that is there belonged to an earlier worker."""
        self.path = path
        self._kept: NodeNotice | None = None
        path.unlink(missing_ok=True)

    def keep(self, notice: NodeNotice | None) -> None:
        """Let the script find this notice, or none. Raises OSError."""
        if notice is self._kept:
            return
        if notice is None:
            self.path.unlink(missing_ok=True)
        else:
            write_atomically(self.path, json.dumps(asdict(notice)).encode())
        self._kept = notice


def kept_in(path: Path) -> NodeNotice | None:
    """What a NoticeFile of that path keeps."""
    try:
        return NodeNotice(**json.loads(read_regular(path)))
    except FileNotFoundError:
        return None
