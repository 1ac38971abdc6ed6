"""A job on hosts that -H, a hostfile or a discovery script lists, from its start to its end.

Each host is a node of the job: a program that is started here for a name of this machine, and by ssh for another host,
which has this program and the script in the same places. A host that is no longer listed is left between two steps; a
new one takes part as soon as its workers have copied the state.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import IO

from elastic.errors import ConfigError, ElasticError
from elastic.platforms.common.job_driver import GRACE_S, JobDriver, JobResult, NodeTask
from elastic.platforms.common.job_request import JobRequest
from elastic.platforms.common.node_task import TaskOutcome
from elastic.platforms.horovod import hosts as lists
from elastic.platforms.horovod.discovery import HostWatch
from elastic.platforms.horovod.host_task import outcome_of, to_line
from elastic.process import children
from elastic.rendezvous.endpoint import is_loopback

POLL_S = 0.2
ANYWHERE = "192.0.2.1"
"""No machine has this address (RFC 5737): the way to it is that to all machines outside of this network."""

SSH_OPTIONS = tuple(
    word
    for option in ("BatchMode=yes", "ConnectTimeout=30", "ServerAliveInterval=15", "ServerAliveCountMax=4")
    for word in ("-o", option)
)
"""Behind those of the caller: ssh takes the first value that it finds. A host whose power is gone says nothing: after a
minute of silence its ssh ends."""

END_S = 120.0
"""From the end of the job until what serves it is killed, and with it the values of a function."""


CANCEL_S = 20.0
"""How long the hosts of a job that is stopped may take to leave it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsLaunch:
    """What to run, and where. hosts: host -> slots, or the script that lists them. start_timeout_s: from the start of
    this call until the job trains. reset_limit: how often hosts may come, go or fail; None: as often as they like.
    cooldown_s: for how long a host is left that has lost a worker, as Blacklist has it; None: it stays."""

    request: JobRequest
    hosts: Mapping[str, int] | HostWatch
    start_timeout_s: float
    reset_limit: int | None = None
    cooldown_s: tuple[float, float] | None = None
    ssh: Sequence[str] = ("ssh",)


@dataclass(slots=True)
class _Host:
    """A host that is listed, or that is still being left. slots: of its newest process. listed: those in the list.
    said: what this process prints: a file, which never makes it wait for a reader, as a pipe does. closes: set when the
    input of this process is to end."""

    name: str
    task: NodeTask
    slots: int
    listed: int
    process: subprocess.Popen[bytes] | None = None
    leaves: bool = False
    said: IO[bytes] | None = None
    closes: threading.Event = field(default_factory=threading.Event)


