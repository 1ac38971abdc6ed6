"""`--outer`: replicas that average seldom, for scripts that leave it to the command how they do."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, Self, TypeAlias, cast, get_args

from elastic.errors import ConfigError

Moments: TypeAlias = Literal["own", "mean", "reset"]
"""What becomes of the state of the inner optimizers after a round."""

EXAMPLES = "diloco:H=50, diloco:H=50,lr=0.7,momentum=0.9 or localsgd:H=50,moments=mean"


class OuterKind(StrEnum):
    """What follows the inner steps of a round."""

    DILOCO = "diloco"
    """A step of SGD with Nesterov momentum over the mean of the differences."""
    LOCAL_SGD = "localsgd"
    """The mean of the parameters."""


_WORDS = {OuterKind.DILOCO: ("H", "lr", "momentum", "moments"), OuterKind.LOCAL_SGD: ("H", "moments")}


@dataclass(frozen=True, slots=True)
class OuterOption:
    """every: H, the inner steps between two outer steps. lr, momentum: of DiLoCo's outer steps, by default those of the
    paper (Douillard et al. 2023). moments: as of elastic.DiLoCo."""

    kind: OuterKind
    every: int
    lr: float = 0.7
    momentum: float = 0.9
    moments: Moments = "own"

    def __str__(self) -> str:
        """With all that it says, also what was left out."""
        outer = f"lr={self.lr!r},momentum={self.momentum!r}," if self.kind is OuterKind.DILOCO else ""
        return f"{self.kind}:H={self.every},{outer}moments={self.moments}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Read "KIND:H=N", with further NAME=VALUE behind commas; "": None. Raises ConfigError, which names the part
        that is wrong."""
        if not text:
            return None
        kind, _, rest = text.partition(":")
        if kind not in list(OuterKind):
            raise _wrong(text, f"{kind!r:.40} is neither diloco nor localsgd")
        values: dict[str, str] = {}
        for part in rest.split(",") if rest else []:
            name, equals, value = part.partition("=")
            if not equals or name not in _WORDS[OuterKind(kind)]:
                known = ", ".join(f"{word}=" for word in _WORDS[OuterKind(kind)])
                raise _wrong(text, f"{part!r:.40} is none of {known}")
            if name in values:
                raise _wrong(text, f"{name}= is given twice")
            values[name] = value
        if "H" not in values:
            raise _wrong(text, "H=, the number of inner steps between two outer steps, is missing")
        return cls(OuterKind(kind), **{_FIELDS[name]: _READ[name](text, value) for name, value in values.items()})


def _wrong(text: str, what: str) -> ConfigError:
    return ConfigError(f"outer={text!r:.120}: {what}; write for example {EXAMPLES}")


def _whole(text: str, value: str) -> int:
    if not (value.isascii() and value.isdecimal() and len(value) <= 15 and int(value) >= 1):
        raise _wrong(text, f"H={value!r:.40} is no whole number of at least 1 and at most 15 digits")
    return int(value)


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        return math.nan


def _rate(text: str, value: str) -> float:
    if not 0 < (rate := _number(value)) < math.inf:
        raise _wrong(text, f"lr={value!r:.40} is no number above 0")
    return rate


def _momentum(text: str, value: str) -> float:
    if not 0 <= (momentum := _number(value)) < 1:
        raise _wrong(text, f"momentum={value!r:.40} is no number from 0 to below 1")
    return momentum


def _moments(text: str, value: str) -> Moments:
    if value not in get_args(Moments):
        raise _wrong(text, f"moments={value!r:.40} is none of {', '.join(get_args(Moments))}")
    return cast(Moments, value)


_READ: dict[str, Callable[[str, str], Any]] = {"H": _whole, "lr": _rate, "momentum": _momentum, "moments": _moments}
_FIELDS = {"H": "every", "lr": "lr", "momentum": "momentum", "moments": "moments"}
