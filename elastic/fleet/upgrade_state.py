"""The state that a node's daemon hands to the program that takes its place, and the order of an upgrade: the agents of
all jobs first, each in its own process (elastic/agent/agent.py), then the daemon in this one.

So if an agent refuses a new program, the only effect is that the daemon is older than some of its agents.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from elastic.agent import handover
from elastic.agent.handover import UpgradeRequest, UpgradeRequestFiles
from elastic.fleet.documents import Submission
from elastic.records.temp_dirs import TempDirectory
from elastic.wire import codec

DAEMON_STATE_FORMAT = 1

ASK_S = 15.0
"""Seconds until an agent that has just been started can be asked."""

AGENT_S = 120.0
"""Seconds until the agent has answered: it waits for a moment of calm, and tries the new program once beside itself."""


class JobKeeper(Protocol):
    """The methods used of the process that looks after a job's agent."""

    pid: int

    @property
    def stdin(self) -> Any: ...
    def send_signal(self, number: int) -> None: ...
    def wait(self) -> int: ...


class Inherited:
    """A keeper that the program before this one has started; it has the methods of subprocess.Popen."""

    def __init__(self, pid: int, stdin: int) -> None:
        os.set_inheritable(stdin, False)
        self.pid = pid
        self.stdin = os.fdopen(stdin, "wb")

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Wait for the keeper. Returns its exit code, or minus the signal."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@dataclass(frozen=True, slots=True)
class JobUpgradeState:
    """The state of one job on this node. keeper: its pid and the descriptor of its standard input. memory: the
    directory of its memory and the descriptor that holds it. finishing: the job is over. token: admits its agent."""

    submission: Submission
    slots: int
    devices: tuple[str, ...] | None
    keeper: tuple[int, int] | None
    memory: tuple[str, int] | None
    finishing: bool
    token: str = field(repr=False)

    def process(self) -> Inherited | None:
        return Inherited(*self.keeper) if self.keeper is not None else None

    def scratch(self) -> TempDirectory | None:
        if self.memory is None:
            return None
        path, lock = self.memory
        os.set_inheritable(lock, False)
        return TempDirectory.held(Path(path), lock)

    def to_state(self) -> dict[str, Any]:
        own = {one.name: getattr(self, one.name) for one in fields(self)}
        return {**own, "submission": codec.to_json(self.submission).decode()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> JobUpgradeState:
        keeper, memory, devices = state["keeper"], state["memory"], state["devices"]
        return cls(
            codec.from_json(Submission, state["submission"].encode()),
            int(state["slots"]),
            tuple(devices) if devices is not None else None,
            (int(keeper[0]), int(keeper[1])) if keeper is not None else None,
            (str(memory[0]), int(memory[1])) if memory is not None else None,
            bool(state["finishing"]),
            str(state["token"]),
        )


@dataclass(frozen=True, slots=True)
class DaemonUpgradeState:
    """The state of a daemon. duties: the leader's last orders, as on the wire. over: job -> its result."""

    term: int
    duties: tuple[bytes, ...]
    over: Mapping[str, str]
    holdings: tuple[JobUpgradeState, ...]


def write(state: DaemonUpgradeState) -> dict[str, Any]:
    return {
        "format": DAEMON_STATE_FORMAT,
        "term": state.term,
        "duties": [duty.hex() for duty in state.duties],
        "over": dict(state.over),
        "holdings": [holding.to_state() for holding in state.holdings],
    }


def read(state: Mapping[str, Any]) -> DaemonUpgradeState:
    """Raises WireError, ConfigError, KeyError, TypeError and ValueError for a state that `write` has not made."""
    if state["format"] != DAEMON_STATE_FORMAT:
        raise ValueError(
            f"the daemon's state is of format {state['format']}, and this program reads {DAEMON_STATE_FORMAT}"
        )
    return DaemonUpgradeState(
        int(state["term"]),
        tuple(bytes.fromhex(duty) for duty in state["duties"]),
        {str(job): str(result) for job, result in state["over"].items()},
        tuple(JobUpgradeState.from_state(holding) for holding in state["holdings"]),
    )


def keeper_of(keeper: JobKeeper) -> tuple[int, int]:
    """A keeper for a JobUpgradeState: the next program inherits its standard input."""
    os.set_inheritable(keeper.stdin.fileno(), True)
    return keeper.pid, keeper.stdin.fileno()


async def replace_agent(place: UpgradeRequestFiles, request: UpgradeRequest, keeper: JobKeeper) -> str:
    """Have another program take the place of a job's agent. Returns why that was refused, or ""."""
    pidfd = os.pidfd_open(keeper.pid)
    try:
        return await _replace_agent(place, request, lambda: _has_ended(pidfd))
    finally:
        os.close(pidfd)


async def _replace_agent(place: UpgradeRequestFiles, request: UpgradeRequest, over: Callable[[], bool]) -> str:
    await handover.until(lambda: place.running() is not None or over(), ASK_S)
    running = place.running()
    if over():
        return ""  # the next program starts the job's next agent
    if running is None:
        return "its agent is just being started; try again"
    place.ask(running, request)
    await handover.until(lambda: place.answer(request) is not None or over(), AGENT_S)
    answer = place.answer(request)
    if answer is None:
        return "" if over() else f"its agent, process {running.pid}, does not answer; see logs/agent.log of the job"
    return str(answer["refused"])


def _has_ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 0)[0])
