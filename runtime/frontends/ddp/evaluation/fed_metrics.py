"""Metrics of torchmetrics and evaluate that an evaluation's loop feeds, for those who come later.

A newcomer, and a run that goes on, pass by the evaluations that are over. Their metrics get what those of the others
got, so that what the script computes from a metric behind the loop is the same for all.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elastic.errors import ConfigError, NotCarried
from runtime.frontends.ddp.rank_script import RankScript
from runtime.frontends.ddp.seams import Seams
from runtime.loop.training.gathering import from_bytes, to_bytes

TOLD_MAX = 64 << 10
"""Bytes of what metrics get in one evaluation. If it is more, nobody is told: a metric of a newcomer is empty."""


class FedMetrics:
    """Of one evaluation. A metric is known by the order in which the loop has fed its metrics first."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, str], int] = {}
        self._adding: list[Callable[..., None]] = []
        self._told: list[str] | None = []
        self._size = 0

    def number(self, metric: object, add: Callable[..., None]) -> int:
        """add: a method of the metric."""
        key = id(metric), add.__name__
        if key not in self._numbers:
            self._numbers[key] = len(self._adding)
            self._adding.append(add)
        return self._numbers[key]

    def note(self, number: int, arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
        """A metric gets these values."""
        if self._told is None:
            return
        text = packed([number, list(arguments), dict(named)])
        self._size += len(text or "")
        if text is None or self._size > TOLD_MAX:
            self._told = None
        else:
            self._told.append(text)

    def told(self) -> list[str] | None:
        """All that was given, as text."""
        return self._told

    def replay(self, told: Sequence[str], to_device: Callable[[Any], Any]) -> None:
        """Give it to the metrics of this worker, whose numbers are the same."""
        for text in told:
            number, arguments, named = unpacked(text)
            if number < len(self._adding):
                self._adding[number](*to_device(arguments), **to_device(named))


def packed(value: object) -> str | None:
    """As text, for those who come later; None: too large, or nothing that can be told."""
    try:
        text = base64.b64encode(to_bytes(value, "what an evaluation has given")).decode()
    except NotCarried:
        return None
    return text if len(text) <= TOLD_MAX else None


def unpacked(text: str) -> Any:
    """The value of `packed`; its tensors are on the CPU."""
    return from_bytes(base64.b64decode(text))


def guard(seams: Seams, module: Any) -> None:
    """module: torchmetrics or evaluate. Their metrics ask the loop of the evaluation. Raises ConfigError."""
    if module.__name__ == "evaluate":
        for name in ("add", "add_batch"):
            seams.wrap(module.EvaluationModule, name, _added)
    elif hasattr(module.Metric, "_wrap_update"):
        seams.wrap(module.Metric, "_wrap_update", _wrapped_update)
    else:
        raise ConfigError(f"torchmetrics {module.__version__} has no Metric._wrap_update, which evaluations need")


def _added(script: RankScript, original: Any, self: Any, /, *args: Any, **kwargs: Any) -> None:
    _feed(script, self, functools.wraps(original)(functools.partial(original, self)), *args, **kwargs)


def _wrapped_update(script: RankScript, original: Any, self: Any, update: Any) -> Any:
    """Each metric wraps its update() when it is made, and again when it is copied."""
    wrapped = original(self, update)

    @functools.wraps(wrapped)
    def guarded(*args: Any, **kwargs: Any) -> None:
        _feed(script, self, wrapped, *args, **kwargs)

    return guarded


def _feed(script: RankScript, metric: Any, add: Callable[..., None], /, *args: Any, **kwargs: Any) -> None:
    if (loop := script.evaluations.loop) is not None:
        loop.feed(metric, add, *args, **kwargs)
    else:
        add(*args, **kwargs)
