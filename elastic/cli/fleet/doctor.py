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
"""Exit code of an examination that has found something."""

EXAMPLES = """\
examples:
  elastic doctor --exact train.py --lr 3e-4
  elastic doctor --exact --steps 20 --json -m mypackage.train | jq .exact
  elastic doctor --rendezvous 10.0.0.1:7070,10.0.0.2:7070
  elastic doctor --rendezvous 127.0.0.1:7070 --json | jq '.findings[] | select(.advice != "")'

With --exact the script's processes end when those steps are over; what comes behind its loop is not run. What it does
before and between the steps is done, five times, with a temporary directory for its checkpoints (TMPDIR). An epoch has
three steps at most, so that the default has two: the script is entered in the middle of the second.

With --rendezvous every replica and node of a fleet is asked what it finds around itself: etcd, ports and addresses,
versions, clocks, disks, GPUs. Nothing is changed.

exit codes:
  0 exact, or all is well    1 not exact, or something is to be done    2 bad input, or the script fails
"""


def add(verbs: Any) -> None:
    doctor = verbs.add_parser(
        "doctor",
        help="check whether the bits of a script depend on its seed alone, or whether a fleet is in order",
        usage="elastic doctor --exact [options] SCRIPT [ARGS...]\n"
        "       elastic doctor --exact [options] -m MODULE [ARGS...]\n"
        "       elastic doctor --rendezvous HOST:PORT,... [--json]",
        description="With --exact: run the first steps of a script as a job of one, twice alike, with each shard in a "
        "process of its own, from a checkpoint in the middle, and as a newcomer that enters there; name the first "
        "parameter that differs, and the likely reason. With --rendezvous: examine a fleet, and print a line for each "
        "thing that is in order or to be done.",
        epilog=EXAMPLES,
    )
    which = doctor.add_mutually_exclusive_group(required=not known_replicas())
    which.add_argument("--exact", action="store_true", help="examine the bits of a script")
    add_replicas(doctor, which)
    doctor.add_argument("--steps", type=int, default=STEPS, metavar="N", help="steps to run (default %(default)s)")
    doctor.add_argument("--json", action="store_true", help="as one JSON object")
    doctor.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module, as in python -m")
    doctor.add_argument("script", metavar="SCRIPT", nargs=argparse.REMAINDER, help="the script, and its arguments")
    doctor.set_defaults(verb=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    return _of_script(options) if options.exact else _of_fleet(options)


def _of_script(options: argparse.Namespace) -> int:
    from elastic.platforms.local import exactness_check

    if options.steps < 1:
        raise ConfigError(f"--steps {options.steps} must be at least 1")
    _, words = command(options.script, options.module, "doctor --exact")
    report = exactness_check.examine(words, options.steps)
    code = ExitCode.DONE if report.exact else ExitCode.SCRIPT_FAILED
    return answer(options, report.document(), "\n".join(report.text()), code)


def _of_fleet(options: argparse.Namespace) -> int:
    from elastic.fleet import probes
    from elastic.fleet.findings import findings

    if options.script:
        raise ConfigError(f"{options.script[0]}: --rendezvous takes no script; --exact does")
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
