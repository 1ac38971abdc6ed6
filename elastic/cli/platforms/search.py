"""`elastic search`: hyperparameter search with Optuna; each trial is a job, of this machine or of a fleet."""

from __future__ import annotations

import argparse
import json
import re
import secrets
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic.cli.options import add_replicas, client_of, known_replicas
from elastic.config import check_name
from elastic.errors import ConfigError, ExitCode
from elastic.platforms.search.decisions import JobState, TrialJobView
from elastic.records.files import create_atomically

if TYPE_CHECKING:
    from elastic.platforms.search.search import Search, TrialJobs
    from elastic.platforms.search.study_file import StudyFile

EXAMPLES = """\
examples:
  elastic search study.py --trials 20 --workers 2                     on this machine, one trial after the other
  elastic search study.py --trials 20 --parallel 2 --dir lr-search    the same command again goes on
  elastic search study.py --trials 50 --parallel 8 --job job.toml --rendezvous 127.0.0.1:7070

study.py:
  metric = "loss"                       what the script logs with step.log or job.log; its last value counts
  def trial(trial):                     an optuna.Trial; returns the script and its arguments
      lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
      return ["train.py", "--lr", lr]
  direction = "maximize"                default: minimize
  def sampler(seed): ...                default: optuna.samplers.TPESampler(seed=seed)
  pruner = optuna.pruners.MedianPruner()   default: none

exit codes:
  0 all trials are over, and one has a value    1 none has    2 bad input    3 nobody answers    130 interrupted
"""


def add(verbs: Any) -> None:
    verb = verbs.add_parser(
        "search",
        help="search hyperparameters with Optuna, each trial a job",
        description="Search hyperparameters with Optuna. Each trial is a job, of this machine or of a fleet. A search "
        "that was ended, in any way, goes on with the same command.",
        epilog=EXAMPLES,
    )
    verb.add_argument("study", type=Path, metavar="STUDY.PY", help="Python file that describes the study, see below")
    verb.add_argument("--trials", type=int, required=True, metavar="N", help="number of trials of the whole study")
    verb.add_argument("--parallel", type=int, default=1, metavar="K", help="trials that run at a time (default 1)")
    verb.add_argument(
        "--dir",
        type=Path,
        metavar="DIR",
        help="directory from which a search goes on (default: ./elastic-search/<STUDY>)",
    )
    verb.add_argument(
        "--workers", type=int, default=1, metavar="W", help="workers of a trial on this machine (default 1)"
    )
    verb.add_argument(
        "--job",
        type=Path,
        metavar="JOB.TOML",
        help="run trials on a fleet, as this job says, with the command of the trial",
    )
    add_replicas(verb, verb.add_mutually_exclusive_group())
    verb.add_argument("--json", action="store_true", help="a JSON line for each trial that ends, and one for the best")
    verb.set_defaults(verb=_search)


def _search(options: argparse.Namespace) -> int:
    from elastic.platforms.search.search import Search
    from elastic.platforms.search.study_file import read_study

    for name in ("trials", "parallel", "workers"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name}={getattr(options, name)} must be at least 1")
    file = read_study(options.study)
    home = (options.dir or Path("elastic-search") / options.study.stem).absolute()
    home.mkdir(parents=True, exist_ok=True)
    jobs = _jobs_of(options, file, home)
    search = Search(file, options.study, home, jobs, options.trials, options.parallel)
    shown = SearchView(search, jobs, file.metric, as_json=options.json)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        search.run(shown.ended, shown.looked)
    except BaseException:
        shown.close()
        print("elastic: stopping the trials; the same command goes on with them", file=sys.stderr, flush=True)
        search.close(interrupted=True)
        raise
    shown.close()
    search.close(interrupted=False)
    return shown.summary()


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _jobs_of(options: argparse.Namespace, file: StudyFile, home: Path) -> TrialJobs:
    if options.job is None:
        if options.rendezvous != known_replicas():
            raise ConfigError("a fleet needs --job JOB.TOML, with workers, min_workers and checkpoint_dir of a trial")
        from elastic.platforms.search.local_jobs import LocalJobs

        return LocalJobs(home, ("--workers", str(options.workers)), file.metric)
    if options.rendezvous is None:
        raise ConfigError("--job is for a fleet; give --rendezvous too, or --workers instead")
    from elastic.cli.fleet.submit import read_job_file
    from elastic.platforms.search.fleet_jobs import FleetJobs

    return FleetJobs(client_of(options), read_job_file(options.job), _name_of(home), file.metric)


