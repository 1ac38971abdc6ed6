"""A scenario: what `elastic chaos run` is asked for, written down in TOML.

preset = "everything"        or faults with commas between; or [[fault]] tables; or a trace
seed = 7
duration = "2m"
workers = 3
slots = 2                    several nodes, of so many workers each
ranks = 4                    of a script for torchrun, see docs/ddp.md
restart = true               a script for torchrun in rounds, see docs/restart.md
job = "job.toml"             in place of a script on the command line; from the scenario's directory
trace = "spot.csv"           of nodes that come and go; from the scenario's directory, or one that comes along
speed = 20                   so many times faster than it was recorded
divide = 8                   a worker stands for so many nodes of it

[[fault]]
at = "10s"                   from the first applied step
kind = "kill-in-recovery"
place = "ring_up"            one of the kind's places
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chaos_tests.scenario.catalogue import CATALOGUE
from chaos_tests.scenario.schedule import Planned
from chaos_tests.scenario.traces import NODES_MAX
from elastic.errors import ConfigError

SPEED_MAX = 1e6
NAMES = ("preset", "seed", "duration", "workers", "slots", "ranks", "restart", "job", "trace", "speed", "divide")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """job, trace: paths as they were written. What was not said is empty, or None."""

    preset: str = ""
    seed: int | None = None
    duration_s: float | None = None
    workers: int | None = None
    slots: int | None = None
    ranks: int | None = None
    restart: bool | None = None
    job: str = ""
    trace: str = ""
    speed: float | None = None
    divide: int | None = None
    faults: tuple[Planned, ...] = ()


def seconds_of(text: str) -> float:
    """90, 90s, 2m or 1h. Raises ValueError."""
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|s|m|h)?", text)
    if found is None:
        raise ValueError(f"{text!r:.80} is no duration; write 90, 90s, 2m or 1h")
    return float(found[1]) * {"ms": 0.001, "s": 1, "m": 60, "h": 3600, None: 1}[found[2]]


def scenario_from_toml(text: str, where: str) -> Scenario:
    """where: the file's name, for messages. Raises ConfigError, saying what to write."""
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid TOML: {error}") from error
    tables = document.pop("fault", [])
    if not isinstance(tables, list):
        raise ConfigError(f"{where}: write [[fault]] above the fields of a fault")
    try:
        _check_names(document, NAMES)
        scenario = Scenario(
            preset=_text(document, "preset"),
            seed=_integer(document, "seed"),
            duration_s=_duration(document, "duration"),
            workers=_integer(document, "workers"),
            slots=_integer(document, "slots"),
            ranks=_integer(document, "ranks"),
            restart=_flag(document, "restart"),
            job=_text(document, "job"),
            trace=_text(document, "trace"),
            speed=_speed(document),
            divide=_divide(document),
            faults=_faults(tables),
        )
        if sum(map(bool, (scenario.preset, scenario.trace, scenario.faults))) > 1:
            raise ValueError("give one of preset, trace and [[fault]]: each of them says which faults come when")
        for name, value in (("speed", scenario.speed), ("divide", scenario.divide)):
            if value is not None and not scenario.trace:
                raise ValueError(f"{name} is that of a trace; leave it out")
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    return scenario


def _faults(tables: Sequence[object]) -> tuple[Planned, ...]:
    planned = []
    for number, table in enumerate(tables, start=1):
        if not isinstance(table, dict):
            raise ValueError("write [[fault]] above the fields of a fault")
        _check_names(table, ("at", "kind", "place"))
        kind, place, at_s = _text(table, "kind"), _text(table, "place"), _duration(table, "at")
        if kind not in CATALOGUE:
            raise ValueError(f"fault {number}: there is no kind {kind!r:.80}; `elastic chaos list` shows them")
        if at_s is None:
            raise ValueError(f'fault {number}: at is missing; write at = "10s"')
        known = CATALOGUE[kind].places
        if known and not place:
            place = known[0]
        if place and place not in known:
            raise ValueError(f"fault {number}: {kind} has no place {place!r:.80}; its places are {', '.join(known)}")
        planned.append(Planned(number, at_s, kind, place))
    return tuple(sorted(planned, key=lambda one: one.at_s))


def _check_names(table: Mapping[str, Any], known: Sequence[str]) -> None:
    if strange := sorted(set(table) - set(known)):
        raise ValueError(f"unknown field {strange[0]!r:.80}; known are {', '.join(known)}")


def _text(table: Mapping[str, Any], name: str) -> str:
    value = table.get(name, "")
    if not isinstance(value, str) or "\0" in value:
        raise ValueError(f"{name} must be a text; put it into quotes")
    return value


def _integer(table: Mapping[str, Any], name: str) -> int | None:
    value = table.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
        raise ValueError(f"{name} must be a whole number of at least 0")
    return value


def _flag(table: Mapping[str, Any], name: str) -> bool | None:
    value = table.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false")
    return value


def _duration(table: Mapping[str, Any], name: str) -> float | None:
    value = table.get(name)
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9:
        return float(value)
    if not isinstance(value, str):
        raise ValueError(f'{name} must be a duration, for example "90s"')
    return seconds_of(value)


def _speed(table: Mapping[str, Any]) -> float | None:
    value = table.get("speed")
    if value is None:
        return None
    return checked_speed(value)


def _divide(table: Mapping[str, Any]) -> int | None:
    value = table.get("divide")
    return None if value is None else checked_divide(value)


def checked_divide(value: object) -> int:
    """Raises ValueError unless it is a number of nodes."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= NODES_MAX:
        raise ValueError(f"divide must be a whole number of nodes, 1 to {NODES_MAX}: 8 makes 4 workers of 32 nodes")
    return value


def checked_speed(value: object) -> float:
    """Raises ValueError unless it is a factor."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= SPEED_MAX
    if not good or not math.isfinite(float(value)):  # type: ignore[arg-type]  # it is a number here
        raise ValueError(f"speed must be a number above 0 and at most {SPEED_MAX:g}: 20 plays an hour in three minutes")
    return float(value)  # type: ignore[arg-type]
