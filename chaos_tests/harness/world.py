"""Who is in a job just now, told from its journals alone: no question to the job disturbs what is measured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def slot_of(worker: str) -> int:
    """The place of a worker within its node."""
    return int(worker.split(".")[-2])


class World:
    """Fed with journal lines in their order."""

    def __init__(self) -> None:
        self.generation = 0
        self.members: tuple[str, ...] = ()
        self.pids: dict[str, int] = {}
        """Of every worker there ever was."""
        self.lost: set[str] = set()
        self.ended: set[str] = set()
        self.newcomers: set[str] = set()
        """Replacements that have announced themselves and are not members yet."""
        self.over = False
        """A member has come to the end of the script."""
        self._at_work: set[str] = set()
        self._held: set[str] = set()

    def feed(self, lines: Iterable[dict[str, Any]]) -> None:
        for line in lines:
            worker = line["worker_id"]
            match line["event"]:
                # What a leader committed and could not announce is told by those who enter it.
                case "committed" | "entered" if line["generation"] > self.generation:
                    self.generation, self.members = line["generation"], tuple(line["members"])
                    self._at_work = set()
                    self.lost -= set(self.members)  # a silent node's workers are noted as lost, and may come back
                case "op_complete" | "joined":
                    if line["generation"] == self.generation:
                        self._at_work.add(worker)
                    self._held.add(worker)
                    self.newcomers.discard(worker)
                case "announced" if line.get("entered") == 0 and self._held and worker not in self._held:
                    self.newcomers.add(worker)
                case "member_lost" | "expelled":
                    self.lost.add(worker)
                case "worker_exited":
                    self.ended.add(worker)
                    self.newcomers.discard(worker)
                case "finished" | "job_over" | "job_ended":
                    self.over = True
            if line["who"] == worker or line["event"] == "worker_started":
                self.pids[worker] = line["pid"]

    @property
    def steady(self) -> bool:
        """Whether all members of the newest generation have its first result."""
        return bool(self.members) and self._at_work >= set(self.members) and not self.lost & set(self.members)

    @property
    def holders(self) -> tuple[str, ...]:
        """Living members that hold the state, the oldest first."""
        gone = self.lost | self.ended
        return tuple(worker for worker in self.members if worker in self._held and worker not in gone)

    def living(self, slot: int) -> str | None:
        """The process in a place just now; None between two."""
        there = [worker for worker in self.pids if slot_of(worker) == slot and worker not in self.ended]
        return there[-1] if there else None
