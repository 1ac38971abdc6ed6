"""`elastic chaos`: break a training job on purpose, and judge whether the job noticed."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from chaos_tests.checkers import Judgement
    from chaos_tests.run.campaign import Campaign


NOT_TRUE = 1
"""Exit code of a run of which an invariant is not true."""
SKIPPED = 4
"""Exit code where this machine cannot do what was asked for; nothing was run."""

RUN_EXAMPLES = """\
examples:
  elastic chaos run -- train.py --steps 500         the preset `kill`, over most of the run
  elastic chaos run --preset everything --duration 5m --seed 7 -- train.py --steps 5000
  elastic chaos run --quiet-run elastic-chaos/train-1 -- train.py --steps 500
  elastic chaos run --preset freeze --job job.toml  a job as `elastic submit` takes it
  elastic chaos run scenario.toml -- train.py       faults at the times and places of a file
  elastic chaos run --trace spot-8-nodes --speed 20 --duration 5m -- train.py --steps 5000
  elastic chaos run --workers 4 --trace bamboo-p3 --divide 8 --speed 60 -- train.py --steps 5000
  elastic chaos run --preset cluster --duration 3m -- train.py --steps 2000      over several nodes, on this machine
  elastic chaos run --preset everything --workers 4 --slots 2 -- train.py --steps 2000      over two nodes of two
  elastic chaos run --restart --preset rounds --duration 3m -- train.py      any script for torchrun
  elastic chaos run --json -- train.py --steps 500 | jq .passed

The job runs twice: once undisturbed, once with faults. Choose arguments with which it takes a minute or more.

exit codes:
  0 every invariant that applies is true    1 one is not
  2 bad input                               3 the job could not be run at all
  4 skipped: this machine cannot do what was asked for
"""

LIST_EXAMPLES = """\
examples:
  elastic chaos list
  elastic chaos list --json | jq -r '.faults[] | select(.ground == "any") | .name'
"""

REPLAY_EXAMPLES = """\
examples:
  elastic chaos replay chaos-2/report.json
  elastic chaos replay chaos-2 --job-dir again --json | tail -1 | jq .same

exit codes:
  0 every invariant is decided as before, and the same faults came     1 something differs
  2 bad input                                                          3 the job could not be run at all
  4 skipped: this machine cannot do what was asked for
"""

REPORT_EXAMPLES = """\
examples:
  elastic chaos report chaos-2
  elastic chaos report chaos-2 --allow-unknown I14

exit codes:
  0 every invariant that applies is true    1 one is not
  2 bad input
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
    _add_replay(actions)
    _add_trace(actions)
    listed = actions.add_parser(
        "list",
        help="presets and kinds of faults",
        description="Presets, kinds of faults and traces, and what of them this machine cannot do.",
        epilog=LIST_EXAMPLES,
    )
    listed.add_argument("--json", action="store_true", help="as one JSON object")
    listed.set_defaults(verb=_list)
    report = actions.add_parser(
        "report",
        help="judge a run again and write its report anew",
        description="Judge a chaos run from its files and write report.html, report.json and junit.xml anew.",
        epilog=REPORT_EXAMPLES,
    )
    report.add_argument("dir", type=Path, metavar="DIR", help="the --job-dir of `elastic chaos run`")
    _add_allow(report, " (default: those of the run)")
    report.set_defaults(verb=_report)