class HostTasks:
    """The processes that are hosts of one job."""

    def __init__(self, driver: JobDriver, launch: HostsLaunch) -> None:
        self._driver, self._launch = driver, launch
        self._hosts: dict[str, _Host] = {}
        """Those that are listed."""
        self._left: list[_Host] = []
        """Those that are not any more, and whose process has not ended."""
        self._blacklist = lists.Blacklist(launch.cooldown_s)
        self._numbers = 0
        self._resets = 0
        """How often the list has changed since the first one, or a host has failed."""

    def step(self, listed: Mapping[str, int]) -> None:
        """Take in what has ended, begin and end hosts as the list says. Raises ElasticError if none can be started, all
        are left for ever, or the limit is exceeded."""
        for host in self._all():
            assert host.process is not None
            if host.process.poll() is not None:
                self._take_in(host)
        if self._blacklist.has_all(listed):
            raise ElasticError(f"each host has lost a worker, and is left for that: {', '.join(listed)}")
        usable = self._blacklist.usable(listed, time.monotonic())
        present = {name: host.slots for name, host in self._hosts.items() if listed.get(name) == host.listed}
        least, most = self._launch.request.world
        wanted = lists.limited(usable, most, present, least)
        difference = lists.changes({name: host.slots for name, host in self._hosts.items()}, wanted)
        if self._hosts and (difference.ends or difference.begins):
            self._reset(f"the list of hosts is {wanted} now")
        for name in difference.ends:
            host = self._hosts.pop(name)
            self._leave(host)
            self._left.append(host)
        for name in difference.begins:
            self._hosts[name] = _Host(name, NodeTask(self._numbers), wanted[name], listed[name])
            self._numbers += 1
        self._left = [host for host in self._left if host.process is not None]
        for host in self._hosts.values():
            if host.process is None and host.task.due_s <= time.monotonic():
                self._start(host)

    def finish(self) -> None:
        """The job is over: the processes end by themselves. Those that do not are killed."""
        deadline_s = time.monotonic() + END_S
        for host in self._all():
            assert host.process is not None
            children.wait_or_kill(host.process, max(0.0, deadline_s - time.monotonic()))
            self._outcome(host)  # no failure counts any more

    def cancel(self) -> None:
        """End the job and them. It is stopped first, as the last host of a job waits for another one to take its place;
        and an ssh that is killed ends nothing on its host."""
        with contextlib.suppress(ElasticError):  # it has ended, or nobody leads it
            self._driver.fleet.check()
            self._driver.fleet.client.stop(self._driver.job, "its launcher ends")
        for host in self._all():
            self._leave(host)
        deadline_s = time.monotonic() + CANCEL_S
        for host in self._all():
            assert host.process is not None and host.said is not None
            children.wait_or_kill(host.process, max(0.0, deadline_s - time.monotonic()))
            host.said.close()

    def _all(self) -> list[_Host]:
        return [host for host in [*self._hosts.values(), *self._left] if host.process is not None]

    def _start(self, host: _Host) -> None:
        """An OSError, such as a full disk or no room for a process, is a failed attempt: others follow."""
        name, task = host.name, host.task
        task.attempts += 1
        task.node = f"host-{task.number}-{task.attempts}"
        try:
            ticket = self._driver.fleet.ticket(self._driver.job, task.node, host.slots, GRACE_S, self._driver.function)
            ticket = replace(ticket, leaves_after_loss=self._launch.cooldown_s is not None)
            with contextlib.ExitStack() as unless_started:
                said = unless_started.enter_context(tempfile.TemporaryFile())  # `_outcome` closes it
                command = command_of(name, self._launch.ssh)
                process = children.start(command, obeys=False, stdin=subprocess.PIPE, stdout=said)
                unless_started.pop_all()
        except OSError as error:
            self._driver.ended(task, ElasticError(f"{name} cannot be started from here: {error}"))
            return
        host.said, host.process = said, process
        print(f"elastic: {name} with {host.slots} slots is {task.node}", file=sys.stderr, flush=True)
        host.closes = threading.Event()
        threading.Thread(target=_hand_over, args=(process, to_line(ticket), host.closes), daemon=True).start()

    def _reset(self, because: str) -> None:
        self._resets, limit = self._resets + 1, self._launch.reset_limit
        if limit is not None and self._resets > limit:
            raise ElasticError(f"the hosts have changed more often than --reset-limit {limit}: {because}")

    def _leave(self, host: _Host) -> None:
        host.leaves = True
        host.closes.set()

    def _outcome(self, host: _Host) -> TaskOutcome | ElasticError:
        """What the ended process of a host has said; the driver hears of it, too."""
        process, host.process = host.process, None
        assert process is not None and host.said is not None
        with host.said as file:
            file.seek(0)
            said = file.read().splitlines()
        host.closes.set()
        outcome: TaskOutcome | ElasticError = ElasticError(f"its process has ended with {process.returncode}")
        if process.returncode == 0:
            outcome = _told(said)
        self._driver.ended(host.task, outcome)
        return outcome

    def _take_in(self, host: _Host) -> None:
        outcome = self._outcome(host)
        if host.leaves or (isinstance(outcome, TaskOutcome) and outcome.over):
            return
        if self._launch.cooldown_s is None:
            self._reset(str(outcome))
            return
        wait_s = self._blacklist.lost(host.name, time.monotonic())
        how_long = "for good" if wait_s == math.inf else f"for {wait_s:g} s"
        print(f"elastic: {host.name} has lost a worker, and is left {how_long}", file=sys.stderr, flush=True)


