"""What is replaced in torch, or in a framework, while a script runs with logical ranks, in one list, so that it can be
put back; and whether it is there."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from runtime.frontends.ddp.rank_script import RankScript

_MISSING = object()


def missing(names: Mapping[str, Sequence[str]], package: str = "") -> list[str]:
    """Which of these names the imported modules do not have, as "NAME in MODULE". names: module, below the package if
    one is given -> a function, a class, or "CLASS.METHOD"."""
    found = []
    for module, every in names.items():
        where = f"{package}.{module}" if package else module
        for name in every:
            thing: Any = sys.modules.get(where)
            for part in name.split("."):
                thing = getattr(thing, part, None)
            if thing is None:
                found.append(f"{name} in {where}")
    return found


class Seams:
    """Attributes of modules and classes that were replaced; `restore` puts them back, the last one first."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, object]] = []

    def replace(self, owner: Any, name: str, value: object) -> None:
        """Set an attribute of a module or a class. What it inherits stays where it is."""
        self._before.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, instead: Callable[..., Any]) -> None:
        """Have a function call `instead(script, function, ...)`, with its own arguments, in a thread that has a script.
        In all other threads it does what it did."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def seam(*args: Any, **kwargs: Any) -> Any:
            script = RankScript.current()
            return original(*args, **kwargs) if script is None else instead(script, original, *args, **kwargs)

        self.replace(owner, name, seam)

    def restore(self) -> None:
        while self._before:
            owner, name, value = self._before.pop()
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
