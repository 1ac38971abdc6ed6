"""What runs in an allocation of `elastic slurm fleet`: on its first node the fleet, until its job is over, and below
srun an agent on each node.

    python -P -m elastic.platforms.slurm.allocation fleet JOB.TOML DIR GRACE WORDS...
    python -P -m elastic.platforms.slurm.allocation agent DIR FIRST ADDRESS JOB GRACE WORDS...

DIR: all nodes see it. WORDS: further ones for `elastic agent`. Slurm signals every process of an allocation: etcd and
the rendezvous hold that back, and agents take it for the order to leave.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from elastic.checkpoints.series import newest_at
from elastic.errors import ConfigError, ElasticError, ExitCode
from elastic.fleet.client import ended_text
from elastic.platforms.common.agent_child import AgentChild, AgentPlace, Ending
from elastic.platforms.common.private_fleet import KeptFleet, PrivateFleet
from elastic.process import children
from elastic.protocol.worker_id import node_name
from elastic.records.files import write_atomically
from elastic.records.job_directory import JobLock
from elastic.store.embedded import find_binary

MODULE = "elastic.platforms.slurm.allocation"
LOCK_S = 300.0
"""For an earlier allocation with the same directory to end."""
POLL_S = 1.0
PATIENCE_S = 20.0
"""After the end of all agents, for their job to be over."""
AGENTS_END_S = 25.0
"""For the agents to end after their job."""
LOOK_S = 30.0
"""Between two looks whether the first node is still there."""


def fleet(file: Path, directory: Path, *words: str) -> int:
    """Train the job. Returns its exit code. Main thread only. Raises ElasticError, OSError."""
    near: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: None)  # the agents get it too
    signal.signal(signal.SIGUSR1, lambda *_: near.append(1))
    slurm_job = os.environ["SLURM_JOB_ID"]
    os.umask(0o077)
    directory.mkdir(parents=True, exist_ok=True)
    lock = _lock(directory)
    shutil.rmtree(directory / "certs", ignore_errors=True)  # of another authority
    keeps = KeptFleet(directory, _etcd(os.environ["PATH"]), node_name(getpass.getuser().replace(".", "-")))
    with lock, PrivateFleet(f"{_address()}:{20000 + 2 * (int(slurm_job) % 5000)}", keeps) as own:
        for node in _said("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split():
            own.issue(node_name(node))
        print(f"export {' '.join(f'{name}={value}' for name, value in own.environment.items())}", flush=True)
        job = _begun(own, file, directory / "job")
        agents = children.start(_srun(directory, own.address, job, *words), obeys=False)
        try:
            ended = _await_end(own, job, agents, near, f"{slurm_job}.0")
            print(ended_text(ended) if ended else f"all agents have ended, and {job} is not over", flush=True)
        finally:
            children.wait_or_kill(agents, AGENTS_END_S)
    code = int(ended["exit_code"]) if ended else ExitCode.BELOW_QUORUM
    if code == ExitCode.DONE:
        (directory / "job").unlink()
    # At the time limit, and where Slurm has preempted the job and it is over before its GraceTime.
    elif near or re.search(r"PreemptTime=\d", _said("scontrol", "show", "job", slurm_job)):
        subprocess.run(("scontrol", "requeue", slurm_job))
    return code


def _lock(directory: Path) -> JobLock:
    """Raises ConfigError if another allocation has it for too long."""
    deadline_s = time.monotonic() + LOCK_S
    while True:
        try:
            return JobLock(directory / "lock", "it is another allocation's: give another --dir")
        except ConfigError:
            if time.monotonic() > deadline_s:
                raise
        time.sleep(POLL_S)  # a process of another machine: there is nothing to wait on


def _address() -> str:
    """The address of this node, by which the other nodes reach it."""
    if given := os.environ.get("ELASTIC_ADDRESS"):
        return given
    known = re.search(r"NodeAddr=(\S+)", _said("scontrol", "show", "node", os.environ["SLURMD_NODENAME"]))
    if known is None:
        raise ElasticError("scontrol says no NodeAddr of this node; set ELASTIC_ADDRESS")
    return known[1]


def _etcd(path: str) -> str:
    """Another one than that beside Python, if there is one: that may lose data when it is killed."""
    beside = str(Path(sys.executable).parent)
    others = os.pathsep.join(part for part in path.split(os.pathsep) if part != beside)
    return shutil.which("etcd", path=others) or find_binary()


def _begun(own: PrivateFleet, file: Path, kept: Path) -> str:
    """The name of the job. kept: the file with that of an earlier allocation; if it has ended, another job goes on from
    its checkpoint, or begins again if it has none. Exits where the job is refused, which has been said."""
    resume: tuple[str, ...] = ()
    if kept.exists():
        before = own.client.job(kept.read_text().strip())
        if before["state"] != "ended":
            return str(before["job"])
        if newest_at(before["checkpoints"], before["identity"]) is not None:
            resume = ("--resume", before["job"])
        else:
            print(f"{before['job']} has ended without a whole checkpoint; the job begins again", flush=True)
    command = children.python("elastic.cli", "submit", str(file), *resume)
    environment = {**children.own_environment(), **own.environment}
    told = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if told.returncode:
        sys.exit(told.returncode)
    write_atomically(kept, told.stdout.strip().encode(), 0o600)
    return told.stdout.strip()


def _srun(directory: Path, address: str, job: str, *words: str) -> list[str]:
    """An agent on each node; one that is lost ends neither the step nor the job."""
    keeps_on = ("--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--ntasks-per-node=1", "--cpu-bind=none")
    first = os.environ["SLURMD_NODENAME"]
    return ["srun", *keeps_on, *children.python(MODULE, "agent", str(directory), first, address, job, *words)]


def _await_end(
    own: PrivateFleet, job: str, agents: subprocess.Popen[bytes], near: list[int], step: str
) -> dict[str, Any] | None:
    """The entry of the job when it is over; None if all agents have ended before. near: not empty when the time limit
    is near: then the agents have their grace."""
    over_s, told, entry = 0.0, 0, None
    while entry is None or entry["state"] != "ended":
        try:
            entry = own.entry(job)
        except ElasticError as error:  # it was killed, and its etcd has ended with it
            _say(str(error))
            with contextlib.suppress(ElasticError):
                own.begin()
        if len(near) > told:
            told = len(near)
            subprocess.run(("scancel", "--signal=TERM", step))
        if agents.poll() is not None:
            over_s = over_s or time.monotonic()
            if time.monotonic() > over_s + PATIENCE_S:
                return None
        time.sleep(POLL_S)  # other processes: there is nothing to wait on
    return entry


def agent(directory: Path, first: str, address: str, job: str, grace: str, *words: str) -> int:
    """The agent of this node. Main thread only."""
    node = os.environ["SLURMD_NODENAME"]
    place = AgentPlace(
        replicas=(address,),
        certs=directory / "certs" / node_name(node),
        node=node_name(node),
        job=job,
        jobs_dir=directory / node,
        grace_s=float(grace),
        words=words,
    )
    signal.signal(signal.SIGUSR1, lambda *_: None)  # to the agent, which gets it too, it is a notice
    threading.Thread(target=_watch, args=(first,), daemon=True).start()
    child = AgentChild(place)
    child.obey()
    ending = child.serve(lambda entry: False)
    if ending is Ending.DIED:
        _say(f"the agent of {node} has ended with {child.status}")
    return ExitCode.DONE if ending is Ending.OVER else ExitCode.TERMINATED


def _watch(first: str) -> None:
    """Slurm leaves the other nodes alone if the first one, with etcd and the rendezvous, is lost: then they put the job
    back into the queue."""
    slurm_job = os.environ["SLURM_JOB_ID"]
    while True:
        time.sleep(LOOK_S)
        left = _said("squeue", "--noheader", "--jobs", slurm_job, "--format", "%N")
        if left and first not in _said("scontrol", "show", "hostnames", left).split():
            subprocess.run(("scontrol", "requeue", slurm_job))


def _said(*command: str) -> str:
    """What one of Slurm's programs says; "" if it cannot."""
    return subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout.strip()


def _say(text: str) -> None:
    print(f"elastic: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        if sys.argv[1] == "fleet":
            sys.exit(fleet(Path(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:]))
        sys.exit(agent(Path(sys.argv[2]), *sys.argv[3:]))
    except (ElasticError, OSError) as error:
        _say(str(error))
        sys.exit(ExitCode.BAD_INPUT if isinstance(error, ConfigError) else ExitCode.BELOW_QUORUM)
