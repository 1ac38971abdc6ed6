"""What a task of an engine does on its node: the agent as its child, until the job is over or has left the node."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic.agent.options import LEAVES_AFTER_LOSS
from elastic.agent.worker import function_file
from elastic.errors import ElasticError
from elastic.platforms.common.agent_child import AgentChild, AgentPlace, Ending
from elastic.preemption import relay
from elastic.preemption.notice import Notice, NoticeKind
from elastic.process import log_line
from elastic.records import temp_dirs
from elastic.records.files import write_atomically
from elastic.records.ledger_tail import StepsTail

DEFAULT = "auto"
PREFIX = "elastic-node-"
SILENCE_S = 660.0
"""A fleet that has not answered for so long is gone: its workers have stopped by then (orphan_limit_s)."""

LEFT_S = 1.0
"""How long a node that the job has left by itself may take to end."""

LOG_LINES = 5


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a task needs to be a node of the job. rendezvous: "host:port". certificates: file name -> content, of an
    agent and a viewer. function: as function_file has it; None: the job runs a script. leaves_after_loss: whether the
    job leaves the node when it has lost a worker there."""

    rendezvous: str
    job: str
    node: str
    slots: int
    grace_s: float
    certificates: Mapping[str, bytes] = field(repr=False)
    function: bytes | None = field(repr=False)
    leaves_after_loss: bool = False


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """What became of a task. over: the job has ended; otherwise it has left this node, which has to go. values: rank ->
    what the function has returned there, pickled. last: the newest line of the ledger here, or {}."""

    over: bool
    values: Mapping[int, bytes] = field(repr=False)
    last: Mapping[str, Any] = field(repr=False)


class AgentEnded(ElasticError):
    """Start the task again; the message has the end of the agent's log."""


def serve(ticket: Ticket, notice: Callable[[], Notice | None] | None = None) -> TaskOutcome:
    """Be a node of the job. notice: asked once a second why this node has to go; it says None while it stays. Without
    one the agent asks the cloud, where it is on a machine of one.

    What the workers print on rank 0 is printed here. Raises AgentEnded, and ElasticError if the fleet is gone.
    """
    own = temp_dirs.in_tmp(PREFIX)
    try:
        return _serve(ticket, own.path, notice)
    finally:
        own.remove()


def _serve(ticket: Ticket, directory: Path, notice: Callable[[], Notice | None] | None) -> TaskOutcome:
    certs, told, log = directory / "certs", directory / "notice", directory / "agent.log"
    function = directory / function_file.FUNCTION
    certs.mkdir(mode=0o700)
    for name, content in ticket.certificates.items():
        write_atomically(certs / name, content, 0o600)
    if ticket.function is not None:
        write_atomically(function, ticket.function, 0o600)

    def look(entry: Mapping[str, Any]) -> bool:
        if told.exists():
            return True
        found = notice() if notice is not None else None
        if found is None and ticket.leaves_after_loss and relay.left_after_loss(place.job_dir):
            found = Notice(NoticeKind.RECLAIM, LEFT_S, "it has lost a worker", "loss")
        if found is not None:
            words = {"seconds_left": found.seconds_left, "because": found.because, "source": found.source}
            write_atomically(told, json.dumps(words).encode())
        return found is not None

    place = AgentPlace(
        replicas=(ticket.rendezvous,),
        certs=certs,
        node=ticket.node,
        job=ticket.job,
        jobs_dir=directory / "jobs",
        grace_s=ticket.grace_s,
        words=("--slots", str(ticket.slots), "--notices", DEFAULT if notice is None else f"file:{told}"),
        patience_s=SILENCE_S,
    )
    paths = os.pathsep.join(path for path in sys.path if path)  # what the engine has brought
    environment = {
        "PYTHONPATH": paths,
        function_file.VARIABLE: str(function),
        LEAVES_AFTER_LOSS: "1" if ticket.leaves_after_loss else "",
    }
    ending = AgentChild(place, environment, log).serve(look)
    if ending is Ending.DIED:
        raise AgentEnded(f"the agent of node {ticket.node} has ended: {_tail(log)}")
    steps = StepsTail(place.job_dir / "steps.jsonl")
    steps.poll(time.monotonic())
    values = function_file.values(directory) if ticket.function is not None else {}
    return TaskOutcome(ending is Ending.OVER, values, steps.last)


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    return " | ".join(map(log_line.message, lines)) or "it logged nothing"
