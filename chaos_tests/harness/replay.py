"""A run once more from its report: the same command, seed and plan; and whether it came out the same."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from chaos_tests.harness.campaign import Campaign, from_document
from elastic.errors import ConfigError

Report = Mapping[str, Any]


def read_report(path: Path) -> Report:
    """report.json, or that of a directory. Raises ConfigError if it is none."""
    path = path / "report.json" if path.is_dir() else path
    try:
        document: Report = json.loads(path.read_bytes())
        from_document(path.parent, document["asked"])
        list(differences(document, document))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; give a report.json of `elastic chaos`") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        because = f"{type(error).__name__} {error}"
        raise ConfigError(f"{path} is no report of `elastic chaos`: {because!s:.200}") from error
    return document


def campaign_again(report: Report, home: Path) -> Campaign:
    """What the report was asked for, to be run in another directory."""
    return from_document(home, report["asked"])


def differences(before: Report, after: Report) -> Iterator[str]:
    """Sentences on what came out differently. Times and victims are not compared: machines are not that regular."""
    answers = {one["number"]: one["answer"] for one in before["invariants"]}
    for one in after["invariants"]:
        was = answers.get(one["number"], "not decided")
        if one["answer"] != was:
            yield f"{one['number']} is {one['answer']}, was {was}: {one['because']}"
    for name in ("digest", "quiet_digest", "steps"):
        if before[name] != after[name]:
            yield f"{name} is {after[name]!s:.16}, was {before[name]!s:.16}"
    done, then = _kinds(after), _kinds(before)
    for number in sorted({*done, *then}):
        if done.get(number) != then.get(number):
            was, now = (kinds.get(number, "not done") for kinds in (then, done))
            yield f"fault {number} is {now}, was {was}"


def _kinds(report: Report) -> dict[int, str]:
    """Of the injected faults."""
    return {int(one["number"]): str(one["fault"]) for one in report["faults"]}
