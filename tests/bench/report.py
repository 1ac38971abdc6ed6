"""How the figures are shown: a table in Markdown, the same figures as JSON, and the section of the documentation."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from chaos_tests.support.processes import exit_on_signals

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "performance.md"
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


class Bench:
    """A benchmark that has a section in docs/performance.md, and a file with all its figures."""

    def __init__(self, name: str, marker: str | None = None) -> None:
        """name: of its module. marker: of its section; None: as the module."""
        marker = f"bench-{name}" if marker is None else marker
        self.markers = f"<!-- {marker}:begin -->", f"<!-- {marker}:end -->"
        self._prog = f"python -m tests.bench.{name}"
        self._json_file = ROOT / "build" / "bench" / f"{name}.json"
        self._begun_s = 0.0

    def parser(self, smoke: str = "little of everything", flag: str = "--small") -> argparse.ArgumentParser:
        """With the options of all. flag: of a smoke run. smoke: what that is."""
        parser = argparse.ArgumentParser(prog=self._prog)
        parser.add_argument(flag, action="store_true", help=f"{smoke}; docs/performance.md stays as it is")
        parser.add_argument("--json", type=Path, default=self._json_file, help="where all figures go")
        return parser

    @contextmanager
    def directory(self, *, writes: bool) -> Iterator[Path]:
        """For the measuring, which takes minutes: that the section can be written is known before. writes: it will be.
        Raises ValueError if its markers are not there."""
        if writes:
            around_section(DOCUMENT, self.markers)
        exit_on_signals()
        self._begun_s = self._begun_s or time.monotonic()
        with tempfile.TemporaryDirectory(prefix="elastic-bench-", ignore_cleanup_errors=True) as directory:
            yield Path(directory)

    def publish(
        self,
        found: Mapping[str, object],
        rows: Sequence[Row],
        notes: Sequence[str],
        words: str = "",
        *,
        to: Path,
        writes: bool,
    ) -> None:
        """Write the file of figures and the section, and print the table. words: of the command, behind its name."""
        command, about = f"{self._prog} {words}".rstrip(), machine()
        figures = {"command": command, "machine": about, **found, "table": [asdict(row) for row in rows]}
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        if writes:
            write_section(DOCUMENT, section(command, about, rows, notes), self.markers)
        print(f"{time.monotonic() - self._begun_s:.0f} s; all figures in {to}", file=sys.stderr, flush=True)
        print(table(rows), flush=True)