def _name_of(home: Path) -> str:
    """What the names of a search's jobs begin with: no other search has it, and the same search has it again."""
    base = re.sub(r"[^a-z0-9]+", "-", home.name.lower()).strip("-")[:40].strip("-") or "study"
    with suppress(FileExistsError):
        create_atomically(home / "name", f"{base}-{secrets.token_hex(3)}".encode())
    return check_name("the name of the search", (home / "name").read_text())


class SearchView:
    """What a person sees: a table below on a terminal, a line for each trial elsewhere."""

    def __init__(self, search: Search, jobs: TrialJobs, metric: str, *, as_json: bool) -> None:
        self._search = search
        self._jobs = jobs
        self._metric = metric
        self._as_json = as_json
        self._live: Any = None
        self._told: dict[int, str] = {}
        """Trial -> why it waited at the last look, where no table shows it."""

    def ended(self, trial: Any, seen: TrialJobView) -> None:
        from elastic.platforms.search.search import entry

        told = entry(trial, self._jobs.name(trial.number))
        if self._as_json:
            print(json.dumps({"event": "trial", **told}), flush=True)
        else:
            self._say(_line(told, self._metric))

    def looked(self) -> None:
        if self._as_json or not sys.stderr.isatty():
            self._tell_waiting()
            return
        from rich.console import Console
        from rich.live import Live

        if self._live is None:
            self._live = Live(console=Console(stderr=True), transient=True, auto_refresh=False)
            self._live.start()
        self._live.update(self._table(), refresh=True)

    def _tell_waiting(self) -> None:
        """A line for each new reason why a trial waits."""
        for number, one in sorted(self._search.active.items()):
            if one.seen.state is JobState.WAITS and one.seen.because != self._told.get(number, ""):
                self._say(f"trial {number} waits: {one.seen.because}")
            self._told[number] = one.seen.because

    def close(self) -> None:
        """Take the table off the terminal."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def summary(self) -> int:
        """Say which trial is the best. Returns the exit code."""
        from elastic.platforms.search.search import entry

        over = self._search.study.get_trials(deepcopy=False)
        states = [trial.state.name.lower() for trial in over]
        counts = {state: states.count(state) for state in sorted(set(states))}
        best = self._search.study.best_trial if "complete" in counts else None
        told = entry(best, self._jobs.name(best.number)) if best is not None else None
        if self._as_json:
            print(json.dumps({"event": "summary", "trials": counts, "best": told}), flush=True)
        else:
            print(f"{', '.join(f'{count} {state}' for state, count in counts.items()) or 'no trials'}")
            print(f"best: {_line(told, self._metric)}" if told is not None else "no trial has a value")
        return ExitCode.DONE if best is not None else ExitCode.SCRIPT_FAILED

    def _say(self, line: str) -> None:
        if self._live is not None:
            self._live.console.print(f"elastic: {line}", highlight=False, markup=False, soft_wrap=True)
        else:
            print(f"elastic: {line}", file=sys.stderr, flush=True)

    def _table(self) -> Any:
        from rich.table import Column, Table
        from rich.text import Text

        # Names and values may have brackets, which are no markup.
        table = Table("trial", "state", "workers", "step", Column(Text(self._metric)), "parameters", box=None)
        for number, one in sorted(self._search.active.items()):
            last = max(one.seen.values, default=None)
            step, value = ("", "") if last is None else (str(last), f"{one.seen.values[last]:.6g}")
            parameters = " ".join(f"{name}={_short(given)}" for name, given in one.trial.params.items())
            state = f"{one.seen.state}{': ' * bool(one.seen.because)}{one.seen.because}"
            table.add_row(str(number), Text(state), str(one.seen.workers), step, value, Text(parameters))
        return table


def _short(given: Any) -> str:
    return f"{given:.6g}" if isinstance(given, float) else str(given)


def _line(told: dict[str, Any], metric: str) -> str:
    parameters = " ".join(f"{name}={value}" for name, value in told["params"].items())
    value = f", {metric} {told['value']}" if told["value"] is not None else ""
    because = f": {told['because']}" if told["because"] else ""
    return f"trial {told['trial']} {told['state']}{value}, {parameters}{because}"
