"""The two batch scripts. Pure.

An array of batch jobs, each of which is the agent of one node: each is preempted, requeued and cancelled alone.

One allocation with a fleet of its own, which trains one job: etcd and the rendezvous on its first node, an agent on
each (allocation.py). What has to outlast the allocation is in one directory. The same job of Slurm that is requeued, or
another one with the same directory, goes on with the job where it was.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from elastic.platforms.slurm.batch_options import BatchOptions
from elastic.security.roles import CERTS_VARIABLE

LEAD_S = 120
"""How long before the time limit Slurm tells the agent, which then leaves and puts its job back into the queue."""

LIMIT_S = 5
"""More than the grace: how long before the time limit Slurm tells the script."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentsOptions:
    """rendezvous: "host:port" of each replica. certs: a directory with one for each node, under the node's name; None:
    no certificates. insecure: plain text with other machines is allowed."""

    batch: BatchOptions
    rendezvous: tuple[str, ...]
    certs: str | None = None
    insecure: bool = False


def agents_script(options: AgentsOptions) -> str:
    """For sbatch. Each node has a directory below that of the options, under its name."""
    batch = options.batch
    head = batch.lines(f"--array=1-{batch.nodes}", "--nodes=1", "--ntasks=1", f"--signal=B:USR1@{LEAD_S}")
    words = ["elastic", "agent", "--rendezvous", ",".join(options.rendezvous), "--notices", "slurm:requeue"]
    words += ["--grace", str(batch.grace_s), *batch.slot_words(), *(["--insecure"] if options.insecure else [])]
    if options.certs is None:
        head.append(f"unset {CERTS_VARIABLE}")
    certs = [] if options.certs is None else [f"--certs {_of_node(options.certs)}"]
    command = [shlex.join(words), f"--jobs-dir {_of_node(batch.directory)}", *certs]
    return "\n".join([*head, "exec " + " \\\n  ".join(command), ""])


def _of_node(directory: str) -> str:
    return f'{shlex.quote(directory)}/"$SLURMD_NODENAME"'


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """python: the path of the interpreter. job: that of the job's file. anew: each job of Slurm has a directory of its
    own, below that of `batch`; otherwise it is that one, and what is there is gone on with."""

    batch: BatchOptions
    python: str
    job: str
    anew: bool


def fleet_script(options: FleetOptions) -> str:
    """For sbatch."""
    batch = options.batch
    own = (f"--nodes={batch.nodes}", "--ntasks-per-node=1", "--no-kill", f"--signal=B:USR1@{batch.grace_s + LIMIT_S}")
    program = (options.python, "-P", "-m", "elastic.platforms.slurm.allocation", "fleet", options.job)
    directory = f"{shlex.quote(batch.directory)}{'/$SLURM_JOB_ID' if options.anew else ''}"
    words = (shlex.join(program), directory, shlex.join([str(batch.grace_s), *batch.slot_words()]))
    return "\n".join([*batch.lines(*own), f"exec {' '.join(words)}", ""])
