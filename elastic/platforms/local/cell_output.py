"""What the cell of a notebook shows while its job runs: what the workers print, what one should know, and a table that
is replaced as it changes."""

from __future__ import annotations

import codecs
import io
import sys
from typing import Any, TextIO

from elastic.platforms.local.live import table

COLUMNS = 100
OWN = "elastic: "
"""How sentences of `elastic run` begin. Other lines of its errors are tracebacks."""


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")


def table_text(facts: dict[str, Any]) -> str:
    """As plain text, without the spaces at the ends of lines."""
    from rich.console import Console

    text = io.StringIO()
    Console(file=text, width=COLUMNS, force_terminal=False, color_system=None, force_jupyter=False).print(table(facts))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


class LiveTable:
    """One output of the cell, made when there is something to show."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown = ""

    def show(self, facts: dict[str, Any]) -> None:
        text = table_text(facts)
        if text == self._shown:
            return
        self._shown = text
        bundle = {"text/plain": text}
        if self._handle is None:
            from IPython.display import display

            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


class CellStream:
    """Bytes of a pipe become text of the cell. sorts: lines that are not OWN are kept in `kept`, not shown."""

    def __init__(self, to: TextIO, *, sorts: bool = False) -> None:
        self.kept = ""
        self._to = to
        self._sorts = sorts
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._rest = ""

    def write(self, data: bytes, *, final: bool = False) -> None:
        """final: no more comes."""
        *lines, self._rest = (self._rest + self._decode(data, final)).splitlines(keepends=True) or [""]
        if final or self._rest.endswith("\n"):
            lines, self._rest = [*lines, self._rest], ""
        for line in lines:
            if self._sorts and not line.startswith(OWN):
                self.kept += line
            else:
                self._to.write(line)
        self._to.flush()
