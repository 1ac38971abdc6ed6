"""What an agent hands to the program that takes its place: its slots, its workers, and what leaders have to hear."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from elastic.agent.process.worker_processes import AdoptedWorker
from elastic.agent.slot_file import SlotFile
from elastic.agent.standing_words import StandingWords
from elastic.config import JobSpec
from elastic.protocol import worker_slot
from elastic.protocol.messages import WorkerDead
from elastic.protocol.worker_slot import Slot
from elastic.wire import codec

AGENT_STATE_FORMAT = 1


@dataclass(frozen=True, slots=True)
class AgentUpgradeState:
    """orders: for workers that come back with another stream. frozen: workers that were found so. term: of the newest
    leader seen. socket: the path to which the workers connect, "" before there are any."""

    slots: tuple[Slot, ...]
    workers: tuple[AdoptedWorker, ...]
    orders: Mapping[str, Sequence[str]]
    standing: StandingWords
    frozen: frozenset[str]
    term: int
    socket: str = ""


def first(spec: JobSpec, node: str, slots: int, slot_file: SlotFile, snapshot: str) -> AgentUpgradeState:
    """The state of an agent that finds nothing but what a killed agent may have left. snapshot: in this machine's
    memory, or "". Raises ConfigError."""
    slot_file.end_leftovers()
    before, standing = slot_file.incarnations, StandingWords()
    for slot, newest in before.items():
        for incarnation in range(max(0, newest - 63), newest + 1):
            standing.heard(WorkerDead(f"{node}.{slot}.{incarnation}", "its agent ended", snapshot))
    new = (worker_slot.new(node, n, spec, before.get(n, -1) + 1) for n in range(slots))
    return AgentUpgradeState(tuple(new), (), {}, standing, frozenset(), 0)


def write(heirloom: AgentUpgradeState) -> dict[str, Any]:
    """As JSON."""
    return {
        "format": AGENT_STATE_FORMAT,
        "slots": [json.loads(codec.to_json(slot)) for slot in heirloom.slots],
        "workers": [asdict(worker) for worker in heirloom.workers],
        "orders": {worker_id: list(kept) for worker_id, kept in heirloom.orders.items()},
        "standing": heirloom.standing.to_state(),
        "frozen": sorted(heirloom.frozen),
        "term": heirloom.term,
        "socket": heirloom.socket,
    }


def read(state: Mapping[str, Any]) -> AgentUpgradeState:
    """Raises WireError, ConfigError, KeyError, TypeError and ValueError for what `write` has not made."""
    if state["format"] != AGENT_STATE_FORMAT:
        raise ValueError(
            f"the agent's state is of format {state['format']}, and this program reads {AGENT_STATE_FORMAT}"
        )
    return AgentUpgradeState(
        tuple(codec.from_json(Slot, json.dumps(slot).encode()) for slot in state["slots"]),
        tuple(AdoptedWorker(**worker) for worker in state["workers"]),
        {str(worker_id): tuple(kept) for worker_id, kept in state["orders"].items()},
        StandingWords.from_state(state["standing"]),
        frozenset(state["frozen"]),
        int(state["term"]),
        str(state["socket"]),
    )
