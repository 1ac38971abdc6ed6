"""Files of the job directory that other processes read while they are written."""

from __future__ import annotations

import errno
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic.errors import ConfigError
from elastic.process import file_modes

if TYPE_CHECKING:
    from elastic.config import JobSpec

TOKEN = "token"
"""Name of the file with the token that admits the job's agent (elastic/fleet/documents.py). Its mode is 0600."""


def write_atomically(path: Path, content: bytes, mode: int | None = None) -> None:
    """Write a file; readers see the old or the new content, also after a crash. mode: None: as in file_modes.py."""
    with _temporary(path, content, mode) as temporary:
        temporary.replace(path)


def create_atomically(path: Path, content: bytes, mode: int | None = None) -> None:
    """Create a file; readers see none or all of it, but a part after a crash without hard links. Raises
    FileExistsError."""
    with _temporary(path, content, mode) as temporary:
        try:
            os.link(temporary, path)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP):
                raise
            _write(path, content, mode)


def read_regular(path: Path) -> bytes:
    """The content of a file in a directory of somebody else, who may have put another thing there: a FIFO would be
    waited for. Raises OSError."""
    with open(path, "rb", opener=file_modes.regular) as file:
        return file.read()


def is_temporary(path: Path, name: str) -> bool:
    """Whether a thread that was killed while it wrote the file of that name has left this file."""
    return re.fullmatch(rf"\.{re.escape(name)}\.\d+", path.name) is not None


@contextmanager
def _temporary(path: Path, content: bytes, mode: int | None) -> Iterator[Path]:
    temporary = path.with_name(f".{path.name}.{threading.get_native_id()}")
    try:
        temporary.unlink(missing_ok=True)  # an old file would keep its mode
        _write(temporary, content, mode)
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _write(path: Path, content: bytes, mode: int | None) -> None:
    """A new file, on the disk when this returns."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_CLOEXEC, file_modes.of_file() if mode is None else mode)

    with open(path, "xb", opener=opener) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def read_token(job_dir: Path) -> str:
    """The token, or "" for an agent that needs none."""
    try:
        return (job_dir / TOKEN).read_text()
    except FileNotFoundError:
        return ""


def read_resumes(job_dir: Path) -> list[dict[str, Any]]:
    """What was told of each time that the job was gone on with: the lines of resumes.jsonl."""
    try:
        with open(job_dir / "resumes.jsonl", "rb", opener=file_modes.regular) as file:
            return [json.loads(text) for text in file]
    except FileNotFoundError:
        return []


def read_job(job_dir: Path) -> JobSpec:
    """The specification in job.json. Raises ConfigError if it is not there or not valid."""
    from elastic.wire import codec  # which a command that only asks does not need

    path = job_dir / "job.json"
    try:
        document = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; this is not a job directory") from error
    return codec.job_from_json(document, str(path))
