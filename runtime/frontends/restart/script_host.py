"""The process between a worker and its scripts.

A worker has threads, so it must not fork. Before it starts them it forks a process that has the same modules imported
and no thread, the parent of its hosts. A host is a fork of that one, for each process of the script that the worker
has, and each script is a fork of its host, which costs milliseconds. When the worker ends, its end of the channel is
closed, and the host ends the script and itself; the kernel ends a script with its host. A worker that stands still
cannot end its script when others take its place, so the host does: it ends the script when it has not heard of the
worker for a while.

SIGTERM, SIGINT and SIGHUP that somebody sends to all processes of a job have no effect on a script, as on a worker
(held_signals.py): the job's command gets them too, and the host asks the script by orders.

The kernel makes the host the parent of all orphans below it (PR_SET_CHILD_SUBREAPER). So whatever a script has started
ends with it, also what has left its session.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from elastic.agent.worker import held_signals, stack_dump
from elastic.agent.worker.environment import AGENT_SOCKET
from elastic.process import children, stop_signals
from runtime.frontends.restart.script_timers import TIMER_FILE, TimerServer

MESSAGE_BYTES = 2**16
PR_SET_CHILD_SUBREAPER = 36

EXPIRED_S = 3.0
"""Seconds from the signal of an expired timer until SIGKILL, for a script that does not end by the signal."""

FREES_MEMORY = (b"multiprocessing.resource_tracker", b"torch_shm_manager")
"""Programs that remove shared memory when all who use it have ended, and then end themselves."""
FREES_MEMORY_S = 1.0
"""Seconds that they have."""


class HostLost(Exception):
    """The process between this worker and its script was killed, and the script with it."""


@dataclass(frozen=True, slots=True)
class ScriptExit:
    """status: exit status, or minus the signal. at_s: when the script ended, in seconds since 1970. expired: the scope
    of the timer whose expiry has ended it, or ""."""

    status: int
    at_s: float
    expired: str = ""


class ScriptHosts:
    """The worker's hosts. Used by the worker's main thread, `heard` by any."""

    def __init__(self, run: Callable[[], None], silence_s: float) -> None:
        """Forks the parent of the hosts; the caller has no thread yet. run: the script, in a process of its own.
        silence_s: a script is ended when `heard` was not called for so long."""
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._hosts: tuple[ScriptHost, ...] = ()
        if os.fork() == 0:
            self._channel.close()
            _make_hosts(theirs, run, silence_s)
        theirs.close()

    def first(self, count: int) -> Sequence[ScriptHost]:
        """So many hosts, those of earlier calls first. Raises HostLost."""
        while len(self._hosts) < count:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                try:
                    socket.send_fds(self._channel, [b"{}"], [theirs.fileno()])
                except OSError as error:
                    raise HostLost from error
            self._hosts = (*self._hosts, ScriptHost(ours))
        return self._hosts[:count]

    def heard(self) -> None:
        """The worker is alive."""
        for host in self._hosts:
            host.heard()


def _make_hosts(worker: socket.socket, run: Callable[[], None], silence_s: float) -> NoReturn:
    """The parent of the hosts: forks one for each end of a channel that comes, until the worker ends."""
    os.setpgid(0, 0)
    for number in (*stop_signals.HELD, *stop_signals.ORDERS.values()):
        signal.signal(number, signal.SIG_IGN)
    while True:
        message, channels, _, _ = socket.recv_fds(worker, MESSAGE_BYTES, 1)
        if not message:
            os._exit(0)
        if not channels:  # so the worker finds its host lost
            print("elastic: a process for the script cannot be made: too many open files", file=sys.stderr, flush=True)
            continue
        os.set_inheritable(channels[0], False)
        channel = socket.socket(fileno=channels[0])
        try:
            made = os.fork()
        except OSError as error:  # its end is closed, so the worker finds its host lost
            print(f"elastic: a process for the script cannot be made: {error}", file=sys.stderr, flush=True)
        else:
            if made == 0:
                worker.close()
                _Host(channel, run, silence_s).serve()
        channel.close()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


class ScriptHost:
    """The worker's side of one host. Used by the worker's main thread, `heard` by any. All calls but `heard` raise
    HostLost."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def fileno(self) -> int:
        """For select: readable when the script has ended."""
        return self._channel.fileno()

    def start(self, settings: dict[str, str]) -> int:
        """Start the script. settings: environment variables besides those of the worker. Returns its pid. Raises
        OSError if the machine has no process for it."""
        self._send({"start": settings})
        answer = self._receive()
        if "refused" in answer:
            raise OSError(answer["refused"])
        return int(answer["started"])

    def stop(self, grace_s: float) -> None:
        """Send the script SIGTERM, and SIGKILL if it has not ended grace_s later."""
        self._send({"stop": grace_s})

    def stopped(self) -> int | None:
        """Behind `stop`: block until the script and all that it has started have ended. Returns its status, also if it
        had just ended by itself, or None at once if it does not run."""
        by_itself: int | None = None
        while "stopped" not in (answer := self._receive()):
            by_itself = answer["ended"]["status"] if "ended" in answer else by_itself
        status: int | None = answer["stopped"]
        return by_itself if status is None else status

    def heard(self) -> None:
        """The worker is alive."""
        try:
            # A host that is stopped reads nothing; the others have to hear all the same.
            self._channel.send(b"{}", socket.MSG_DONTWAIT)
        except OSError:
            return  # that, or the host was killed: the main thread finds it, and ends the worker

    def ended(self) -> ScriptExit:
        """Block until the script has ended."""
        return ScriptExit(**self._receive()["ended"])

    def _send(self, order: dict[str, Any]) -> None:
        try:
            self._channel.send(json.dumps(order).encode())
        except OSError as error:
            raise HostLost from error

    def _receive(self) -> dict[str, Any]:
        if not (message := _received(self._channel)):
            raise HostLost
        found: dict[str, Any] = json.loads(message)
        return found


