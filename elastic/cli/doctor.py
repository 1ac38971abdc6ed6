"""`elastic doctor`: an examination."""

from __future__ import annotations

import argparse
import json
from typing import Any

from elastic.cli.script import command
from elastic.errors import ConfigError, ExitCode

EXAMPLES = """\
examples:
  elastic doctor --exact train.py --lr 3e-4
  elastic doctor --exact --steps 20 --json -m mypackage.train | jq .exact

The script's processes end when those steps are over; what comes behind its loop is not run. What it does before and
between the steps is done, three times.

exit codes:
  0 exact    1 not exact    2 bad input, or the script fails
"""


def add(verbs: Any) -> None:
    doctor = verbs.add_parser(
        "doctor",
        help="examine a script: do its bits depend on anything but its seed?",
        usage="elastic doctor --exact [options] SCRIPT [ARGS...]\n"
        "       elastic doctor --exact [options] -m MODULE [ARGS...]",
        description="Run the first steps of a script as a job of one, twice alike, and once with each shard in a "
        "process of its own; name the first parameter that differs, and the likely reason.",
        epilog=EXAMPLES,
    )
    doctor.add_argument("--exact", action="store_true", required=True, help="what to examine: its bits")
    doctor.add_argument("--steps", type=int, default=3, metavar="N", help="how many (default %(default)s)")
    doctor.add_argument("--json", action="store_true", help="as one JSON object")
    doctor.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module, as in python -m")
    doctor.add_argument("script", metavar="SCRIPT", nargs=argparse.REMAINDER, help="the script, and its arguments")
    doctor.set_defaults(verb=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from elastic import doctor

    if options.steps < 1:
        raise ConfigError(f"--steps {options.steps} must be at least 1")
    _, words = command(options.script, options.module)
    report = doctor.examine(words, options.steps)
    print(json.dumps(report.document()) if options.json else "\n".join(report.text()))
    return ExitCode.DONE if report.exact else ExitCode.SCRIPT_FAILED
