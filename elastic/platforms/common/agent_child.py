"""An agent as a child of this process, until its job is over, has left the node, or this process is asked to end.

What the workers print on rank 0 is printed here.
"""

from __future__ import annotations

import math
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from types import MappingProxyType
from typing import Any

from elastic.errors import ConfigError, ElasticError
from elastic.fleet.client import FleetClient
from elastic.preemption import relay
from elastic.process import children, stop_signals
from elastic.records.files import TOKEN
from elastic.records.job_follower import Growing
from elastic.security.channels import ChannelFactory
from elastic.security.keyring import of_role
from elastic.security.roles import Role

POLL_S = 0.2
ASK_S = 1.0
"""How often the fleet is asked whether the job is over."""

SELDOM_S = 5.0
"""How often while the job is on this node: a thousand nodes ask one leader."""

LEAVING_S = 20.0
"""How long a fleet that does not come again may be silent while this node has to go: nobody else will end it."""

STOP_S = 20.0
"""From asking an agent whose job is over to end until it is killed."""

Look = Callable[[Mapping[str, Any]], bool]
"""Told once a second the newest entry of the job that the fleet has answered, {} before that. Returns whether there is
an end when the job has left the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPlace:
    """replicas: "host:port" of each. certs: of the node, those of an agent and of a viewer. node: its name. job: the
    full name of the job. grace_s: how long workers may take to leave when this process is asked to end. words: further
    ones for `elastic agent`. patience_s: how long a fleet may be silent, which then is gone; None: it comes again."""

    replicas: tuple[str, ...]
    certs: Path
    node: str
    job: str
    jobs_dir: Path
    grace_s: float
    words: Sequence[str]
    patience_s: float | None = None

    @property
    def job_dir(self) -> Path:
        return self.jobs_dir / self.job


class Ending(Enum):
    """Why there is an end."""

    OVER = auto()
    """The job is over."""
    LEFT = auto()
    """The node has to go, and the job has left it."""
    ASKED = auto()
    """This process was asked to end."""
    DIED = auto()
    """The agent has ended by itself."""


class AgentChild:
    """environment: variables besides those of this process. log: of the agent; None: that of this process."""

    def __init__(
        self, place: AgentPlace, environment: Mapping[str, str] = MappingProxyType({}), log: Path | None = None
    ) -> None:
        self._place, self._environment, self._log = place, environment, log
        self._output = Growing(place.job_dir / "logs" / "stdout.log", from_end=True)
        channels = ChannelFactory(of_role(place.certs, Role.VIEWER))
        self._client = FleetClient(place.replicas, wait_s=0.0, channels=channels)
        self._asked = 0
        self.entry: dict[str, Any] = {}
        """The entry of the job in the newest answer of the fleet; {} before the first answer."""
        self.status: int | None = None
        """How the agent has ended: its exit code, or minus the signal."""

    def obey(self) -> None:
        """Take SIGTERM and SIGINT for being asked to end; a second one leaves the workers no time. Main thread only."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_stop)

    def _on_stop(self, number: int, frame: object) -> None:
        self._asked += 1

    def serve(self, look: Look) -> Ending:
        """Start it, and return when it has ended. From the thread with which it is to die. Raises ConfigError if the
        fleet refuses to answer, ElasticError if it is gone: not if it may come again."""
        place = self._place
        where = ("--rendezvous", ",".join(place.replicas), "--certs", str(place.certs), "--node", place.node)
        words = (*where, "--jobs-dir", str(place.jobs_dir), "--grace", str(place.grace_s), *place.words)
        command = children.dying_with_this(*children.python("elastic.cli", "agent", *words))
        environment = {**stop_signals.environment(children.own_environment()), **self._environment}
        agent = children.start(command, self._log, env=environment)
        try:
            ending = self._attend(agent, look)
            self._end(agent, place.grace_s if ending is Ending.ASKED else STOP_S)
        finally:
            agent.kill()
            self.status = agent.wait()
        self._follow()
        return ending

    def _attend(self, agent: subprocess.Popen[bytes], look: Look) -> Ending:
        heard_s, asked_s, looks_s, leaves_s = time.monotonic(), -math.inf, 0.0, math.inf
        patience_s = self._place.patience_s
        while agent.poll() is None:
            self._follow()
            now_s, over = time.monotonic(), self.entry.get("state") == "ended"
            is_here = (self._place.job_dir / TOKEN).exists()
            if self._asked:
                return Ending.ASKED
            if over and not is_here:
                return Ending.OVER
            if leaves_s < math.inf and relay.node_is_left(self._place.job_dir):
                return Ending.LEFT
            if now_s >= looks_s and not over:
                if now_s >= asked_s + (SELDOM_S if is_here else ASK_S):
                    asked_s = now_s
                    if self._ask():
                        heard_s = now_s
                    elif patience_s is not None and now_s > min(
                        heard_s + patience_s, max(heard_s, leaves_s) + LEAVING_S
                    ):
                        self._end(agent, self._place.grace_s if leaves_s < math.inf else STOP_S)
                        raise ElasticError(f"the rendezvous at {','.join(self._place.replicas)} is gone")
                leaves_s = min(leaves_s, now_s) if look(self.entry) else math.inf
                looks_s = time.monotonic() + ASK_S
            time.sleep(POLL_S)  # files and other processes: there is nothing to wait on
        return Ending.DIED

    def _ask(self) -> bool:
        """Whether the fleet has answered. Training does not need it."""
        try:
            self.entry = self._client.job(self._place.job)
        except ElasticError as error:
            if isinstance(error, ConfigError) and self._place.patience_s is not None:
                raise
            return False
        return True

    def _end(self, agent: subprocess.Popen[bytes], within_s: float) -> None:
        """Let the workers leave between two steps."""
        if agent.poll() is None:
            children.ask(agent)
        deadline_s = time.monotonic() + within_s
        while agent.poll() is None and self._asked < 2 and time.monotonic() < deadline_s:
            self._follow()
            time.sleep(POLL_S)

    def _follow(self) -> None:
        for line in self._output.all_lines():
            print(line.decode(errors="replace"), flush=True)
