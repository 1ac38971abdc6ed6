"""From the words of a command line to a campaign: what is asked for, checked before anything is started."""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from chaos_tests.harness.campaign import RESTARTS, Campaign
from chaos_tests.harness.scenario import Scenario, scenario_from_toml
from chaos_tests.harness.schedule import Planned, preset_of
from elastic import codec
from elastic.config import job_from_toml
from elastic.errors import ConfigError

WORKERS = 3
PRESET = "kill"


def scenario_of(options: argparse.Namespace) -> tuple[Scenario, list[str]]:
    """What the command line and the file on it ask for, and the words of the script. Raises ConfigError.

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
    said = {
        name: value
        for name, value in (
            ("preset", options.preset),
            ("seed", options.seed),
            ("duration_s", options.duration),
            ("workers", options.workers),
            ("job", options.job),
        )
        if value is not None
    }
    if "preset" in said:
        scenario = replace(scenario, faults=(), trace="")
    return replace(scenario, **said), words[1:] if words[:1] == ["--"] else words


def campaign_of(scenario: Scenario, words: Sequence[str], home: Path) -> Campaign:
    """Raises ConfigError for what cannot be run."""
    preset = scenario.preset or ("" if scenario.faults else PRESET)
    if preset:
        preset_of(preset)
    seed = scenario.seed if scenario.seed is not None else secrets.randbelow(1_000_000)
    plan: tuple[Planned, ...] = scenario.faults
    preset = preset or "scenario"
    if not scenario.job:
        workers = scenario.workers if scenario.workers is not None else WORKERS
        if not words:
            raise ConfigError("no script given: write `elastic chaos run -- train.py`, or give --job job.toml")
        _check_workers("--workers", workers)
        options = ("--workers", str(workers))
        return Campaign(home, tuple(words), options, preset, seed, scenario.duration_s, plan, "", str(Path.cwd()))
    if words:
        raise ConfigError(f"{scenario.job} names the script; leave out {' '.join(words)!r:.200}")
    spec = job_from_toml(_read(Path(scenario.job)), scenario.job)
    if scenario.workers is not None:
        spec = replace(spec, workers=scenario.workers, min_workers=min(spec.min_workers, scenario.workers))
    _check_workers("workers", spec.workers)
    # Of one machine, with checkpoints of its own for each of the two runs.
    spec = replace(spec, max_restarts=RESTARTS, max_workers=None, labels=(), checkpoint_dir="")
    job = codec.job_to_json(spec).decode()
    return Campaign(home, spec.command, (), preset, seed, scenario.duration_s, plan, job, str(Path.cwd()))


def _check_workers(name: str, workers: int) -> None:
    if workers < 2:
        raise ConfigError(f"{name}={workers}: at least 2 are needed, because one has to survive")


def _beside(scenario: Path, name: str) -> str:
    return str(scenario.parent / name) if name else ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        because = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"{path} cannot be read: {because}") from error
