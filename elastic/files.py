"""Files of the job directory that other processes read while we write them."""

from __future__ import annotations

import os
from pathlib import Path

from elastic import codec
from elastic.config import JobSpec
from elastic.errors import ConfigError


def write_atomically(path: Path, content: bytes) -> None:
    """Readers see the old content or the new one, also after a crash of the machine."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_job(job_dir: Path) -> JobSpec:
    """The specification in job.json. Raises ConfigError if it is not there or not valid."""
    path = job_dir / "job.json"
    try:
        document = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; this is not a job directory") from error
    return codec.job_from_json(document, str(path))
