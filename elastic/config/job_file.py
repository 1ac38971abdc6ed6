"""A job read from TOML text. A ConfigError names file, line and field."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from enum import StrEnum

from elastic.config.job_spec import JobSpec
from elastic.config.names import PAIR_NAME
from elastic.config.options import Compression, Overlap, Reduction, RingKind, Stragglers
from elastic.config.timing import Timing
from elastic.errors import ConfigError

LARGEST = 10**15
"""The largest number in a job file: every number up to it can be sent, and is exact as a double."""


def job_from_toml(text: str, where: str) -> JobSpec:
    """The job in a TOML document: fields of JobSpec at the top, those of Timing in the table [timing], and the
    workers' environment in the table [env], as strings.

    where: the file's name, for messages. Raises ConfigError, with the line where it can be known, for a syntax error,
    an unknown or missing field, a wrong type, and a broken relation.
    """
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, and lists in lists in lists
        raise ConfigError(f"{where}: not valid TOML: {error}") from error
    return job_from_table(document, Places(text, where), where)


def job_from_table(document: Mapping[str, object], place: Places, where: str) -> JobSpec:
    """The job in such a document. where: for messages. Raises ConfigError, as job_from_toml does."""
    timing_table, env_table = _inner_table(document, "timing", place), _inner_table(document, "env", place)
    known = {spec.name: str(spec.type) for spec in fields(JobSpec) if spec.name not in ("timing", "env")}
    rest = {name: value for name, value in document.items() if name not in ("timing", "env")}
    values = checked_fields(rest, known, place, "")
    for name in ("name", "command", "workers"):
        if name not in values:
            raise ConfigError(f"{where}: {name} is missing")
    timings = checked_fields(timing_table, {spec.name: str(spec.type) for spec in fields(Timing)}, place, "timing.")
    for name, value in env_table.items():
        if not PAIR_NAME.fullmatch(name):
            raise ConfigError(f"{place.of('env')}: env: {name!r:.80} cannot be the name of a variable")
        if not isinstance(value, str):
            raise ConfigError(
                f"{place.of(f'env.{name}')}: env.{name}={_shown(value)} must be a string; put it into quotes"
            )
    env = tuple(f"{name}={value}" for name, value in env_table.items())
    try:
        return JobSpec(**values, env=env, timing=Timing(**timings))  # type: ignore[arg-type]  # their types are compared
    except ConfigError as error:
        named = re.match(r"[a-z_.]+", str(error))
        raise ConfigError(f"{place.of(named[0]) if named else where}: {error}") from error


def _inner_table(document: Mapping[str, object], name: str, place: Places) -> dict[str, object]:
    table = document.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{place.of(name)}: {name} must be a table; write [{name}] above its fields, or give a dict")
    return table


class Places:
    """In which line of a TOML document, which has been found valid, a field is given."""

    def __init__(self, text: str, where: str) -> None:
        self._where = where
        self._lines: dict[str, int] = {}
        table, inside = "", ""
        for number, line in enumerate(text.splitlines(), start=1):
            if inside:  # a string of several lines
                inside = "" if inside in line else inside
                continue
            if header := re.match(r"\[([^\[\]]+)\]", line.strip()):
                name = header[1].strip()
                table = f"{name}."
                self._lines.setdefault(name, number)
            elif key := re.match(r"""\s*["']?([A-Za-z0-9_.-]+)["']?\s*=""", line):
                self._lines.setdefault(f"{table}{key[1]}", number)
            inside = next((quote for quote in ('"""', "'''") if line.count(quote) % 2), "")

    def of(self, name: str) -> str:
        """ "FILE, line N", or the file alone."""
        return f"{self._where}, line {self._lines[name]}" if name in self._lines else self._where


def checked_fields(
    table: Mapping[str, object], known: Mapping[str, str], place: Places, prefix: str
) -> dict[str, object]:
    """The values of a table of a TOML document. known: field -> its type, one of those in _WANTED. prefix: of the names
    in messages. Raises ConfigError with file, line and field for an unknown field, and a value of another type."""
    values: dict[str, object] = {}
    for name, value in table.items():
        at = place.of(f"{prefix}{name}")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known are {', '.join(sorted(known))}"
            raise ConfigError(f"{at}: unknown field {prefix}{name}; {hint}")
        try:
            values[name] = _converted(value, known[name])
        except ValueError as error:
            raise ConfigError(f"{at}: {prefix}{name}={_shown(value)} must be {error}") from None
    return values


def _shown(value: object) -> str:
    """For a message. Python refuses to spell numbers of thousands of digits, which TOML can give in hexadecimal."""
    try:
        return repr(value)
    except ValueError:
        return "(a number of thousands of digits)"


def _converted(value: object, type_name: str) -> object:
    """The value as a field of that annotated type; ValueError says what it must be."""
    match type_name, value:
        case "bool", bool():
            return value
        case "float", float():
            return value
        case "float", int() if not isinstance(value, bool) and abs(value) <= LARGEST:
            return float(value)
        case "int" | "int | None", int() if not isinstance(value, bool) and abs(value) <= LARGEST:
            return value
        case "str", str():
            return value
        case "tuple[str, ...]", list() if all(isinstance(word, str) for word in value):
            return tuple(value)
        case _, str() if value in list(_CHOICES.get(type_name, ())):
            return _CHOICES[type_name](value)
    raise ValueError(_WANTED[type_name])


_ENUMS = (Compression, Overlap, Reduction, RingKind, Stragglers)
_CHOICES: dict[str, type[StrEnum]] = {kind.__name__: kind for kind in _ENUMS}
_WANTED = {
    "bool": "true or false",
    "float": "a number of seconds",
    "int": "a whole number of at most 15 digits",
    "int | None": "a whole number of at most 15 digits",
    "str": "a string",
    "tuple[str, ...]": "a list of strings",
    **{name: " or ".join(repr(str(choice)) for choice in kind) for name, kind in _CHOICES.items()},
}
