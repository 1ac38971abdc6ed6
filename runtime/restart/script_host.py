"""The process between a worker and its scripts.

A worker has threads, so it must not fork. Before it starts them it forks this process, which has the same modules
imported and no thread: each script is a fork of it, which costs milliseconds. The kernel ends the host with its worker
and a script with the host. A worker that stands still cannot end its script when others take its place, so the host
does: it ends the script when it has not heard of the worker for a while.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from elastic import stop_signals
from elastic.agent.worker.environment import AGENT_SOCKET

MESSAGE_BYTES = 2**16


class ScriptHost:
    """The worker's side. Used by the worker's main thread, `heard` by any."""

    def __init__(self, run: Callable[[], None], silence_s: float) -> None:
        """Forks the host; the caller has no thread yet. run: the script, in a process of its own. silence_s: a script
        is ended when `heard` was not called for so long."""
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        me = os.getpid()
        if os.fork() == 0:
            self._channel.close()
            _serve(theirs, run, silence_s, me)
        theirs.close()

    def start(self, settings: dict[str, str]) -> None:
        """Start the script. settings: environment variables besides those of the worker."""
        self._channel.send(json.dumps({"start": settings}).encode())

    def stop(self, grace_s: float) -> None:
        """Send the script SIGTERM, and SIGKILL to its processes if it has not ended grace_s later. Blocks until it has
        ended; returns at once if it does not run."""
        self._channel.send(json.dumps({"stop": grace_s}).encode())
        while "stopped" not in self._receive():
            pass

    def heard(self) -> None:
        """The worker is alive."""
        self._channel.send(b"{}")

    def ended(self, within_s: float) -> int | None:
        """The script's exit status, or minus the signal that ended it; None if it has not ended within that time."""
        readable, _, _ = select.select([self._channel], [], [], within_s)
        return self._receive().get("ended") if readable else None

    def _receive(self) -> dict[str, int]:
        message = self._channel.recv(MESSAGE_BYTES)
        if not message:
            raise RuntimeError("the process that starts the script was killed")
        found: dict[str, int] = json.loads(message)
        return found


def _serve(worker: socket.socket, run: Callable[[], None], silence_s: float, parent: int) -> NoReturn:
    stop_signals.die_with(parent)
    for number in (*stop_signals.HELD, *stop_signals.ORDERS.values()):
        signal.signal(number, signal.SIG_IGN)  # they come to the whole process group of the worker, which acts on them
    child, watched, heard_s = 0, -1, time.monotonic()
    while True:
        waiting: list[socket.socket | int] = [worker] if watched < 0 else [worker, watched]
        readable, _, _ = select.select(waiting, [], [], silence_s / 4)
        if worker in readable:
            message = worker.recv(MESSAGE_BYTES)
            if not message:
                os._exit(0)
            order = json.loads(message)
            heard_s = time.monotonic()
            if "start" in order:
                child = _fork(worker, run, order["start"])
                watched = os.pidfd_open(child)
            elif "stop" in order:
                if watched >= 0:
                    _end(child, watched, order["stop"])
                    os.waitpid(child, 0)
                    os.close(watched)
                    watched = -1
                worker.send(b'{"stopped": 1}')
        elif watched in readable:
            _kill_group(child, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            os.close(watched)
            watched = -1
            worker.send(json.dumps({"ended": status}).encode())
        elif watched >= 0 and time.monotonic() - heard_s > silence_s:
            print("elastic: a script was ended, as its worker stands still", file=sys.stderr, flush=True)
            _end(child, watched, 0.0)
            heard_s = time.monotonic()


def _fork(worker: socket.socket, run: Callable[[], None], settings: dict[str, str]) -> int:
    host = os.getpid()
    child = os.fork()
    if child:
        return child
    stop_signals.die_with(host)
    worker.close()
    os.setpgid(0, 0)
    for number in (*stop_signals.HELD, *stop_signals.ORDERS.values()):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.environ.update(settings)
    os.environ.pop(AGENT_SOCKET)  # the script is no worker: elastic.join() in it is refused
    sys.modules["torch"].default_generator.seed()
    sys.modules["numpy"].random.seed()
    run()
    sys.exit(0)


def _end(child: int, watched: int, grace_s: float) -> None:
    if grace_s > 0:
        os.kill(child, signal.SIGTERM)
        select.select([watched], [], [], grace_s)
    _kill_group(child, signal.SIGKILL)
    select.select([watched], [], [])


def _kill_group(child: int, number: int) -> None:
    """The script's process and those that it has started and not moved to a group of their own."""
    try:
        os.killpg(child, number)
    except ProcessLookupError:
        return