def _told(said: Sequence[bytes]) -> TaskOutcome | ElasticError:
    """The outcome among the lines that a host has printed: a shell of the host may print others behind it."""
    for line in reversed(said):
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            return outcome_of(line)
    last = said[-1][:200].decode(errors="replace") if said else "nothing"
    return ElasticError(f"its process has ended without an outcome; the last that it printed: {last}")


def _hand_over(process: subprocess.Popen[bytes], ticket: bytes, closes: threading.Event) -> None:
    """Write the ticket, and keep the input open until `closes`. A thread of its own, as the ticket has the function:
    where that is larger than a pipe, this waits for an ssh that waits for its host."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as file:  # it has ended already, which `step` finds
        file.write(ticket)
        file.flush()
        closes.wait()


def command_of(host: str, ssh: Sequence[str]) -> list[str]:
    """The program that is this host: here, or by ssh in the same directory with the same Python."""
    own = children.python("elastic.platforms.horovod.host_task")
    if _is_here(host):
        return children.dying_with_this(*own)
    if shutil.which(ssh[0]) is None:
        raise ConfigError(f"{host} is another machine, and there is no {ssh[0]} to start its workers: install it")
    path = os.environ.get("PYTHONPATH", "")
    there = f"cd {shlex.quote(os.getcwd())} && PYTHONPATH={shlex.quote(path)} exec {shlex.join(own)}"
    return children.dying_with_this(str(shutil.which(ssh[0])), *ssh[1:], *SSH_OPTIONS, host, there)


def _is_here(host: str) -> bool:
    return host in lists.LOCAL or host in (socket.gethostname(), socket.getfqdn())


def address(listed: Mapping[str, int], *, discovers: bool = False) -> str:
    """The address of this machine that the hosts reach. discovers: others may be listed later. Raises ConfigError."""
    others = [host for host in listed if not _is_here(host)]
    # Another name of this machine leads to no address that others reach: then that of the way to any machine will do.
    for host in [*others, ANYWHERE, socket.gethostname()] if others or discovers else []:
        try:
            found = _address_towards(host)
        except OSError as error:
            if host in others:
                raise ConfigError(f"{host} cannot be reached from here: {error}") from None
            continue
        if not is_loopback(found):
            return found
    return "127.0.0.1"


def _address_towards(host: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return str(probe.getsockname()[0])


def run(launch: HostsLaunch) -> JobResult:
    """The result of the job. Raises ConfigError; ElasticError if it has not begun in time; LaunchFailed if it ends in
    another way than by its end."""
    discovers = isinstance(launch.hosts, HostWatch)
    listed = launch.hosts.now() if isinstance(launch.hosts, HostWatch) else launch.hosts
    deadline_s = time.monotonic() + launch.start_timeout_s
    begun = False
    with JobDriver(launch.request, address(listed, discovers=discovers), "horovod") as driver:
        tasks = HostTasks(driver, launch)
        try:
            while not driver.poll():
                listed = launch.hosts.now() if isinstance(launch.hosts, HostWatch) else launch.hosts
                tasks.step(listed)
                begun = begun or driver.state not in ("", "waits")
                if not begun and time.monotonic() > deadline_s:
                    slots, least = sum(listed.values()), launch.request.world[0]
                    raise ElasticError(
                        f"the job has not begun within {launch.start_timeout_s:g} s (--start-timeout): it needs "
                        f"{least} workers, and the hosts have {slots} slots ({', '.join(listed) or 'there is none'})"
                    )
                time.sleep(POLL_S)  # another process decides: there is nothing to wait on
            tasks.finish()
        except BaseException:
            tasks.cancel()
            raise
        return driver.result()
