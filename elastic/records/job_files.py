"""The files of this machine's jobs that may be read remotely: logs of workers, journals, and the ledger.

A log has the name of its file, `gpu-7.0.0`; a journal is called `journal/agent-gpu-7`, the node's part of the ledger
`ledger/steps`. Other names are not read.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from elastic.process import file_modes

PIECE_BYTES = 1 << 18
"""The most bytes in one answer."""


LEDGER = "ledger/steps"


@dataclass(frozen=True, slots=True)
class LogPiece:
    """text: a piece of the file. end: where the next one begins. size: bytes of the file; -1: there is no such file."""

    text: bytes
    end: int
    size: int


def read(jobs: Path, job: str, name: str, offset: int) -> LogPiece:
    """A piece of a file from offset on; offset < 0: from that many bytes before the end. name "": the list of files,
    one per line. job "": the directory's own journals. Raises OSError."""
    files = _files(jobs, job)
    if not name:
        names = "\n".join(sorted(files)).encode()
        return LogPiece(names, 0, len(names))
    if name not in files:
        return LogPiece(b"", offset, -1)
    with open(files[name], "rb", opener=file_modes.regular) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(min(offset, size) if offset >= 0 else max(0, size + offset))
        text = file.read(PIECE_BYTES)
        return LogPiece(text, file.tell(), size)


def _files(jobs: Path, job: str) -> dict[str, Path]:
    directories = {"": jobs, **{path.name: path for path in jobs.iterdir()}} if jobs.is_dir() else {}
    if (directory := directories.get(job)) is None:
        return {}
    journals = {f"journal/{path.stem}": path for path in (directory / "journal").glob("*.jsonl")}
    if (ledger := directory / "steps.jsonl").is_file():
        journals[LEDGER] = ledger
    files = {path.stem: path for path in (directory / "logs").glob("*.log")} | journals
    return {name: path for name, path in files.items() if name.isprintable()}  # a script may give any bytes as a name