def _add_run(actions: Any) -> None:
    run = actions.add_parser(
        "run",
        help="run a script undisturbed and with faults",
        usage="elastic chaos run [SCENARIO.toml] [options] -- SCRIPT [ARGS...]\n"
        "       elastic chaos run [SCENARIO.toml] [options] --job job.toml",
        description="Run a script undisturbed and with faults, and compare.",
        epilog=RUN_EXAMPLES,
    )
    run.add_argument(
        "--preset",
        metavar="NAME",
        help="a preset, or faults with commas between; see `elastic chaos list` (default: kill)",
    )
    run.add_argument(
        "--seed", type=int, metavar="S", help="seed of the schedule of faults (default: drawn, and printed)"
    )
    run.add_argument(
        "--duration",
        dest="duration_s",
        type=_seconds,
        metavar="2m",
        help="time for which faults are injected, from the first step on (default: 80%% of the undisturbed run)",
    )
    run.add_argument("--workers", type=int, metavar="N", help="number of workers (default: 3, or those of the job)")
    run.add_argument(
        "--slots",
        type=int,
        metavar="N",
        help="run over several nodes on this machine, of N workers each (default: as the faults need it, of 1 each)",
    )
    run.add_argument(
        "--ranks", type=int, metavar="N", help="logical ranks of a script for torchrun, as in `elastic run --ranks`"
    )
    run.add_argument(
        "--restart",
        action="store_true",
        default=None,
        help="a script for torchrun, in rounds, as in `elastic run --restart`",
    )
    run.add_argument("--job", metavar="job.toml", help="a job in TOML in place of a script")
    run.add_argument(
        "--trace",
        metavar="FILE",
        help="in place of a preset: machines come and go as in this trace (lines ms,add|remove,NODE or ms,COUNT, or a "
        "JSON list of counts), or as in one that `elastic chaos list` shows",
    )
    run.add_argument("--speed", type=_speed, metavar="X", help="play the trace X times faster (default 1)")
    run.add_argument(
        "--divide",
        type=_divide,
        metavar="N",
        help="a worker stands for N machines of the trace: of those that go at one instant one in N goes, rounded up",
    )
    run.add_argument(
        "--job-dir", type=Path, metavar="DIR", help="directory of this run (default: ./elastic-chaos/<name>-<n>)"
    )
    run.add_argument(
        "--quiet-run",
        type=Path,
        metavar="DIR",
        help="compare with the undisturbed run of an earlier DIR of the same command, in place of a new one",
    )
    _add_allow(run)
    run.add_argument("--json", action="store_true", help="the report as one JSON object; what happens goes to stderr")
    run.add_argument("script", metavar="SCRIPT", nargs=argparse.REMAINDER, help="the training script, its arguments")
    run.set_defaults(verb=_run, parser=run)


def _add_replay(actions: Any) -> None:
    replay = actions.add_parser(
        "replay",
        help="run the same again from a report",
        description="Run a job with the command, the seed and the plan of a report, and say whether it came out the "
        "same. The undisturbed run is taken from beside the report, where it is still there.",
        epilog=REPLAY_EXAMPLES,
    )
    replay.add_argument("report", type=Path, metavar="REPORT", help="a report.json, or the directory it is in")
    replay.add_argument(
        "--job-dir", type=Path, metavar="DIR", help="directory of this run (default: ./elastic-chaos/<name>-<n>)"
    )
    replay.add_argument("--json", action="store_true", help="what differs as one JSON object; the rest goes to stderr")
    replay.set_defaults(verb=_replay)


def _add_trace(actions: Any) -> None:
    trace = actions.add_parser(
        "trace",
        help="make a trace of machines that come and go",
        description="Write a trace of the shape that spot markets show: bursts of up to six at one instant, and a "
        "median gap of two minutes. Equal options give an equal trace.",
        epilog="examples:\n  elastic chaos trace --nodes 8 --duration 12h --seed 3 > spot.csv\n",
    )
    trace.add_argument("--nodes", type=int, default=8, metavar="N", help="machines at most (default %(default)s)")
    trace.add_argument("--duration", type=_seconds, default=12 * 3600.0, metavar="12h", help="default 12h")
    trace.add_argument("--seed", type=int, default=0, metavar="S", help="default %(default)s")
    trace.set_defaults(verb=_trace)


def _add_allow(parser: Any, more: str = "") -> None:
    parser.add_argument(
        "--allow-unknown",
        metavar="I14",
        help=f"invariants that may stay undecided, such as I14 in a run that ends before its first checkpoint{more}",
    )


