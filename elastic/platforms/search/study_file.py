"""What a study.py says: a function of a trial, and names that Optuna is told of."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic.errors import ConfigError

DIRECTIONS = ("minimize", "maximize")


@dataclass(frozen=True, slots=True)
class StudyFile:
    """words: makes the words of a trial's command, a script and its arguments, from an optuna.Trial. sampler: makes
    Optuna's sampler from the number of a trial."""

    words: Callable[[Any], Sequence[object]]
    sampler: Callable[[int], Any]
    pruner: Any
    metric: str
    direction: str


def read_study(path: Path) -> StudyFile:
    """Run a study.py. Raises ConfigError for a file that is none, and what the file itself raises."""
    check_installed()
    import optuna

    spec = importlib.util.spec_from_file_location("elastic_study", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"{path} is no Python file; give one that defines `trial` and `metric`")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.absolute()))
    spec.loader.exec_module(module)
    words, metric = getattr(module, "trial", None), getattr(module, "metric", None)
    if not callable(words):
        raise ConfigError(f"{path} has no function trial(trial); it returns a script and its arguments")
    if not isinstance(metric, str) or not metric:
        raise ConfigError(f"{path} has no metric; give the name that the script logs, such as metric = 'val_loss'")
    direction = getattr(module, "direction", DIRECTIONS[0])
    if direction not in DIRECTIONS:
        raise ConfigError(f"{path}: direction={direction!r} must be one of {', '.join(DIRECTIONS)}")
    make_sampler = getattr(module, "sampler", lambda seed: optuna.samplers.TPESampler(seed=seed))
    if not callable(make_sampler):
        raise ConfigError(f"{path}: sampler must be a function of a seed, such as optuna.samplers.RandomSampler")

    def sampler(trial: int) -> Any:
        made = make_sampler(trial)
        # A grid puts its points into an order by its seed, and takes the one with the trial's number.
        return make_sampler(0) if isinstance(made, optuna.samplers.GridSampler) else made

    pruner = getattr(module, "pruner", None) or optuna.pruners.NopPruner()
    return StudyFile(words, sampler, pruner, metric, direction)


def command_of(words: Sequence[object], where: Path) -> list[str]:
    """The words of a trial as strings. Raises ConfigError unless there is at least one."""
    if isinstance(words, str) or not words:
        raise ConfigError(f"{where}: trial() has returned {words!r:.80}, and not a list of a script and its arguments")
    return [str(word) for word in words]


def check_installed() -> None:
    """Raises ConfigError if Optuna is missing."""
    if importlib.util.find_spec("optuna") is None or importlib.util.find_spec("sqlalchemy") is None:
        raise ConfigError("elastic search needs Optuna: pip install 'elastic-ring[search]'")
