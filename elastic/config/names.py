"""What names, NAME=VALUE pairs and texts of a job may be. Each ConfigError names the thing, its value, and a value that
would do."""

from __future__ import annotations

import re
from collections.abc import Sequence

from elastic.errors import ConfigError

NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
"""Names of jobs and nodes: they become store keys, file names and, before a dot, parts of worker ids."""

PAIR_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,62}")


def check_name(what: str, name: str) -> str:
    """The name itself, if it may be one. Raises ConfigError with the rule otherwise."""
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"{what}={name!r} must be 1 to 63 lower-case letters, digits and inner hyphens, for example "
            f"{_suggest_name(name)!r}"
        )
    return name


def check_pairs(what: str, pairs: Sequence[str]) -> None:
    """Raises ConfigError for what is not NAME=VALUE, and for a name that comes twice."""
    seen: set[str] = set()
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not PAIR_NAME.fullmatch(name) or "\0" in value:
            said = pair if what == "labels" else name  # a value may be a secret
            raise ConfigError(f"{what}: {said!r:.80} must be NAME=VALUE, for example gpu=h100")
        if name in seen:
            raise ConfigError(f"{what}: {name} is given twice; leave one out")
        seen.add(name)


def _suggest_name(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:63].strip("-") or "job"


def is_text(value: str) -> bool:
    """Whether it can leave the process: names of files, and JSON, can hold what is no text."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_text(what: str, value: object) -> None:
    """Raises ConfigError unless it is UTF-8, as everything has to be that one process tells another."""
    if not is_text(str(value)):
        raise ConfigError(f"{what}={str(value)!r} is not UTF-8; rename it, or give another")
