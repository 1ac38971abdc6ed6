"""What all parts of one agent know: which job on which node, and where they tell of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from elastic.config import JobSpec
from elastic.records.journal import Journal
from elastic.rendezvous.reach import Reach


@dataclass(frozen=True, slots=True)
class AgentContext:
    """slots: how many members this node offers; spares come besides. reach: how the job's leader is found, and under
    which address other nodes find this one."""

    spec: JobSpec
    job_dir: Path
    node: str
    slots: int
    reach: Reach
    journal: Journal
