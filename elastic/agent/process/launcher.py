"""How workers are started: forked by the fork server, or else cold, with an interpreter of their own.

The first workers wait for the fork server, so that torch is imported once instead of once per worker. Later workers do
not wait. A fork server that was killed from outside is started again, up to FORK_SERVERS in all.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic.agent.process.forkserver_client import ForkServer
from elastic.agent.process.process_start import (
    COLD,
    ForkServerProcess,
    Outlets,
    is_this_interpreter,
    job_environment,
    start_cold,
    start_fork_server,
)
from elastic.agent.process.worker_process import WorkerProcess
from elastic.agent.worker import import_scan
from elastic.config import JobSpec
from elastic.errors import ColdStart, ConfigError
from elastic.process import stop_signals
from elastic.records.journal import Journal

FORK_SERVERS = 4
"""The most fork servers in one agent's life."""

FIRST_S = 60.0
"""Seconds for which the first workers wait for the fork server; then something holds it up, and they start cold."""


@dataclass(frozen=True, slots=True)
class Start:
    """A worker to start. settings: its own environment variables. started: called with the process, and with why it was
    not forked; the worker runs only afterwards. failed: called instead, with the reason."""

    settings: Mapping[str, str]
    log: Path
    on_line: Callable[[bytes], None]
    on_exit: Callable[[int], None]
    started: Callable[[WorkerProcess, str], None]
    failed: Callable[[str], None]


class Launcher:
    """Used on the event loop only, by the main thread."""

    def __init__(
        self, spec: JobSpec, logs: Path, node: str, journal: Journal, fork_server: ForkServerProcess | None = None
    ) -> None:
        """fork_server: the job's, if it was started already."""
        self._spec = spec
        self._command = spec.command
        self._environment = job_environment(spec.environment)
        self._logs, self._node = logs, node
        self._journal = journal
        self._waiting: list[Start] = []
        self._fork_server: ForkServer | None = None
        self._made = 0
        self._may_wait = True
        self._cold = "" if spec.fork else "forking is off"
        if not self._cold:
            self._make_fork_server(fork_server)
            asyncio.get_running_loop().call_later(FIRST_S, self._wait_no_longer)

    def start(self, start: Start) -> None:
        fork_server = self._fork_server
        if fork_server is None:
            self._start_cold(start, self._cold)
        elif fork_server.loading and self._may_wait:
            self._waiting.append(start)
        elif fork_server.ready:
            self._fork(fork_server, start)
        else:
            self._start_cold(start, fork_server.because or "the fork server is not ready yet")

    def close(self) -> None:
        """Start no worker any more, and end the fork server."""
        self._waiting.clear()
        self._made = FORK_SERVERS
        if self._fork_server is not None:
            self._fork_server.end()

    def _cold_command(self) -> Sequence[str]:
        """The command of a cold worker. A command that script_runner cannot run is started as it is."""
        try:
            program = import_scan.program_of(self._command)
        except ColdStart:
            return self._command
        readable = program.is_module or (program.target.endswith(".py") and Path(program.target).is_file())
        return [self._command[0], "-c", COLD, *self._command] if readable and self._is_ours() else self._command

    @property
    def restarts(self) -> bool:
        """Whether a worker has its script in another process, which is started again in each generation."""
        return self._spec.restart

    def _is_ours(self) -> bool:
        return is_this_interpreter(shutil.which(self._command[0], path=self._environment.get("PATH")))

    def _make_fork_server(self, process: ForkServerProcess | None = None) -> None:
        try:
            process = process or start_fork_server(
                self._command, self._spec.environment, self._logs, self._node, restarts=self._spec.restart
            )
            self._made += 1
            self._fork_server = ForkServer(process, self._journal, self._changed)
        except (ColdStart, ConfigError, OSError) as error:
            self._fork_server, self._cold = None, str(error)
            self._journal.write("fork_server_unusable", from_outside=False, because=self._cold)

    def _changed(self) -> None:
        if self._fork_server is not None and self._fork_server.from_outside and self._made < FORK_SERVERS:
            self._make_fork_server()
        self._wait_no_longer()

    def _wait_no_longer(self) -> None:
        self._may_wait = False
        waiting, self._waiting = self._waiting, []
        for start in waiting:
            self.start(start)

    def _fork(self, fork_server: ForkServer, start: Start) -> None:
        try:
            outlets = Outlets(start.log)
        except OSError as error:
            return start.failed(str(error))

        def done(pid: int, control: socket.socket | None) -> None:
            if control is None:
                outlets.close()
                return self._start_cold(start, fork_server.because or "the fork server did not fork")
            with control:
                start.started(WorkerProcess(pid, outlets, start.on_line, start.on_exit), "")
                with contextlib.suppress(BrokenPipeError):  # the worker is dead already; its pidfd says so in a moment
                    control.send(b"!")

        fork_server.fork(stop_signals.environment(start.settings), outlets, done)

    def _start_cold(self, start: Start, because: str) -> None:
        try:
            outlets = Outlets(start.log)
        except OSError as error:
            return start.failed(str(error))
        try:
            command = self._cold_command()
            if command is self._command and (self._spec.ranks or self._spec.restart):
                raise ConfigError(
                    f"{command[0]} runs no script of Python in the agent's interpreter, as --ranks and --restart "
                    f"need it: write `{sys.executable} SCRIPT.py` or `... -m MODULE`; or, instead of --ranks, "
                    "`elastic.ddp.enable(ranks=N)` in the script"
                )
            environment = stop_signals.environment({**self._environment, **start.settings})
            pid = start_cold(command, environment, outlets, holds=command is not self._command)
        except (ConfigError, OSError) as error:
            outlets.close()
            return start.failed(str(error))
        start.started(WorkerProcess(pid, outlets, start.on_line, start.on_exit), because)
