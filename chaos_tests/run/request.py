"""From the words of a command line to a campaign: what is asked for, checked before anything is started."""

from __future__ import annotations

import argparse
import math
import secrets
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from chaos_tests.cluster import why_not
from chaos_tests.run.campaign import RESTARTS, Campaign, ground, script_of
from chaos_tests.scenario.faults import Ground
from chaos_tests.scenario.scenario import Scenario, scenario_from_toml
from chaos_tests.scenario.schedule import Planned, plan_of_trace, preset_of
from chaos_tests.scenario.traces import divided, read_trace
from elastic.config import JobSpec, job_from_toml
from elastic.errors import ConfigError
from elastic.wire import codec

WORKERS = 3
PRESET = "kill"
TRACES = Path(__file__).resolve().parents[1] / "traces"


def scenario_of(options: argparse.Namespace) -> tuple[Scenario, list[str]]:
    """What the command line and the file on it ask for, and the words of the script. Raises ConfigError. options: have
    the names of a Scenario's fields; None: not said.

    The script's words are those behind `--`. Before it a scenario may stand, and options behind that.
    """
    words: list[str] = options.script
    scenario = Scenario()
    if words and words[0].endswith(".toml"):
        path, rest = Path(words[0]), words[1:]
        scenario = scenario_from_toml(_read(path), str(path))
        scenario = replace(scenario, job=_beside(path, scenario.job), trace=_beside(path, scenario.trace))
        at = rest.index("--") if "--" in rest else len(rest)
        options.parser.parse_args([*rest[:at], "--", *rest[at + 1 :]], options)
        words = options.script
    names = [field.name for field in fields(Scenario)]
    said = {name: value for name in names if (value := getattr(options, name, None)) is not None}
    if "preset" in said and "trace" in said:
        raise ConfigError("give --preset or --trace: each of them says which faults come when")
    if "preset" in said:
        scenario = replace(scenario, faults=(), trace="", speed=None, divide=None)
    if "trace" in said:
        scenario = replace(scenario, faults=(), preset="")
    return replace(scenario, **said), words[1:] if words[:1] == ["--"] else words


def campaign_of(scenario: Scenario, words: Sequence[str], home: Path) -> Campaign:
    """Raises ConfigError for what cannot be run."""
    if not scenario.job:
        if not words:
            raise ConfigError("no script given: write `elastic chaos run -- train.py`, or give --job job.toml")
        workers, command, job = scenario.workers if scenario.workers is not None else WORKERS, tuple(words), ""
        _check_workers("--workers", workers)
        if scenario.ranks is not None and scenario.ranks < 1:
            raise ConfigError(f"--ranks {scenario.ranks} must be at least 1")
    else:
        if words:
            raise ConfigError(f"{scenario.job} names the script; leave out {' '.join(words)!r:.200}")
        if scenario.ranks is not None:
            raise ConfigError(f"--ranks {scenario.ranks}: {scenario.job} says how many there are; write ranks = in it")
        if scenario.restart is not None:
            raise ConfigError(f"--restart: {scenario.job} says whether it is; write restart = true in it")
        spec = _specification(scenario)
        workers, command, job = spec.workers, spec.command, codec.to_json(spec).decode()
    seed = scenario.seed if scenario.seed is not None else secrets.randbelow(1_000_000)
    preset, plan = _faults(scenario, workers)
    if not job:
        script_of(command)
    return Campaign(
        home,
        command,
        workers,
        preset,
        seed,
        scenario.duration_s,
        plan,
        job,
        str(Path.cwd()),
        scenario.ranks or 0,
        restart=bool(scenario.restart),
        slots=_slots(scenario, workers),
    )


def _slots(scenario: Scenario, workers: int) -> int:
    """Workers of each node; 0: nothing was said. Raises ConfigError."""
    if (slots := scenario.slots) is None:
        return 0
    if slots < 1 or workers % slots or workers == slots:
        raise ConfigError(
            f"--slots {slots}: {workers} workers do not fill two nodes or more of {slots} each; give --workers "
            f"{2 * max(1, slots)}, for example"
        )
    return slots


def _faults(scenario: Scenario, workers: int) -> tuple[str, tuple[Planned, ...]]:
    """The preset's name, or the plan itself and a name for people."""
    if scenario.trace:
        path = trace_path(scenario.trace)
        trace = read_trace(_read(path), str(path))
        if scenario.divide is not None:
            trace = divided(trace, scenario.divide)
        limit_s = scenario.duration_s if scenario.duration_s is not None else math.inf
        if not (plan := plan_of_trace(trace, workers, scenario.speed or 1.0, limit_s)):
            raise ConfigError(f"{path}: no node of {workers} goes in that time; give another --duration or --speed")
        return f"trace {path.name}", plan
    for name, value in (("--speed", scenario.speed), ("--divide", scenario.divide)):
        if value is not None:
            raise ConfigError(f"{name} is that of a trace; give --trace too")
    if scenario.faults:
        if scenario.duration_s is not None:
            raise ConfigError("duration is that of a preset or a trace; each [[fault]] says with `at` when it comes")
        return "scenario", scenario.faults
    preset_of(preset := scenario.preset or PRESET)
    return preset, ()


def cannot(campaign: Campaign) -> str:
    """Why nothing of it can be done on this machine, or nothing."""
    return why_not() if ground(campaign) is Ground.NETWORK else ""


def _specification(scenario: Scenario) -> JobSpec:
    """What the job on one machine is; each of the two runs has checkpoints of its own."""
    spec = job_from_toml(_read(Path(scenario.job)), scenario.job)
    workers = scenario.workers if scenario.workers is not None else spec.workers
    _check_workers("workers", workers)
    return replace(
        spec,
        workers=workers,
        min_workers=min(spec.min_workers, workers),
        max_restarts=RESTARTS,
        max_workers=None,
        labels=(),
        checkpoint_dir="",
    )


def trace_path(name: str) -> Path:
    """A file, or one of the traces that come along. Raises ConfigError if it is neither."""
    if Path(name).exists() or name not in traces_here():
        return Path(name)
    return TRACES / f"{name}.csv"


def traces_here() -> list[str]:
    """Names of the traces that come along."""
    return sorted(path.stem for path in TRACES.glob("*.csv"))


def _check_workers(name: str, workers: int) -> None:
    if workers < 2:
        raise ConfigError(f"{name}={workers}: at least 2 are needed, because one has to survive")


def _beside(scenario: Path, name: str) -> str:
    return str(scenario.parent / name) if name and name not in traces_here() else name


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        because = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"{path} cannot be read: {because}") from error
