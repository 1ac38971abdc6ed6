"""The agent's side of the fork server, a child process that has imported torch and is forked for each worker.

    agent    --channel: settings of a worker, and descriptors: control socket, stdout, log-->  fork server
    worker   --control: its pid-->  agent         it is the agent's child, not the fork server's (clone_parent.py)
    agent    --control: one byte, "run"-->  worker

The fork server sends events for the journal: `fork_server_without` for a module that cannot be imported beforehand, and
then either `fork_server_ready`, or `fork_server_unusable` with the reason. All else is between worker and agent: if
the control socket is closed without a pid, there is no worker; if the agent closes it, the worker ends.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Callable, Mapping
from typing import TypeAlias

from elastic.agent.process.process_start import ForkServerProcess, Outlets
from elastic.agent.process.worker_process import WorkerProcess
from elastic.protocol.worker_slot import describe
from elastic.records.journal import Journal

FORK_S = 2.0
"""Seconds for a fork, which takes milliseconds. A fork server that has not forked by then is frozen, and is killed."""

Forked: TypeAlias = Callable[[int, socket.socket | None], None]


class ForkServer:
    """A fork server, used on the event loop. on_change: called when it becomes ready, and when it becomes useless."""

    def __init__(self, process: ForkServerProcess, journal: Journal, on_change: Callable[[], None]) -> None:
        self.ready = False
        self.because = ""
        """Why the fork server is of no use; "": it is of use."""
        self.from_outside = False
        """Whether its end was not caused by the script or this machine: another fork server may work."""
        self._journal = journal
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._channel = process.channel
        self._process = WorkerProcess(process.pid, process.outlets, lambda line: None, self._ended)
        self._loop.add_reader(self._channel, self._hear)

    @property
    def loading(self) -> bool:
        return not (self.ready or self.because)

    def fork(self, settings: Mapping[str, str], outlets: Outlets, done: Forked) -> None:
        """Fork a worker. done: called with its pid and its control socket, or with 0 and None; perhaps at once."""
        ours, theirs = socket.socketpair()
        try:
            socket.send_fds(self._channel, [json.dumps(settings).encode()], [theirs.fileno(), outlets.out, outlets.log])
        except OSError:  # the fork server has ended, or is frozen and takes nothing any more
            ours.close()
            return done(0, None)
        finally:
            theirs.close()
        patience = self._loop.call_later(FORK_S, self._process.signal, signal.SIGKILL)

        def answered() -> None:
            patience.cancel()
            self._loop.remove_reader(ours)
            if pid := ours.recv(32):
                return done(int(pid), ours)
            ours.close()
            done(0, None)

        self._loop.add_reader(ours, answered)

    def end(self) -> None:
        self.ready, self.because = False, self.because or "the agent is ending"
        self._process.signal(signal.SIGKILL)

    def _hear(self) -> bool:
        """Take one message; False when there is none at the moment."""
        try:
            message = self._channel.recv(65_536)
        except (BlockingIOError, ConnectionResetError):
            return False
        if not message:
            self._loop.remove_reader(self._channel)
            return False
        said = json.loads(message)
        match said.pop("event"):
            case "fork_server_unusable":
                self._give_up(said["because"])
            case "fork_server_without":
                self._journal.write("fork_server_without", pid=self._process.pid, **said)
            case "fork_server_ready":
                self._journal.write("fork_server_ready", pid=self._process.pid, **said)
                self.ready = True
                self._on_change()
        return True

    def _ended(self, status: int) -> None:
        while self._hear():  # the kernel may report its end before its last messages
            pass
        self._loop.remove_reader(self._channel)
        self._channel.close()
        if not self.because:
            self.from_outside = status < 0
            words = self._process.last_words() if status > 0 else ""
            self._give_up(f"the fork server {describe(status)}" + (f": {words}" if words else ""))

    def _give_up(self, because: str) -> None:
        self.ready, self.because = False, because
        self._journal.write(
            "fork_server_unusable", pid=self._process.pid, from_outside=self.from_outside, because=because
        )
        self._on_change()
