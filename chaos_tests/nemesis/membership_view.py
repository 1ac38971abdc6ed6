"""Who is in a job just now, told from its journals alone: no question to the job disturbs what is measured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from elastic.checkpoints.naming import PERIODIC, EntryName
from elastic.protocol.worker_id import node_of


def slot_of(worker: str) -> int:
    """The place of a worker within its node."""
    return int(worker.split(".")[-2])


class MembershipView:
    """Fed with journal lines in their order."""

    def __init__(self) -> None:
        self.generation = 0
        self.members: tuple[str, ...] = ()
        self.pids: dict[str, int] = {}
        """Worker -> pid, of every worker there ever was."""
        self.lost: set[str] = set()
        self.ended: set[str] = set()
        self.newcomers: set[str] = set()
        """Replacements that have announced themselves and are not members yet."""
        self.over = False
        """A member has come to the end of the script."""
        self.agents: dict[str, int] = {}
        """Node -> pid of the job's agent there."""
        self.leader = 0
        """Pid of the replica that leads."""
        self.kept_step = 0
        """The step of the newest snapshot or checkpoint that was completed since the job had lost everything."""
        self.lost_generation = 0
        """The last one before that."""
        self.began_step = 0
        """From which the job went on when it had lost everything."""
        self.scripts: dict[str, list[int]] = {}
        """Worker -> pids of its scripts that run, of a job in rounds."""
        self._round, self._processes = 0, 0
        """The generation of the newest round that has begun, and how many scripts it has."""
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
                    self.scripts.pop(worker, None)
                    self.newcomers.discard(worker)
                case "script_started":
                    self.scripts.setdefault(worker, []).append(line["script"])
                    self._round, self._processes = line["generation"], line["world"]
                case "script_ended" if line["script"] in (mine := self.scripts.get(worker, [])):
                    mine.remove(line["script"])
                case "attending":
                    self.agents[line["node"]] = line["pid"]
                case "leading":
                    self.leader = line["pid"]
                case "snapshot_complete" | "checkpoint_complete" if line["series"] == PERIODIC:  # no save()
                    name = EntryName.parse(line["entry"])
                    if name is not None and name.generation > self.lost_generation:
                        self.kept_step = max(self.kept_step, name.step)
                case "state_restored":
                    self.began_step = int(line["step"])
                case "finished" | "job_over" | "job_ended":
                    self.over = True
            if line["who"] == worker or line["event"] == "worker_started":
                self.pids[worker] = line["pid"]

    def lose_all(self) -> None:
        """Nothing that was kept so far counts any more, also if it is heard of later."""
        self.kept_step, self.lost_generation = 0, self.generation

    @property
    def steady(self) -> bool:
        """Whether all members of the newest generation have its first result."""
        return bool(self.members) and self._at_work >= set(self.members) and not self.lost & set(self.members)

    @property
    def round_runs(self) -> bool:
        """Whether the scripts of all members run, and nobody is about to join them."""
        running = sum(len(self.scripts.get(worker, ())) for worker in self.members)
        is_whole = self._round == self.generation and 0 < running == self._processes
        return self.steady and not self.newcomers and is_whole

    @property
    def holders(self) -> tuple[str, ...]:
        """Living members that hold the state, the oldest first."""
        gone = self.lost | self.ended
        return tuple(worker for worker in self.members if worker in self._held and worker not in gone)

    def there(self, node: str) -> tuple[str, ...]:
        """Workers on a node of which nobody knows that they are gone, members or not."""
        return tuple(worker for worker in self.on(node) if worker not in self.lost)

    def on(self, node: str) -> tuple[str, ...]:
        """Workers on a node whose process may be there, also those that are lost."""
        return tuple(worker for worker in self.pids if node_of(worker) == node and worker not in self.ended)

    def living(self, slot: int) -> str | None:
        """The process in a place just now; None between two."""
        there = [worker for worker in self.pids if slot_of(worker) == slot and worker not in self.ended]
        return there[-1] if there else None
