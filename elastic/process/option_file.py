"""Options of a command from a TOML file: what argparse knows of the command is the one declaration of both.

A key is the name of an option without its dashes: `jobs_dir = "/var/lib/elastic"` is `--jobs-dir /var/lib/elastic`. An
option that may be given several times is a list, and a flag is true or false. The command line counts more than the
file, and the file more than the environment.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic.config import Places, checked_fields
from elastic.errors import ConfigError
from elastic.process import file_modes

_TYPES = {None: "str", Path: "str", int: "int", float: "float"}


class OptionFile:
    """The options of one command line and of the file that it names.

    parser: of the command. path: the file; None: there is none. words: the command line. but: options that stand on the
    command line only.
    """

    def __init__(
        self, parser: argparse.ArgumentParser, path: Path | None, words: Sequence[str], but: Collection[str]
    ) -> None:
        self.path = path
        self._parser = parser
        self._words = list(words)
        self._actions = {
            action.dest: action
            for action in parser._actions
            if action.option_strings and action.dest not in {"help", *but}
        }
        self._place: Places | None = None
        self._from_file: dict[str, Any] = {}

    def options(self) -> dict[str, Any]:
        """All options but those on the command line only, by name, as argparse would give them. Reads the file. Raises
        ConfigError naming file, line and key."""
        values = {name: action.default for name, action in self._actions.items()}
        given = self.given()
        place, from_file = self._read() if self.path is not None else (None, {})
        self._place, self._from_file = place, {name: value for name, value in from_file.items() if name not in given}
        return {**values, **self._from_file, **given}

    def given(self) -> dict[str, Any]:
        """What the command line says."""
        found = _without_defaults(self._parser, self._words)
        return {name: value for name, value in found.items() if name in self._actions}

    def placed(self, error: ConfigError) -> ConfigError:
        """The error about an option, with file and line if the option's value is from there."""
        named = re.match(r"--([a-z-]+)", str(error))
        name = named[1].replace("-", "_") if named else ""
        if self._place is None or name not in self._from_file:
            return error
        return ConfigError(f"{self._place.of(name)}: {error}")

    def _read(self) -> tuple[Places, dict[str, Any]]:
        assert self.path is not None
        try:
            with open(self.path, encoding="utf-8", opener=file_modes.regular) as file:
                text = file.read()
            document = tomllib.loads(text)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{self.path}: not valid TOML: {error}") from error
        place = Places(text, str(self.path))
        values = checked_fields(document, {name: _type_of(action) for name, action in self._actions.items()}, place, "")
        for name, value in values.items():
            choices = self._actions[name].choices
            if choices is not None and value not in choices:
                raise ConfigError(f"{place.of(name)}: {name}={value!r} must be {' or '.join(map(repr, choices))}")
        return place, {name: _converted(self._actions[name], value) for name, value in values.items()}


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Names of options with another value."""
    return [name for name in after if before[name] != after[name]]


def _type_of(action: argparse.Action) -> str:
    if action.nargs == 0:
        return "bool"
    if isinstance(action.default, list):
        return "tuple[str, ...]"
    return _TYPES[action.type]  # type: ignore[index]


def _converted(action: argparse.Action, value: object) -> object:
    if isinstance(value, tuple):
        return list(value)
    return Path(value) if action.type is Path and isinstance(value, str) else value


def _without_defaults(parser: argparse.ArgumentParser, words: Sequence[str]) -> dict[str, Any]:
    """What the words alone say."""
    defaults = {action: action.default for action in parser._actions}
    try:
        for action in defaults:
            action.default = argparse.SUPPRESS
        return vars(parser.parse_args(list(words)))
    finally:
        for action, default in defaults.items():
            action.default = default
