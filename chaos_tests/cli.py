"""`elastic chaos`: break a training job on purpose, and judge whether it noticed."""

from __future__ import annotations

import argparse
import re
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from chaos_tests.harness.campaign import Campaign

NOT_TRUE = 1
"""Exit code of a run of which an invariant is not true."""

RUN_EXAMPLES = """\
examples:
  elastic chaos run -- train.py --steps 500         the preset `kill`, over most of the run
  elastic chaos run --preset everything --duration 5m --seed 7 -- train.py --steps 5000
  elastic chaos run --quiet-run elastic-chaos/train-1 -- train.py --steps 500

The job runs twice: once undisturbed, once with faults. Choose arguments with which it takes a minute or more.

exit codes:
  0 every invariant is true             1 one is not
  2 bad input                           3 the job could not be run at all
"""


def add(verbs: Any) -> None:
    """The command and its verbs, below the parser of `elastic`."""
    chaos = verbs.add_parser(
        "chaos",
        help="break a training job on purpose, and judge what became of it",
        description="Run a job undisturbed and with faults, and decide invariants from what both have left behind.",
    )
    actions = chaos.add_subparsers(title="commands", required=True, metavar="ACTION", parser_class=type(chaos))
    _add_run(actions)
    listed = actions.add_parser("list", help="presets and kinds of faults", description="Presets and kinds of faults.")
    listed.set_defaults(verb=_list)
    report = actions.add_parser(
        "report",
        help="judge a run again and write its report anew",
        description="Judge a chaos run from its files and write report.html, report.json and junit.xml anew.",
    )
    report.add_argument("dir", type=Path, metavar="DIR", help="the --job-dir of `elastic chaos run`")
    _add_allow(report)
    report.set_defaults(verb=_report)


def _add_run(actions: Any) -> None:
    run = actions.add_parser(
        "run",
        help="run a script undisturbed and with faults",
        usage="elastic chaos run [options] -- SCRIPT [ARGS...]",
        description="Run a script undisturbed and with faults, and compare.",
        epilog=RUN_EXAMPLES,
    )
    run.add_argument(
        "--preset",
        default="kill",
        metavar="NAME",
        help="a preset, or faults with commas between; see `elastic chaos list`",
    )
    run.add_argument("--seed", type=int, metavar="S", help="of the schedule (default: drawn, and printed)")
    run.add_argument(
        "--duration",
        type=_seconds,
        metavar="2m",
        help="how long faults are injected, from the first step on (default: 80%% of the undisturbed run)",
    )
    run.add_argument("--workers", type=int, default=3, metavar="N", help="workers (default %(default)s)")
    run.add_argument("--job-dir", type=Path, metavar="DIR", help="default: ./elastic-chaos/<name>-<n>")
    run.add_argument(
        "--quiet-run",
        type=Path,
        metavar="DIR",
        help="compare with the undisturbed run of an earlier DIR of the same command, in place of a new one",
    )
    _add_allow(run)
    run.add_argument("script", metavar="SCRIPT", nargs=argparse.REMAINDER, help="the training script, its arguments")
    run.set_defaults(verb=_run)


def _add_allow(parser: Any) -> None:
    parser.add_argument(
        "--allow-unknown",
        default="",
        metavar="I8,I9",
        help="invariants that may stay undecided, for example those of samples that a script draws itself",
    )


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h)?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration; write 90, 90s, 2m or 1h")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600, None: 1}[found[2]]


def _run(options: argparse.Namespace) -> int:
    from chaos_tests.harness import campaign, processes
    from chaos_tests.harness.schedule import preset_of

    words = options.script[1:] if options.script[:1] == ["--"] else options.script
    if not words:
        raise ConfigError("no script given: write `elastic chaos run -- train.py`")
    preset_of(options.preset)
    if options.workers < 2:
        raise ConfigError(f"--workers={options.workers}: at least 2 are needed, because one has to survive")
    allowed = _allowed(options)
    seed = options.seed if options.seed is not None else secrets.randbelow(1_000_000)
    processes.exit_on_sigterm()
    home = _home(options.job_dir, words[0])
    asked = campaign.Campaign(
        home, tuple(words), ("--workers", str(options.workers)), options.preset, seed, options.duration
    )
    print(f"chaos: preset {options.preset}, seed {seed}, in {home}", flush=True)
    if options.quiet_run is not None:
        quiet_s = campaign.adopt_quiet_run(asked, options.quiet_run.absolute())
    else:
        print("\nundisturbed run", flush=True)
        quiet_s = campaign.quiet_run(asked)
    print("\nrun with faults", flush=True)
    return _judge(campaign.faulty_run(asked, quiet_s), allowed)


def _report(options: argparse.Namespace) -> int:
    from chaos_tests.harness import campaign

    return _judge(campaign.read_campaign(options.dir.absolute()), _allowed(options))


def _judge(asked: Campaign, allowed: frozenset[str]) -> int:
    from chaos_tests.harness import publish
    from chaos_tests.harness.report.documents import passed

    findings = publish.report(asked)
    print()
    for finding in findings:
        verdict = finding.verdict
        print(f"{finding.invariant.number:>4} {verdict.answer:<8}{finding.invariant.name}: {verdict.because}")
        for place in verdict.at:
            print(f"{'':13}{place}")
    found = passed(findings, allowed)
    print(f"\nchaos: {'PASSED' if found else 'NOT PASSED'} preset={asked.preset} seed={asked.seed}")
    print(f"report: {asked.home / 'report.html'}", flush=True)
    return ExitCode.DONE if found else NOT_TRUE


def _list(options: argparse.Namespace) -> int:
    from chaos_tests.harness.faults import CATALOGUE
    from chaos_tests.harness.schedule import PRESETS

    print("presets, with the mean time between two faults")
    for name, preset in PRESETS.items():
        print(f"  {name:<20}{preset.gap_s:2.0f} s  {preset.about}")
    print("\nfaults")
    for name, kind in CATALOGUE.items():
        print(f"  {name:<20}{kind.about}")
    return ExitCode.DONE


def _allowed(options: argparse.Namespace) -> frozenset[str]:
    from chaos_tests.harness.checkers import INVARIANTS

    named = frozenset(filter(None, options.allow_unknown.split(",")))
    if strange := named - {invariant.number for invariant in INVARIANTS}:
        raise ConfigError(f"--allow-unknown: there is no invariant {', '.join(sorted(strange))}")
    return named


def _home(chosen: Path | None, script: str) -> Path:
    """A new directory. Raises ConfigError if it cannot be one."""
    from elastic.jobdir import default_name, next_free

    try:
        if chosen is None:
            return next_free(Path.cwd() / "elastic-chaos", default_name(script))
        home = chosen.absolute()
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {error.filename}: {error.strerror}; give another --job-dir") from error
    if any(home.iterdir()):
        raise ConfigError(f"{home} is not empty; give a new --job-dir, or `elastic chaos report {home}`")
    return home


if __name__ == "__main__":
    from elastic.cli import main

    sys.exit(main(["chaos", *sys.argv[1:]]))
