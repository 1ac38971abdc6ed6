"""An array of batch jobs, each of which is the agent of one node: each is preempted, requeued and cancelled alone."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from elastic.platforms.slurm.batch_options import BatchOptions
from elastic.security.roles import CERTS_VARIABLE

LEAD_S = 120
"""How long before the time limit Slurm tells the agent, which then leaves and puts its job back into the queue."""


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
    words += [*batch.agent_words(), *(["--insecure"] if options.insecure else [])]
    if options.certs is None:
        head.append(f"unset {CERTS_VARIABLE}")
    certs = [] if options.certs is None else [f"--certs {_of_node(options.certs)}"]
    command = [shlex.join(words), f"--jobs-dir {_of_node(batch.directory)}", *certs]
    return "\n".join([*head, "exec " + " \\\n  ".join(command), ""])


def _of_node(directory: str) -> str:
    return f'{shlex.quote(directory)}/"$SLURMD_NODENAME"'