def _seconds(text: str) -> float:
    from chaos_tests.scenario.scenario import seconds_of

    try:
        return seconds_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _speed(text: str) -> float:
    from chaos_tests.scenario.scenario import checked_speed

    try:
        return checked_speed(float(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _divide(text: str) -> int:
    from chaos_tests.scenario.scenario import checked_divide

    try:
        return checked_divide(int(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _run(options: argparse.Namespace) -> int:
    from chaos_tests.report.documents import passed
    from chaos_tests.run import request
    from chaos_tests.run.campaign import quiet_run_in

    scenario, words = request.scenario_of(options)
    asked = request.campaign_of(scenario, words, Path())  # whatever is wrong with it is said before a directory is made
    allowed = _allowed(options)
    if options.quiet_run is not None:
        quiet_run_in(options.quiet_run)
    if (why := request.cannot(asked)) and options.json:
        print(json.dumps({"passed": False, "skipped": why}))
    if why:
        print(f"chaos: SKIPPED preset={asked.preset}: {why}", file=sys.stderr)
        return SKIPPED
    home = _home(options.job_dir, words[0] if words else Path(scenario.job).name)
    asked = replace(asked, home=home, allowed=allowed)
    with _told_on_stderr(options.json):
        print(f"chaos: preset {asked.preset}, seed {asked.seed}, in {home}", flush=True)
        findings = _judge(_both_runs(asked, options.quiet_run and options.quiet_run.absolute()))
    if options.json:
        document = json.loads((home / "report.json").read_bytes())
        print(json.dumps({**document, "report": str(home / "report.html")}))
    return ExitCode.DONE if passed(findings, frozenset(allowed)) else NOT_TRUE


def _told_on_stderr(really: bool) -> AbstractContextManager[object]:
    return redirect_stdout(sys.stderr) if really else nullcontext()


def _both_runs(asked: Campaign, earlier: Path | None) -> Campaign:
    """earlier: a directory with an undisturbed run to compare with."""
    from chaos_tests.run import campaign, faulty_run
    from chaos_tests.support import processes

    processes.exit_on_signals()
    if earlier is not None:
        quiet_s = campaign.adopt_quiet_run(asked, earlier)
    else:
        print("\nundisturbed run", flush=True)
        quiet_s = campaign.quiet_run(asked)
    print("\nrun with faults", flush=True)
    return faulty_run.faulty_run(asked, quiet_s)


def _replay(options: argparse.Namespace) -> int:
    from chaos_tests.run import campaign, request

    before = campaign.read_report(options.report)
    beside = (options.report if options.report.is_dir() else options.report.parent).absolute()
    asked = campaign.from_document(Path(), before["asked"])
    if not asked.job:
        campaign.script_of(asked.command, asked.directory)
    if why := request.cannot(asked):
        print(f"chaos: SKIPPED {why}", file=sys.stderr)
        return SKIPPED
    home = _home(options.job_dir, beside.name)
    asked = replace(asked, home=home)
    with _told_on_stderr(options.json):
        print(f"chaos: again preset {asked.preset}, seed {asked.seed}, in {home}", flush=True)
        _judge(_both_runs(asked, beside if (beside / "quiet" / "result.json").exists() else None))
        differ = list(campaign.differences(before, campaign.read_report(home)))
        print(f"replay: {'the same' if not differ else 'DIFFERENT'}")
        for sentence in differ:
            print(f"  {sentence}")
    if options.json:
        print(json.dumps({"same": not differ, "differences": differ, "report": str(home / "report.json")}))
    return NOT_TRUE if differ else ExitCode.DONE


def _report(options: argparse.Namespace) -> int:
    from chaos_tests.report.documents import passed
    from chaos_tests.run import campaign

    asked = campaign.read_campaign(options.dir.absolute())
    if options.allow_unknown is not None:
        asked = replace(asked, allowed=_allowed(options))
    return ExitCode.DONE if passed(_judge(asked), frozenset(asked.allowed)) else NOT_TRUE


def _judge(asked: Campaign) -> Sequence[Judgement]:
    from chaos_tests.report.documents import headline
    from chaos_tests.run import publish

    findings = publish.report(asked)
    print()
    for finding in findings:
        verdict = finding.verdict
        print(f"{finding.invariant.number:>4} {verdict.answer:<15}{finding.invariant.name}: {verdict.because}")
        for place in verdict.at:
            print(f"{'':20}{place}")
    print(f"\nchaos: {headline(findings, frozenset(asked.allowed))} preset={asked.preset} seed={asked.seed}")
    print(f"report: {asked.home / 'report.html'}", flush=True)
    return findings


def _trace(options: argparse.Namespace) -> int:
    from chaos_tests.scenario.traces import NODES_MAX, as_csv, generate

    if not 1 <= options.nodes <= NODES_MAX:
        raise ConfigError(f"--nodes {options.nodes}: 1 to {NODES_MAX}")
    print(as_csv(generate(options.seed, options.nodes, options.duration)), end="")
    return ExitCode.DONE


def _list(options: argparse.Namespace) -> int:
    from chaos_tests.run import listing

    print(json.dumps(listing.document()) if options.json else listing.text())
    return ExitCode.DONE


def _allowed(options: argparse.Namespace) -> tuple[str, ...]:
    from chaos_tests.checkers import INVARIANTS, ROUNDS_INVARIANTS

    named = frozenset(filter(None, (options.allow_unknown or "").split(",")))
    if strange := named - {invariant.number for invariant in (*INVARIANTS, *ROUNDS_INVARIANTS)}:
        raise ConfigError(f"--allow-unknown: there is no invariant {', '.join(sorted(strange))}")
    return tuple(sorted(named))


def _home(chosen: Path | None, script: str) -> Path:
    """A new directory. Raises ConfigError if it cannot be one."""
    from elastic.records.job_directory import default_name, next_free

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
