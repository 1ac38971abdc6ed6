"""What is replaced in torch while a script runs with logical ranks, in one list, so that it can be put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MISSING = object()


class Seams:
    """Attributes of modules and classes that were replaced; `restore` puts them back, the last one first."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, object]] = []

    def replace(self, owner: Any, name: str, value: object) -> None:
        """Set an attribute of a module or a class. What it inherits stays where it is."""
        self._before.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, around: Callable[[Any], Any]) -> None:
        """Replace a function by `around(function)`."""
        self.replace(owner, name, around(getattr(owner, name)))

    def restore(self) -> None:
        while self._before:
            owner, name, value = self._before.pop()
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
