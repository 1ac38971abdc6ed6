"""`elastic slurm agents` and `elastic slurm fleet`: a batch script for Slurm, printed or submitted."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from elastic.cli.options import Parser, add_rendezvous
from elastic.errors import ConfigError, ElasticError, ExitCode
from elastic.platforms.slurm.batch_options import SUBMIT, BatchOptions
from elastic.rendezvous.endpoint import INSECURE, check_plain, parse

AGENTS_DIR = Path("elastic-jobs")
FLEETS_DIR = Path("elastic-slurm")
GRACE_S = 25
"""Less than the 30 s that Slurm leaves between SIGTERM and SIGKILL where nobody has said otherwise (KillWait)."""

DESCRIPTION = "Write a batch script for nodes of Slurm, or, with --submit, give it to sbatch and print the job's id."

EXAMPLES = """\
examples:
  elastic slurm agents --nodes 8 --rendezvous 10.0.0.1:7070 --certs certs            prints the script
  elastic slurm agents --nodes 8 --submit -- --partition=spot --gres=gpu:8 --time=24:00:00
  elastic slurm fleet job.toml --nodes 4 --submit -- --gres=gpu:8 --time=24:00:00
  elastic slurm fleet job.toml --nodes 4 --dir runs/7 --submit                       later: goes on where it was

agents: nodes for a fleet whose rendezvous is elsewhere, one job of an array each. For more nodes run the command again,
for fewer scancel 71_3. fleet: one allocation with etcd, rendezvous and agents of its own, which ends with the job.
Options behind -- are given to sbatch, and override those of the script.

exit codes:
  0 done    2 bad input    3 sbatch has refused it
"""


class _BatchParser(Parser):
    """Words behind -- are for sbatch."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(args)
        end = words.index("--") if "--" in words else len(words)
        found = super().parse_known_args(words[:end], namespace)
        found[0].sbatch = tuple(words[end + 1 :])
        return found


def add(verbs: Any) -> None:
    """The verb."""
    slurm = verbs.add_parser(
        "slurm", help="batch scripts for a fleet on the nodes of Slurm", description=DESCRIPTION, epilog=EXAMPLES
    )
    what = slurm.add_subparsers(dest="slurm", required=True, metavar="WHAT", parser_class=_BatchParser)
    agents = what.add_parser(
        "agents",
        help="nodes for a fleet, each an array task",
        usage="elastic slurm agents --nodes N [options] [-- OPTIONS OF SBATCH]",
        description="An array of jobs, each the agent of one node: each is preempted, requeued and cancelled alone.",
        epilog=EXAMPLES,
    )
    add_rendezvous(agents)
    agents.add_argument(
        "--certs",
        type=Path,
        metavar="DIR",
        help="has a directory with the certificate of an agent for each node, under its name in Slurm",
    )
    agents.add_argument(INSECURE, action="store_true", help="without certificates: plain text with other machines")
    _add_common(agents, AGENTS_DIR, "for what the agents write, on all nodes")
    agents.set_defaults(verb=_agents)
    fleet = what.add_parser(
        "fleet",
        help="an allocation that trains one job",
        usage="elastic slurm fleet JOB.TOML --nodes N [options] [-- OPTIONS OF SBATCH]",
        description="One allocation that trains one job: etcd and the rendezvous on its first node, an agent on each. "
        "A node that is lost ends neither.",
        epilog=EXAMPLES,
    )
    fleet.add_argument("file", type=Path, metavar="JOB.TOML", help="as of `elastic submit`")
    _add_common(fleet, None, f"which all nodes see; what is there is gone on with (default: ./{FLEETS_DIR}/ID)")
    fleet.set_defaults(verb=_fleet)


def _add_common(verb: argparse.ArgumentParser, directory: Path | None, about: str) -> None:
    verb.add_argument("--nodes", type=int, required=True, metavar="N", help="number of nodes")
    verb.add_argument(
        "--slots", type=int, metavar="N", help="workers of a node (default: its GPUs, or its CPUs for a task, or 1)"
    )
    verb.add_argument(
        "--grace",
        type=int,
        default=GRACE_S,
        metavar="S",
        help="seconds a node may take to leave after SIGTERM: less than KillWait, and for a fleet less than GraceTime "
        "(default %(default)s)",
    )
    default = " (default ./%(default)s)" if directory is not None else ""
    verb.add_argument("--dir", type=Path, default=directory, metavar="DIR", help=about + default)
    verb.add_argument("--submit", action="store_true", help="give the script to sbatch, and print the id of the job")


def _agents(options: argparse.Namespace) -> int:
    from elastic.platforms.slurm.batch_scripts import AgentsOptions, agents_script

    replicas, certs = parse("--rendezvous", options.rendezvous), options.certs
    check_plain("--rendezvous", replicas, allowed=options.insecure or certs is not None)
    if certs is not None and not certs.is_dir():
        raise ConfigError(f"--certs {certs} is no directory; give the one that has a directory for each node")
    found = AgentsOptions(
        batch=_batch(options, "elastic-agents", options.dir),
        rendezvous=replicas,
        certs=None if certs is None else str(certs.absolute()),
        insecure=options.insecure,
    )
    return _done(agents_script(found), submit=options.submit)


def _fleet(options: argparse.Namespace) -> int:
    from elastic.cli.fleet.submit import read_job_file
    from elastic.platforms.slurm.batch_scripts import FleetOptions, fleet_script

    spec = read_job_file(options.file)
    batch = _batch(options, spec.name, options.dir or FLEETS_DIR)
    found = FleetOptions(batch=batch, python=sys.executable, job=str(options.file.absolute()), anew=options.dir is None)
    return _done(fleet_script(found), submit=options.submit)


def _batch(options: argparse.Namespace, name: str, directory: Path) -> BatchOptions:
    return BatchOptions(
        name=name,
        nodes=options.nodes,
        programs=str(Path(sys.executable).parent),
        directory=str(directory.absolute()),
        grace_s=options.grace,
        slots=options.slots,
        sbatch=options.sbatch,
    )


def _done(script: str, *, submit: bool) -> int:
    if not submit:
        print(script, end="")
        return ExitCode.DONE
    if shutil.which(SUBMIT[0]) is None:
        raise ConfigError("sbatch is not in PATH; run this where jobs of Slurm are submitted, or without --submit")
    done = subprocess.run(SUBMIT, input=script, capture_output=True, text=True)
    if done.returncode:
        raise ElasticError(f"sbatch: {done.stderr.strip()}")
    print(done.stdout.partition(";")[0].strip())
    return ExitCode.DONE
