"""A real Slurm on this machine: munged, slurmctld, and a slurmd for each node, on loopback and in a directory.

Debian's packages slurm-wlm and munge. Its two partitions share all nodes: `spot`, whose jobs get GRACE_S and are put
back into the queue when a job of `prod` wants their processors. Tasks of srun are told at the start of that time, a
batch script at its end, which has KILL_WAIT_S more.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from chaos_tests.support.processes import MARK, await_exits, kill_if_there, living, new_mark

GRACE_S = 20
KILL_WAIT_S = 30
CPUS = 4
"""Of each node, as the scheduler counts; nothing is bound to them."""

DEADLINE_S = 180.0
POLL_S = 0.05
"""Slurm tells nobody; it is asked."""

CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={home}/munge.socket
CredType=cred/munge
StateSaveLocation={home}/state
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd.%n.pid
SlurmdSpoolDir={home}/spool.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_min_interval=100000
ReturnToService=2
SlurmdTimeout=5
KillWait={kill_wait}
{settings}
MinJobAge=300
MpiDefault=none
SlurmdParameters=config_overrides
{nodes}
PartitionName=spot Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace}
PartitionName=prod Nodes=ALL MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
"""

T = TypeVar("T")


class Slurm:
    """A context manager: all of it, and whatever jobs left, is gone afterwards."""

    def __init__(self, home: Path, nodes: int, settings: str = "") -> None:
        """home: a short path, because a socket is in it. settings: another line of slurm.conf."""
        self._settings = settings
        self.home = home
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        self._mark = new_mark()
        self._environment = {**os.environ, "SLURM_CONF": str(home / "slurm.conf"), MARK: self._mark}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            undo.callback(self._end)
            self._start()
            undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            error.add_note(self.story())
        self._end()

    def _start(self) -> None:
        first, *ports = _free_ports(len(self.nodes) + 1)
        lines = [
            f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs={CPUS} RealMemory=1000"
            for name, port in zip(self.nodes, ports, strict=True)
        ]
        numbers = {"port": first, "grace": GRACE_S, "kill_wait": KILL_WAIT_S}
        text = CONFIGURATION.format(home=self.home, nodes="\n".join(lines), settings=self._settings, **numbers)
        (self.home / "slurm.conf").write_text(text)
        (self.home / "state").mkdir()
        key = self.home / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        files = (f"--{name}={self.home}/munge.{name.partition('-')[0]}" for name in ("socket", "pid-file", "log-file"))
        self._daemon("munged", "--foreground", "--force", f"--key-file={key}", f"--seed-file={key}.seed", *files)
        self.until("munged listens", lambda: (self.home / "munge.socket").exists())
        self.start_controller()
        for name in self.nodes:
            (self.home / f"spool.{name}").mkdir()
            self.switch_on(name)
        self.until("all nodes are idle", lambda: self.states() == dict.fromkeys(self.nodes, "idle"))

    def switch_on(self, node: str) -> None:
        self._daemon(node, "-D", "-N", node, program="slurmd")

    def kill(self, name: str) -> None:
        """One of Slurm's own daemons alone: slurmctld, or the slurmd of a node."""
        daemon = self._daemons.pop(name)
        daemon.kill()
        daemon.wait()

    def await_saved(self, job: str) -> None:
        """Until slurmctld has on disk what it knows now of a job: it writes some seconds later, and if it is killed
        before, it takes a job that runs for one that waits, and ends it."""
        path = self.home / "state" / "job_state"
        earlier = path.stat().st_ino if path.exists() else None
        self.run("scontrol", "update", f"JobId={job}", "Comment=saved")
        self.until(f"{job} is saved", lambda: path.exists() and path.stat().st_ino != earlier)

    def start_controller(self) -> None:
        self._daemon("slurmctld", "-D")

    def switch_off(self, node: str) -> None:
        """As by its power switch: its slurmd and everything below it are killed."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait()
        # First who would tell of a death, then srun before its parent: a group that is left alone may be told to end.
        while tasks := [pid for pid in living(self._mark) if self._node_of(pid) == node]:
            for pid in (*filter(_is_slurmstepd, {_parent(pid) for pid in tasks}), *sorted(tasks, reverse=True)):
                kill_if_there(pid)
            await_exits(tasks, within_s=10.0)

    def _node_of(self, pid: int) -> str:
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return ""
        named = [value.partition(b"=")[2].decode() for value in variables if value.startswith(b"SLURMD_NODENAME=")]
        return named[0] if named else ""

    def kill_program(self, words: str, node: str = "") -> None:
        """The oldest process of a job with these words in its command line. node: where; "": anywhere."""
        for pid in sorted(living(self._mark)):
            if words in _command_line(pid) and node in ("", self._node_of(pid)):
                kill_if_there(pid)
                return
        raise AssertionError(f"no {words!r} on {node or 'any node'}")

    def states(self) -> dict[str, str]:
        said = subprocess.run(
            ["sinfo", "-h", "-N", "-o", "%N %t", "-p", "spot"], env=self._environment, capture_output=True, text=True
        )
        return dict(line.split() for line in said.stdout.splitlines())  # nothing while the controller starts

    def run(self, *command: str, environment: Mapping[str, str] | None = None) -> str:
        """One of Slurm's commands. Returns what it says."""
        variables = {**self._environment, **(environment or {})}
        done = subprocess.run(
            [shutil.which(command[0], path=variables["PATH"]) or command[0], *command[1:]],
            env=variables,
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def submit(self, script: str, *options: str, environment: Mapping[str, str] | None = None) -> str:
        """The id of a batch job. script: its lines."""
        path = self.home / f"{secrets.token_hex(4)}.sbatch"
        path.write_text(f"#!/bin/bash\n{script}\n")
        words = ("sbatch", "--parsable", "--open-mode=append", f"--output={self.home}/%A_%a.out", *options, str(path))
        return self.run(*words, environment=environment)

    def job(self, job: str) -> dict[str, str]:
        """What scontrol knows of it: JobState, ExitCode, Restarts, ..."""
        said = self.run("scontrol", "show", "job", "--oneliner", job)
        return {word.partition("=")[0]: word.partition("=")[2] for word in said.split() if "=" in word}

    def node_of(self, job: str) -> str:
        """Wait until it runs. Returns its node, which has to be one."""

        def node() -> str | None:
            known = self.job(job)
            return known["NodeList"] if known["JobState"] == "RUNNING" else None

        return self.until(f"{job} runs", node)

    def run_again(self, job: str) -> None:
        """In the second after it is back in the queue, where Slurm would leave it for two minutes. Not in the same
        one: a slurmd that has ended a job refuses a credential of that second, and Slurm then says FAILED."""
        self.until(f"{job} is queued again", lambda: self.job(job)["JobState"] == "PENDING")
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now+1")

    def end(self, job: str) -> str:
        """Wait for it. Returns its state."""
        going = ("PENDING", "RUNNING", "COMPLETING")
        return self.until(f"the end of {job}", lambda: s if (s := self.job(job)["JobState"]) not in going else None)

    def completes(self, job: str) -> None:
        """Wait for its end, which must be a good one."""
        assert (state := self.end(job)) == "COMPLETED", f"{job} is {state}\n{self.story()}"

    def until(self, what: str, reached: Callable[[], T | None], deadline_s: float = DEADLINE_S) -> T:
        deadline = time.monotonic() + deadline_s
        while not (value := reached()):
            for name, daemon in self._daemons.items():
                assert daemon.poll() is None, f"{name} ended with {daemon.returncode}\n{self.story()}"
            assert time.monotonic() < deadline, f"not within {deadline_s} s: {what}\n{self.story()}"
            time.sleep(POLL_S)
        return value

    def output(self, job: str) -> str:
        """What a job of `submit` has printed, in all its runs."""
        (path,) = self.home.glob(f"{job}_*.out")
        return path.read_text(errors="replace")

    def story(self) -> str:
        files = (*self.home.glob("*.log"), *self.home.glob("*.out"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in sorted(files))

    def _daemon(self, name: str, *arguments: str, program: str = "") -> None:
        with (self.home / f"{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                [program or name, *arguments],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _end(self) -> None:
        for daemon in reversed(self._daemons.values()):
            daemon.kill()
            daemon.wait()
        for _ in range(3):  # what is killed may have been about to start another
            for pid in living(self._mark):
                kill_if_there(pid)
            if not await_exits(living(self._mark), within_s=10.0):
                return
        raise AssertionError(f"left: {living(self._mark)}")


def _command_line(pid: int) -> str:
    """ "": it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def _parent(pid: int) -> int:
    """0: it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return int(status.partition("\nPPid:")[2].split()[0])


def _is_slurmstepd(pid: int) -> bool:
    """Which starts and watches the tasks of a node, and has not their environment."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().startswith("slurmstepd")
    except OSError:
        return False


def _free_ports(count: int) -> list[int]:
    """A port may be taken by another process before Slurm takes it; then its daemon ends, and says so."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
