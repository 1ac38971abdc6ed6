"""How the figures are shown: a table in Markdown, the same figures as JSON, and the section of the documentation."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
MISSED = "MISSED"
Markers = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Row:
    """target: what is asked for, with the verdict; empty where nothing is."""

    what: str
    figure: str
    spread: str = ""
    target: str = ""


def table(rows: Sequence[Row]) -> str:
    """Aligned, so that it can be read as it stands."""
    cells = [("measured", "median", "spread", "target")]
    cells += [(row.what, row.figure, row.spread, row.target) for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(4)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in cells
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def target(met: bool, wanted: str) -> str:
    return f"{wanted}: {'met' if met else MISSED}"


def missed(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if MISSED in row.target]


def machine() -> dict[str, str]:
    """What the figures were measured on and with."""
    cpu = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    memory = next(int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal"))
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": f"{cpu}, {len(os.sched_getaffinity(0))} cores",
        "memory": f"{memory / 2**20:.0f} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def section(command: str, about: dict[str, str], rows: Sequence[Row], notes: Sequence[str]) -> str:
    """What stands between the markers."""
    facts = ", ".join(f"{name} {value}" for name, value in about.items())
    return "\n".join([f"`{command}`: {facts}.", "", table(rows), "", *(f"- {note}" for note in notes)])


def write_section(path: Path, text: str, markers: Markers = (BEGIN, END)) -> None:
    """Put the text between the markers of a document. Raises ValueError if they are not there."""
    before, after = around_section(path, markers)
    path.write_text(f"{before}{markers[0]}\n{text}\n{markers[1]}{after}", encoding="utf-8")


def around_section(path: Path, markers: Markers = (BEGIN, END)) -> tuple[str, str]:
    """What stands before and after the markers. Raises ValueError if they are not there."""
    before, begin, rest = path.read_text(encoding="utf-8").partition(markers[0])
    _, end, after = rest.partition(markers[1])
    if not begin or not end:
        raise ValueError(f"{path}: the lines {markers[0]} and {markers[1]} are missing")
    return before, after


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()