def _received(channel: socket.socket) -> bytes:
    """The next message; b"" if the other process has ended."""
    try:
        return channel.recv(MESSAGE_BYTES)
    except ConnectionResetError:  # it has ended without reading all that was sent to it
        return b""


@dataclass(slots=True)
class _Script:
    """A running script. watched: its pidfd. kill_s: when it gets SIGKILL. stopping: the worker waits for its end."""

    pid: int
    watched: int
    timers: TimerServer | None
    kill_s: float = math.inf
    stopping: bool = False
    expired: str = ""

    def ask(self, number: signal.Signals) -> None:
        """Send a signal that the script holds back when anybody else sends it."""
        os.kill(self.pid, stop_signals.order_to(self.pid, number))

    def see_expiries(self) -> None:
        for expiry in self.timers.expired() if self.timers is not None else ():
            if expiry.pid == self.pid:
                self.expired = self.expired or expiry.scope
                if expiry.signal in stop_signals.ORDERS:
                    self.ask(signal.Signals(expiry.signal))
                self.kill_s = min(self.kill_s, time.monotonic() + EXPIRED_S)


class _Host:
    """The host's side: one thread, which waits for the worker, the script and its timers at once."""

    def __init__(self, worker: socket.socket, run: Callable[[], None], silence_s: float) -> None:
        self._worker = worker
        self._run = run
        self._silence_s = silence_s
        self._heard_s = self._turned_s = time.monotonic()
        self._script: _Script | None = None

    def serve(self) -> NoReturn:
        # What is sent to the worker's process group is for the worker, which ends the script in order.
        os.setpgid(0, 0)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
        for number in (*stop_signals.HELD, *stop_signals.ORDERS.values()):
            signal.signal(number, signal.SIG_IGN)
        try:
            while True:
                self._turn()
        except BrokenPipeError:  # the worker has ended before it could hear of its script
            self._leave()

    def _turn(self) -> None:
        script = self._script
        waiting: list[Any] = [self._worker]
        if script is not None:
            waiting.append(script.watched)
            if script.timers is not None:
                waiting.append(script.timers)
        kill_s = math.inf if script is None else script.kill_s
        wait_s = max(0.0, min(self._silence_s / 4, kill_s - time.monotonic()))
        readable, _, _ = select.select(waiting, [], [], wait_s)
        now_s = time.monotonic()
        if now_s - self._turned_s > self._silence_s / 2:  # this process has stood still, and the worker may have, too
            self._heard_s = now_s
        self._turned_s = now_s
        if self._worker in readable:
            if not (message := _received(self._worker)):
                self._leave()
            self._heard_s = time.monotonic()
            self._obey(json.loads(message))
        if script is not None and script.watched in readable:
            self._end(script)
        elif script is not None:
            self._look_after(script)

    def _obey(self, order: dict[str, Any]) -> None:
        if "start" in order:
            self._start(order["start"])
        elif "stop" in order and self._script is None:
            self._tell({"stopped": None})
        elif "stop" in order and self._script is not None:
            grace_s, self._script.stopping = order["stop"], True
            if grace_s > 0:
                self._script.ask(signal.SIGTERM)
            self._script.kill_s = min(self._script.kill_s, time.monotonic() + grace_s)

    def _tell(self, answer: dict[str, Any]) -> None:
        self._worker.send(json.dumps(answer).encode())

    def _start(self, settings: dict[str, str]) -> None:
        timers = None
        try:
            if TIMER_FILE in settings:
                timers = TimerServer(settings[TIMER_FILE], settings["TORCHELASTIC_RUN_ID"], self._worker.close)
            with stop_signals.blocked():  # until the script holds them back
                if (pid := os.fork()) == 0:
                    self._become_script(settings)
        except OSError as error:
            _end_left_behind()
            self._tell({"refused": f"the script cannot be started: {error}"})
            return
        self._script = _Script(pid, os.pidfd_open(pid), timers)
        self._tell({"started": pid})

    def _become_script(self, settings: dict[str, str]) -> NoReturn:
        children.die_with(os.getppid())
        self._worker.close()
        os.setpgid(0, 0)
        for number in (*stop_signals.HELD, *stop_signals.ORDERS.values()):
            signal.signal(number, signal.SIG_DFL)
        held_signals.hold()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.environ.update(settings)
        os.environ.pop(AGENT_SOCKET)  # the script is no worker: elastic.join() in it is refused
        sys.modules["torch"].default_generator.seed()
        sys.modules["numpy"].random.seed()
        stack_dump.show_when_asked()
        self._run()
        sys.exit(0)

    def _look_after(self, script: _Script) -> None:
        now_s = time.monotonic()
        if script.timers is not None:
            script.see_expiries()
            if script.timers.over:  # it ends with the process that it ends, which may be a child of the script
                script.timers = script.timers.again()
        if now_s >= script.kill_s:
            os.kill(script.pid, signal.SIGKILL)
            script.kill_s = math.inf
        elif now_s - self._heard_s > self._silence_s:
            print("elastic: a script was ended, as its worker stands still", file=sys.stderr, flush=True)
            os.kill(script.pid, signal.SIGKILL)
            self._heard_s = now_s
        for orphan in _children() - {script.pid}:
            os.waitpid(orphan, os.WNOHANG)

    def _end(self, script: _Script) -> None:
        self._script = None
        script.see_expiries()
        status = stop_signals.plain(os.waitstatus_to_exitcode(os.waitpid(script.pid, 0)[1]))
        at_s = time.time()  # it may take a second to end what the script has left behind
        os.close(script.watched)
        if script.timers is not None:
            script.timers.close()
        _end_left_behind()
        if script.stopping:
            self._tell({"stopped": status})
        else:
            self._tell({"ended": {"status": status, "at_s": at_s, "expired": script.expired}})

    def _leave(self) -> NoReturn:
        """The worker has ended: end the script, and this process."""
        _end_left_behind()
        os._exit(0)


def _children() -> set[int]:
    """The children of this process, which has one thread; also those that have ended and were not waited for."""
    me = os.getpid()
    return set(map(int, Path(f"/proc/{me}/task/{me}/children").read_text().split()))


def _end_left_behind() -> None:
    """End all processes below this one. The kernel gives it the children of each that it ends."""
    patient_until_s = time.monotonic() + FREES_MEMORY_S
    while children := _children():
        patient = time.monotonic() < patient_until_s
        spared = {pid for pid in children if patient and _frees_memory(pid)}
        for pid in children - spared:
            os.kill(pid, signal.SIGKILL)
        for pid in children - spared:
            os.waitpid(pid, 0)
        for pid in spared:
            os.waitpid(pid, os.WNOHANG)
        if spared == children:
            time.sleep(0.01)  # each has its own way to notice that nobody is left: there is nothing to wait on


def _frees_memory(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return any(program in command for program in FREES_MEMORY)
