"""What a pod does: an agent as its child, until the job is over, the node has to go, or the pod is ended.

The pod ends with the job's exit code, so that its Job is complete when the job is. Where it ends because it has left,
it ends with another one, by which its Job starts another pod.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic.errors import ConfigError, ElasticError, ExitCode
from elastic.fleet.client import FleetClient
from elastic.platforms.k8s.agent_pods import JOB_STOPPED
from elastic.platforms.k8s.entrance import JOB_FILE
from elastic.platforms.k8s.trainer_status import TrainerStatus
from elastic.preemption import relay
from elastic.process import children, stop_signals
from elastic.records.files import TOKEN
from elastic.records.job_directory import read_json
from elastic.records.job_follower import Growing
from elastic.security.channels import ChannelFactory
from elastic.security.keyring import of_role
from elastic.security.roles import Role

POLL_S = 0.2
ASK_S = 2.0
"""How often the fleet is asked whether the job is over."""

STOP_S = 20.0
"""From asking an agent whose job is over to end until it is killed."""

AGENT_DIED = 70
"""Exit code of a pod whose agent has ended by itself: its Job counts it as a failure, and starts another pod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPodOptions:
    """replicas: "host:port" of each. own: what `elastic k8s enter` has left. node: the name of the pod. words: further
    ones for `elastic agent`. grace_s: from SIGTERM until the pod is killed."""

    replicas: tuple[str, ...]
    own: Path
    node: str
    jobs_dir: Path
    grace_s: float
    words: Sequence[str]


def serve(options: AgentPodOptions) -> int:
    """Returns the exit code of the pod. Main thread only. Raises ConfigError."""
    try:
        job = (options.own / JOB_FILE).read_text()
    except OSError as error:
        raise ConfigError(f"{options.own / JOB_FILE}: {error.strerror}; `elastic k8s enter` writes it") from error
    return _AgentPod(options, job).serve()


def exit_code(ended: Mapping[str, Any]) -> int:
    """With which a pod ends when its job has. ended: the fleet's entry of the job."""
    return JOB_STOPPED if ended["stopped"] else int(ended["exit_code"])


def speaker(entry: Mapping[str, Any], before: str) -> str:
    """Which node tells of the progress: the first of those that train. While none trains, and when the job has ended,
    it is the one of before: others may have left long ago, and their ledgers end there."""
    return min(entry.get("slots", {}), default=before)


class _AgentPod:
    def __init__(self, options: AgentPodOptions, job: str) -> None:
        self._options = options
        self._job = job
        self._job_dir = options.jobs_dir / job
        self._output = Growing(self._job_dir / "logs" / "stdout.log", from_end=False)
        self._client = FleetClient(
            options.replicas, wait_s=0.0, channels=ChannelFactory(of_role(options.own, Role.VIEWER))
        )
        self._entry: dict[str, Any] = {}
        self._speaker = options.node
        self._asked = False

    def serve(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_stop)
        agent = self._start()
        progress = TrainerStatus(os.environ, self._job_dir, self._speaks)
        try:
            code = self._attend(agent)
            self._end(agent)
        finally:
            agent.kill()
            agent.wait()
        self._follow()
        progress.close()
        return code

    def _on_stop(self, number: int, frame: object) -> None:
        self._asked = True

    def _speaks(self) -> bool:
        """Whether this node tells of the progress."""
        return self._options.node == self._speaker

    def _start(self) -> subprocess.Popen[bytes]:
        options = self._options
        command = children.dying_with_this(
            *(sys.executable, "-P", "-m", "elastic.cli", "agent", "--rendezvous", ",".join(options.replicas)),
            *("--certs", str(options.own), "--node", options.node, "--jobs-dir", str(options.jobs_dir)),
            *("--grace", str(options.grace_s), *options.words),
        )
        environment = stop_signals.environment(children.own_environment())
        with stop_signals.blocked():
            return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, process_group=0)

    def _attend(self, agent: subprocess.Popen[bytes]) -> int:
        asks_s = 0.0
        while True:
            if (status := agent.poll()) is not None:
                print(f"elastic: the agent has ended with {status}", file=sys.stderr, flush=True)
                return AGENT_DIED
            self._follow()
            if self._asked:
                return ExitCode.TERMINATED
            if self._entry.get("state") == "ended" and not (self._job_dir / TOKEN).exists():
                return exit_code(self._entry)
            if self._has_left():
                print("elastic: the node has to go, and the workers have left it", file=sys.stderr, flush=True)
                return ExitCode.DRAINED
            if time.monotonic() >= asks_s and self._entry.get("state") != "ended":
                with contextlib.suppress(ElasticError):  # nobody leads just now: training does not need it
                    self._entry = self._client.job(self._job)
                    self._speaker = speaker(self._entry, self._speaker)
                asks_s = time.monotonic() + ASK_S
            time.sleep(POLL_S)  # files and other processes: there is nothing to wait on

    def _has_left(self) -> bool:
        told = read_json(self._job_dir / relay.NOTICES)
        if told is None or not any(notice["ends_s"] is not None for notice in told["notices"]):
            return False
        return relay.has_left(self._job_dir, told["round"])

    def _end(self, agent: subprocess.Popen[bytes]) -> None:
        """Let the workers leave between two steps, within the grace."""
        if agent.poll() is not None:
            return
        agent.send_signal(stop_signals.order_to(agent.pid, signal.SIGTERM))
        deadline_s = time.monotonic() + (self._options.grace_s if self._asked else STOP_S)
        while agent.poll() is None and time.monotonic() < deadline_s:
            self._follow()
            time.sleep(POLL_S)

    def _follow(self) -> None:
        for line in self._output.all_lines():
            print(line.decode(errors="replace"), flush=True)
