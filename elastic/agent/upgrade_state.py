"""What an agent hands over to the program that takes its place: slots, workers, and what leaders have to hear."""

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

DEAD_OF_A_SLOT = 64
"""A new agent says that so many of the newest workers of each slot are gone. Older workers are in no generation any
more."""


@dataclass(frozen=True, slots=True)
class AgentUpgradeState:
    """What is handed over. orders: worker that has yet to connect again -> its orders. frozen: workers that were found
    frozen. term: the term of the newest leader seen. socket: the path to which workers connect, or ""."""

    slots: tuple[Slot, ...]
    workers: tuple[AdoptedWorker, ...]
    orders: Mapping[str, Sequence[str]]
    standing: StandingWords
    frozen: frozenset[str]
    term: int
    socket: str = ""


def first(spec: JobSpec, node: str, slots: int, slot_file: SlotFile, snapshot: str) -> AgentUpgradeState:
    """The state of an agent that nobody hands anything to, after the workers that a killed agent left were ended.
    snapshot: the newest one in this machine's memory, or "". Raises ConfigError."""
    slot_file.end_leftovers()
    before, standing = slot_file.incarnations, StandingWords()
    for age in reversed(range(DEAD_OF_A_SLOT)):  # the newest ones of all slots come last: only so many are kept
        for slot, newest in before.items():
            if age <= newest:
                standing.heard(WorkerDead(f"{node}.{slot}.{newest - age}", "its agent ended", snapshot))
    new = (worker_slot.Slot(node, n, spec, before.get(n, -1) + 1) for n in range(slots))
    return AgentUpgradeState(tuple(new), (), {}, standing, frozenset(), 0)


def write(state: AgentUpgradeState) -> dict[str, Any]:
    """The state as JSON."""
    return {
        "format": AGENT_STATE_FORMAT,
        "slots": [json.loads(codec.to_json(slot)) for slot in state.slots],
        "workers": [asdict(worker) for worker in state.workers],
        "orders": {worker_id: list(kept) for worker_id, kept in state.orders.items()},
        "standing": state.standing.to_state(),
        "frozen": sorted(state.frozen),
        "term": state.term,
        "socket": state.socket,
    }


def read(state: Mapping[str, Any]) -> AgentUpgradeState:
    """Read what `write` has made. Else raises WireError, ConfigError, KeyError, TypeError and ValueError."""
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
