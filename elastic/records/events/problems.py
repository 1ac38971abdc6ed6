"""What does not work now although training goes on, by a job's journals: for `elastic status` and `elastic run`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from elastic.records.job_directory import read_settings
from elastic.records.journal import Line, read_all

EVENTS = (
    *("snapshots_off", "snapshot_complete", "snapshot_failed", "snapshot_skipped"),
    *("state_not_held", "newcomer_in_vain", "newcomer_unreachable", "joined"),
)
"""All events that matter here; most journal lines are others."""

SKIPS = 3
"""A problem exists when this many snapshots in a row were left out because the last one was still being written."""

UNREACHED = 3
"""A problem exists when this many rings in a row could not be built with a slot's newcomers."""

WITHOUT = "if all workers die at once, the job goes on from a checkpoint; give it memory, or say --snapshot-every off"


@dataclass(frozen=True, slots=True)
class Problem:
    """because: the problem, as a sentence. advice: what to do about it."""

    about: str
    """"snapshots" or "newcomers"."""
    where: str
    """The node or the slot."""
    because: str
    advice: str

    def __str__(self) -> str:
        return f"{self.because}; {self.advice}"


@dataclass(slots=True)
class _Memory:
    """What the memory of one node holds. newest: the step of its newest whole snapshot; -1: there has been none."""

    off: str = ""
    newest: int = -1
    failed: dict[str, str] = field(default_factory=dict)
    """Entry -> why it could not be made, since the newest whole one."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Worker -> how many snapshots it has left out since the newest whole one."""


class Problems:
    """Follows the lines of a job's journals; those of each node must come in the order of time."""

    def __init__(self, lines: Iterable[Line] = ()) -> None:
        self._memories: dict[str, _Memory] = defaultdict(_Memory)
        self._newcomers: dict[str, Problem] = {}
        """Node or slot -> what keeps replacements out."""
        for line in lines:
            self.see(line)

    def see(self, line: Line) -> Problem | None:
        """Take the next line. Returns the problem that begins with it, or None."""
        before = self._newcomers
        self._newcomers = _kept_out(before, line)
        began = [trouble for where, trouble in self._newcomers.items() if where not in before]
        return began[0] if began else self._see_memory(line)

    def _see_memory(self, line: Line) -> Problem | None:
        node = str(line.get("node", ""))
        memory = self._memories[node]
        before = _trouble(node, memory)
        match line:
            case {"event": "snapshots_off", "because": str(because)}:
                memory.off = because
            case {"event": "snapshot_complete", "step": int(step)}:
                memory.newest, memory.failed, memory.skipped = step, {}, {}
            case {"event": "snapshot_failed", "entry": str(entry), "because": str(because)}:
                memory.failed[entry] = because
            case {"event": "snapshot_skipped", "who": str(who)}:
                memory.skipped[who] = memory.skipped.get(who, 0) + 1
        return _trouble(node, memory) if before is None else None

    @property
    def now(self) -> list[Problem]:
        found = (_trouble(node, memory) for node, memory in sorted(self._memories.items()))
        return [trouble for trouble in found if trouble is not None] + list(self._newcomers.values())


def of_job(job_dir: Path) -> list[Problem]:
    """The problems of the job in this directory, by the journals of processes on this machine."""
    return Problems(read_all(job_dir, EVENTS)).now + of_settings(job_dir)


def of_settings(job_dir: Path) -> list[Problem]:
    """The problems with which the job in this directory was started."""
    settings = read_settings(job_dir)
    if settings.snapshot_every == "off" or settings.memory:
        return []
    because = "the state is not kept in memory: /dev/shm could not be used when the job was started"
    return [Problem("snapshots", "", because, WITHOUT)]


def _trouble(node: str, memory: _Memory) -> Problem | None:
    newest = f"its newest copy there is of step {memory.newest}" if memory.newest >= 0 else "there is no copy there"
    if memory.off:
        return Problem(
            "snapshots",
            node,
            f"the state is not kept in the memory of node {node}, and the job goes on without: {memory.off}",
            WITHOUT,
        )
    if memory.failed:
        count, because = len(memory.failed), list(memory.failed.values())[-1]
        failed = "a copy of the state" if count == 1 else f"{count} copies of the state in a row"
        return Problem(
            "snapshots",
            node,
            f"{failed} could not be put into the memory of node {node}: {because}; {newest}",
            "it is tried again; see what fills /dev/shm and the memory, or give --snapshot-every off",
        )
    if (most := max(memory.skipped.values(), default=0)) >= SKIPS:
        return Problem(
            "snapshots",
            node,
            f"{most} copies of the state in a row were left out of the memory of node {node}, because the one before "
            f"was still being written; {newest}",
            "take them less often with --snapshot-every, or as often as they cost little with auto",
        )
    return None


def _kept_out(known: dict[str, Problem], line: Line) -> dict[str, Problem]:
    """What keeps replacements out after this line. A newcomer that joins proves that its problem is over."""
    match line:
        case {"event": "state_not_held", "node": str(node), "because": str(because)}:
            waits = f"a replacement waits to copy the state, and training goes on without it: {because}"
            return {**known, node: Problem("newcomers", node, waits, "give the workers there more memory")}
        case {"event": "newcomer_in_vain", "worker_id": str(worker), "slot": str(slot), "seconds": float(waited_s)}:
            waits = f"training waited {waited_s:.0f} s for {worker} to copy the state, and goes on without it"
            advice = "its network is too slow for that, or --pause-limit too short, of which half is waited"
            return {**known, slot: Problem("newcomers", slot, waits, advice)}
        case {"event": "newcomer_unreachable", "worker_id": str(worker), "times": int(times)} if times >= UNREACHED:
            slot = worker.rpartition(".")[0]
            waits = f"{worker} could not be connected to the members {times} times in a row"
            advice = "it is tried again, each time later; see whether the network and the GPU of its node are in order"
            return {**known, slot: Problem("newcomers", slot, waits, advice)}
        case {"event": "joined", "worker_id": str(worker)}:
            over = {worker.rpartition(".")[0]}
            return {where: trouble for where, trouble in known.items() if "." in where and where not in over}
    return known
