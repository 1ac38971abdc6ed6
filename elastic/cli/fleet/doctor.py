"""`elastic doctor`: an examination of a script, or of a fleet."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from elastic.agent.worker.examination import STEPS
from elastic.cli.options import add_replicas, answer, client_of, known_replicas
from elastic.errors import ConfigError, ExitCode
from elastic.platforms.local.script_command import command

if TYPE_CHECKING:
    from elastic.fleet.findings import Finding

SOMETHING_TO_DO = 1
"""Exit code of an examination that has found something, or of a script that does not qualify."""

EXAMPLES = """\
examples:
  elastic doctor --ranks 4 train_ddp.py --epochs 2
  elastic doctor --ranks 8 --json train_ddp.py | jq '.refusals[] | {rule, place}'
  elastic doctor --exact train.py --lr 3e-4
  elastic doctor --exact --steps 20 --json -m mypackage.train | jq .exact
  elastic doctor --rendezvous 10.0.0.1:7070,10.0.0.2:7070
  elastic doctor --rendezvous 127.0.0.1:7070 --json | jq '.findings[] | select(.advice != "")'

With --exact and --ranks the script's processes end when those steps are over; what comes behind its loop is not run.
What it does before and between the steps is done, five times, with a temporary directory for its checkpoints (TMPDIR).
An epoch has three steps at most, so that the default has two: the script is entered in the middle of the second.

With --ranks the script is one for torchrun, and N as in torchrun --nproc-per-node=N. It runs four times; torch.save
writes no file meanwhile. Evaluations run to their end: give the script arguments for a small data set. Lines about the
progress go to stderr.

With --rendezvous every replica and node of a fleet is asked what it finds around itself: etcd, ports and addresses,
versions, clocks, disks, GPUs. Nothing is changed.

exit codes:
  0 the script qualifies, or is exact; or all is well
  1 it does not; or something is to be done
  2 bad input, or the script fails by itself    130 interrupted
"""


def add(verbs: Any) -> None:
    doctor = verbs.add_parser(
        "doctor",
        help="check whether a script for torchrun can run unchanged, whether the bits of a script depend on its seed "
        "alone, or whether a fleet is in order",
        usage="elastic doctor --ranks N [options] SCRIPT [ARGS...]\n"
        "       elastic doctor --exact [options] SCRIPT [ARGS...]\n"
        "       elastic doctor --ranks N | --exact [options] -m MODULE [ARGS...]\n"
        "       elastic doctor --rendezvous HOST:PORT,... [--json]",
        description="With --ranks: run the first steps of a script for torchrun as `elastic run --ranks` does, also as "
        "a newcomer that joins in the middle; name the line that is refused, with what to write instead, and the first "
        "parameter that differs. With --exact: run the first steps of a script as a job of one, twice alike, with each "
        "shard in a process of its own, from a checkpoint in the middle, and as a newcomer that enters there; name the "
        "first parameter that differs, and the likely reason. With --rendezvous: examine a fleet, and print a line for "
        "each thing that is in order or to be done.",
        epilog=EXAMPLES,
    )
    which = doctor.add_mutually_exclusive_group(required=not known_replicas())
    which.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="examine a script for torchrun with N processes, for `elastic run --ranks N`",
    )
    which.add_argument("--exact", action="store_true", help="examine the bits of a script")
    add_replicas(doctor, which)
    doctor.add_argument("--steps", type=int, default=STEPS, metavar="N", help="steps to run (default %(default)s)")
    doctor.add_argument("--json", action="store_true", help="as one JSON object")
    doctor.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module, as in python -m")
    doctor.add_argument("script", metavar="SCRIPT", nargs=argparse.REMAINDER, help="the script, and its arguments")
    doctor.set_defaults(verb=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    if options.exact or options.ranks is not None:
        return _of_script(options)
    return _of_fleet(options)


def _of_script(options: argparse.Namespace) -> int:
    from elastic.platforms.local import exactness_check, ranks_check

    for name in ("ranks", "steps"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise ConfigError(f"--{name} {value} must be at least 1")
    asked = "doctor --exact" if options.exact else f"doctor --ranks {options.ranks}"
    _, words = command(options.script, options.module, asked)
    if options.exact:
        exactness = exactness_check.examine(words, options.steps)
        good, document, text = exactness.exact, exactness.document(), exactness.text()
    else:
        ranks = ranks_check.examine(words, options.ranks, options.steps)
        good, document, text = ranks.qualifies, ranks.document(), ranks.text()
    return answer(options, document, "\n".join(text), ExitCode.DONE if good else SOMETHING_TO_DO)


def _of_fleet(options: argparse.Namespace) -> int:
    from elastic.fleet import probes
    from elastic.fleet.findings import findings

    if options.script:
        raise ConfigError(f"{options.script[0]}: --rendezvous takes no script; --ranks N and --exact do")
    found = findings(probes.take(client_of(options)))
    well = not any(finding.advice for finding in found)
    document = {"well": well, "findings": [asdict(finding) for finding in found]}
    return answer(options, document, findings_text(found), ExitCode.DONE if well else SOMETHING_TO_DO)


def findings_text(found: list[Finding]) -> str:
    """A line each; below one that is not as it should be, what to do."""
    lines = []
    for finding in found:
        mark = "to do" if finding.advice else "OK"
        lines.append(f"{mark:<6}{finding.about:<11} {finding.where}: {finding.said}")
        lines += [f"      {finding.advice}"] if finding.advice else []
    return "\n".join(lines)
