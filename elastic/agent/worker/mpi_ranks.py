"""What the agent tells its workers about mpirun's ranks: which worker has which, and which have joined."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MPI_RANKS_VARIABLE = "ELASTIC_MPI"


@dataclass(frozen=True, slots=True)
class Ranks:
    """workers: ids of the workers that have a rank, by rank. directory: this user's only; it ends with the agent."""

    workers: tuple[str, ...]
    directory: Path

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Ranks:
        document = json.loads(environment[MPI_RANKS_VARIABLE])
        return cls(tuple(document["workers"]), Path(document["directory"]))

    def to_environment(self) -> dict[str, str]:
        return {MPI_RANKS_VARIABLE: json.dumps({"workers": self.workers, "directory": str(self.directory)})}

    def joining(self) -> set[str]:
        """Workers that may be inside MPI_Init, where each waits for all others and nothing can interrupt it. Before all
        are ready none is inside, and a worker that waits for the rest can see that one is gone."""
        ranks = range(len(self.workers))
        if not all(self.ready(n).exists() for n in ranks):
            return set()
        return {self.workers[n] for n in ranks if not self.joined(n).exists()}

    def ready(self, rank: int) -> Path:
        """The file that the worker makes when it is about to join the others."""
        return self.directory / f"ready.{rank}"

    def joined(self, rank: int) -> Path:
        """The file that the worker makes when it has joined them."""
        return self.directory / f"joined.{rank}"

    def gone(self, rank: int) -> Path:
        """The file that the agent makes when the worker has ended."""
        return self.directory / f"gone.{rank}"
