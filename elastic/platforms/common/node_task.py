"""What a task of an engine does on its node: the agent as its child, until the job is over or has left the node."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic import file_modes
from elastic.agent.worker import function_file
from elastic.errors import ConfigError, ElasticError
from elastic.fleet.client import FleetClient
from elastic.preemption.notice import Notice
from elastic.process import children, log_line, stop_signals
from elastic.records import temp_dirs
from elastic.records.files import TOKEN, write_atomically
from elastic.records.job_follower import Growing
from elastic.records.ledger_tail import StepsTail
from elastic.security.channels import ChannelFactory
from elastic.security.keyring import of_role
from elastic.security.roles import Role

DEFAULT = "auto"
PREFIX = "elastic-node-"
POLL_S = 0.2
ASK_S = 1.0
"""How often the fleet is asked whether the job is over."""

SILENCE_S = 660.0
"""A fleet that has not answered for so long is gone: its workers have stopped by then (orphan_limit_s)."""

STOP_S = 20.0
"""From asking an agent whose job is over to end until it is killed."""

LOG_LINES = 5


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a task needs to be a node of the job. rendezvous: "host:port". certificates: file name -> content, of an
    agent and a viewer. function: as function_file has it; None: the job runs a script."""

    rendezvous: str
    job: str
    node: str
    slots: int
    grace_s: float
    certificates: Mapping[str, bytes] = field(repr=False)
    function: bytes | None = field(repr=False)


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
        return _Node(ticket, own.path).serve(notice)
    finally:
        own.remove()


class _Node:
    def __init__(self, ticket: Ticket, directory: Path) -> None:
        self._ticket = ticket
        self._certs = directory / "certs"
        self._certs.mkdir(mode=0o700)
        for name, content in ticket.certificates.items():
            write_atomically(self._certs / name, content, 0o600)
        self._function = directory / function_file.FUNCTION
        if ticket.function is not None:
            write_atomically(self._function, ticket.function, 0o600)
        self._jobs = directory / "jobs"
        self._job_dir = self._jobs / ticket.job
        self._notice = directory / "notice"
        self._log = directory / "agent.log"
        self._output = Growing(self._job_dir / "logs" / "stdout.log", from_end=False)
        self._steps = StepsTail(self._job_dir / "steps.jsonl")
        keyring = of_role(self._certs, Role.VIEWER)
        self._client = FleetClient([ticket.rendezvous], channels=ChannelFactory(keyring))

    def serve(self, notice: Callable[[], Notice | None] | None) -> TaskOutcome:
        agent = self._start(DEFAULT if notice is None else f"file:{self._notice}")
        try:
            over = self._attend(agent, notice)
            agent.send_signal(stop_signals.order_to(agent.pid, signal.SIGTERM))
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(STOP_S)
        finally:
            agent.kill()
            agent.wait()
        self._follow()
        directory = self._function.parent
        values = function_file.values(directory) if self._ticket.function is not None else {}
        return TaskOutcome(over, values, self._steps.last)

    def _start(self, notices: str) -> subprocess.Popen[bytes]:
        ticket = self._ticket
        command = children.dying_with_this(
            *(sys.executable, "-P", "-m", "elastic.cli", "agent"),
            *("--rendezvous", ticket.rendezvous, "--certs", str(self._certs), "--node", ticket.node),
            *("--slots", str(ticket.slots), "--jobs-dir", str(self._jobs), "--grace", str(ticket.grace_s)),
            *("--notices", notices),
        )
        environment = stop_signals.environment(children.own_environment())
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)  # what the engine has brought
        environment[function_file.VARIABLE] = str(self._function)
        with open(self._log, "ab", opener=file_modes.opener) as log, stop_signals.blocked():
            return subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
            )

    def _attend(self, agent: subprocess.Popen[bytes], notice: Callable[[], Notice | None] | None) -> bool:
        """Whether the job is over; otherwise it has left this node."""
        heard_s, asks_s, over, going = time.monotonic(), 0.0, False, False
        while True:
            if agent.poll() is not None:
                raise AgentEnded(f"the agent of node {self._ticket.node} has ended: {self._log_tail()}")
            self._follow()
            if over and not (self._job_dir / TOKEN).exists():
                return True
            if going and (self._job_dir / "left.json").exists():
                return False
            if time.monotonic() >= asks_s and not over:
                if notice is not None and not going and (found := notice()) is not None:
                    going = True
                    words = {"seconds_left": found.seconds_left, "because": found.because}
                    write_atomically(self._notice, json.dumps(words).encode())
                if (state := self._state()) is not None:
                    heard_s, over = time.monotonic(), state == "ended"
                elif time.monotonic() > heard_s + SILENCE_S:
                    raise ElasticError(f"the rendezvous at {self._ticket.rendezvous} is gone")
                asks_s = time.monotonic() + ASK_S
            time.sleep(POLL_S)  # files and other processes: there is nothing to wait on

    def _state(self) -> str | None:
        """The state of the job; None while the rendezvous does not answer."""
        try:
            return str(self._client.job(self._ticket.job)["state"])
        except ConfigError:
            raise
        except ElasticError:
            return None

    def _follow(self) -> None:
        self._steps.poll(time.monotonic())
        for line in self._output.all_lines():
            print(line.decode(errors="replace"), flush=True)

    def _log_tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return " | ".join(map(log_line.message, lines)) or "it logged nothing"
