"""Reading a file of JSON lines while others write it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic.journal import parse


class Tail:
    """The complete lines that were added to a JSON lines file since the last look, but for those that a kill has torn.

    read: one line; None for a torn one.
    """

    def __init__(self, path: Path, read: Callable[[bytes], dict[str, Any] | None] = parse) -> None:
        self._path, self._read = path, read
        self._offset = 0

    def lines(self) -> list[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [line for text in whole.splitlines() if (line := self._read(text)) is not None]
