"""What the leader alone computes, as the note of an operation of one unit: its value must be JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from typing import Any, cast

from elastic.errors import NotCarried
from runtime.partial import Json, Partial


def noted(label: str, fn: Callable[[], Any]) -> Callable[[int], Partial]:
    """The one unit of an operation that the leader runs: the value of fn is its note."""

    def compute(unit: int) -> Partial:
        value = fn()
        carried = _through_json(value, label)
        if carried != value:
            raise NotCarried(
                f"job.{label} returned {value!r}, which JSON changes; return lists, dicts, strings, numbers"
            )
        return Partial(unit, unit + 1, note={"value": carried})

    return compute


def value_noted(result: Partial) -> Json:
    """The value, on every worker: one of its own, because the script may change it, and the result is kept."""
    return deepcopy(cast(dict[str, Json], result.note)["value"])


def _through_json(value: object, label: str) -> Json:
    try:
        return cast(Json, json.loads(json.dumps(value)))
    except (TypeError, ValueError) as error:
        raise NotCarried(
            f"job.{label} returned a {type(value).__name__}, which JSON cannot carry: {error}; return lists, dicts, "
            "strings, numbers (x.tolist() of a tensor), or keep it in job.state"
        ) from error
