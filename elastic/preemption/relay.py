"""Notices of a node, passed on to the agents of its jobs: one of them asks the provider, all of them leave.

    daemon  -- <job-dir>/notices.json -->  agent of each job
            <-- <job-dir>/left.json --     its workers are gone, as of that round
            <-- <job-dir>/lost.json --     they go because one of them was lost (--blacklist-hosts of horovodrun)

A round is a number that no other change of what stands has had. Times are CLOCK_MONOTONIC of the machine, which is the
same for all of its processes.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from elastic.preemption.notice import Notice, NoticeKind
from elastic.preemption.provider import NoticeSource, Unanswered
from elastic.records.files import read_regular, write_atomically

NOTICES = "notices.json"
LEFT = "left.json"
LOST = "lost.json"


@dataclass(frozen=True, slots=True)
class ActiveNotices:
    """A notice that stands. ends_s: when the machine may be gone, monotonic; None: never, it is advice. source: who
    said it first."""

    kind: str
    because: str
    ends_s: float | None
    source: str = ""

    @property
    def leaves(self) -> bool:
        return self.ends_s is not None


def standing(source: str, notice: Notice) -> ActiveNotices:
    """As of now. source: the provider."""
    ends_s = time.monotonic() + notice.seconds_left if notice.leaves else None
    return ActiveNotices(str(notice.kind), notice.because, ends_s, notice.source or source)


def write(job_dir: Path, number: int, notices: Mapping[str, ActiveNotices]) -> None:
    """Pass them on, in that round. Raises OSError."""
    document = {"round": number, "notices": [asdict(notice) for notice in notices.values()]}
    write_atomically(job_dir / NOTICES, json.dumps(document).encode())


def has_left(job_dir: Path, number: int) -> bool:
    """Whether the job's workers are gone from this node because of what stood in that round."""
    document = _read(job_dir / LEFT)
    return document is not None and document.get("round") == number


def node_is_left(job_dir: Path) -> bool:
    """Whether this node has to go, and the job's workers are gone from it because of that."""
    document = _read(job_dir / NOTICES)
    leaves = document is not None and any(notice["ends_s"] is not None for notice in document["notices"])
    return document is not None and leaves and has_left(job_dir, document["round"])


def lose_worker(job_dir: Path, worker_id: str) -> None:
    """Note that the node is left because of this worker: called before the others begin to go. Raises Unanswered."""
    try:
        (job_dir / LEFT).unlink(missing_ok=True)  # of an earlier drain, which was taken back
        write_atomically(job_dir / LOST, json.dumps({"worker_id": worker_id}).encode())
    except OSError as error:
        raise Unanswered(f"{job_dir / LOST}: {error}") from error


def left_after_loss(job_dir: Path) -> bool:
    """Whether the job's workers are gone from this node because one was lost there."""
    document = _read(job_dir / NOTICES)
    return document is not None and (job_dir / LOST).exists() and has_left(job_dir, document["round"])


class NoticeRelay(NoticeSource):
    """What the node's daemon has heard; of several notices that which leaves least time."""

    name = "node"
    pause_s = 0.25

    def __init__(self, job_dir: Path) -> None:
        self._job_dir = job_dir

    def look(self) -> Notice | None:
        document = _read(self._job_dir / NOTICES)
        if document is None:
            return None
        try:
            self.round = int(document["round"])
            notices = [ActiveNotices(**one) for one in document["notices"]]
            chosen = min(notices, key=lambda one: math.inf if one.ends_s is None else one.ends_s, default=None)
            if chosen is None:
                return None
            left_s = math.inf if chosen.ends_s is None else max(0.0, chosen.ends_s - time.monotonic())
            return Notice(NoticeKind(chosen.kind), left_s, chosen.because, chosen.source)
        except (ValueError, KeyError, TypeError) as error:
            raise Unanswered(f"{self._job_dir / NOTICES}: {error}") from error

    def left(self) -> None:
        try:
            write_atomically(self._job_dir / LEFT, json.dumps({"round": self.round}).encode())
        except OSError as error:
            raise Unanswered(f"{self._job_dir / LEFT}: {error}") from error


def _read(path: Path) -> dict[str, Any] | None:
    try:
        document = json.loads(read_regular(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:  # the job's user may write what it wants
        raise Unanswered(f"{path}: {error}") from error
    if not isinstance(document, dict):
        raise Unanswered(f"{path} holds no object")
    return document
