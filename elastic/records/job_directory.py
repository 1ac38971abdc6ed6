"""The directory of one job: its files, and the locks on it. One agent at a time writes into it.

job.json          the job's specification; if it exists, a job was started here
lock              held (flock) by the agent while it lives
rendezvous.json   {"address", "pid"} of the rendezvous service
result.json       {"exit_code", "because", "digest", "generation"}, written once, at the end
steps.jsonl       the ledger: one line for each applied step
id                a number that no other job has; checkpoints name it
run.lock          held (flock) by `elastic run`
checkpoints.json  the job's settings of checkpoints; like job.json for its owner only
token             admits the agent of a fleet's node to the job's leader
certs/            the worker's certificate, on a fleet's node whose jobs run as another user
journal/          the event log of each process; journal.jsonl is their merge, made at the end
flight/           what each worker did last, by worker: 393 KB each, of the last three workers of a slot
logs/             the output of each worker, of the agent and of the rendezvous service
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from elastic.checkpoints.settings import Settings
from elastic.errors import ConfigError
from elastic.process import file_modes
from elastic.records.files import create_atomically, is_temporary, read_job, write_atomically

if TYPE_CHECKING:
    from elastic.config import JobSpec


DEFAULT_PARENT = "elastic-jobs"

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def default_name(program: str) -> str:
    """A job name made from the script's file name or the module's last part."""
    stem = program.rsplit("/", 1)[-1].removesuffix(".py").rsplit(".", 1)[-1]
    return re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:63].strip("-") or "job"


def jobs_in(parent: Path) -> tuple[list[Path], int]:
    """(directories of jobs in parent, how many of them run). Jobs that run come first; within both kinds, the job that
    was started last comes first."""
    started = []
    for path in parent.glob("*/job.json"):
        with suppress(FileNotFoundError):  # the directory was moved aside just now
            started.append((is_live(path.parent), path.stat().st_mtime_ns, path.parent))
    return [job_dir for _, _, job_dir in sorted(started, reverse=True)], sum(live for live, _, _ in started)


def check_job(job_dir: Path) -> None:
    """Raise ConfigError for a directory without a job."""
    if not (job_dir / "job.json").exists():
        raise ConfigError(f"{job_dir} holds no job; give the --job-dir of `elastic run`")


def is_live(job_dir: Path) -> bool:
    """Whether an agent, or the `elastic run` above it, holds a lock of this directory."""
    return _is_held(job_dir / "lock") or _is_held(job_dir / "run.lock")


def is_of_run(job_dir: Path) -> bool:
    """Whether `elastic run` has made this directory."""
    return (job_dir / "run.lock").exists()


def _is_held(path: Path) -> bool:
    try:
        with open(path, "rb", opener=file_modes.regular) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def is_removed(job_dir: Path) -> bool:
    """Whether a running job's directory was removed or moved; its processes may have made parts of it again."""
    return not (job_dir / "job.json").exists()


def removal(job_dir: Path) -> str:
    return f"{job_dir} was removed or moved while the job ran, and with it its ledger, logs and checkpoints"


@contextmanager
def running(job_dir: Path) -> Iterator[None]:
    """Hold the directory for one `elastic run`. Raises ConfigError if another one holds it."""
    with open(job_dir / "run.lock", "ab", opener=file_modes.opener) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _in_use(job_dir) from None
        yield


def job_id(job_dir: Path) -> str:
    """Hexadecimal digits, the same for every run of this job and of no other job."""
    return (job_dir / "id").read_text()


@dataclass(frozen=True, slots=True)
class Claim:
    """A job directory. again: it holds a job that was interrupted or has failed, and goes on."""

    path: Path
    again: bool


def claim(
    spec: JobSpec, job_dir: Path | None, *, fresh: bool, before_moving: Callable[[Path], None] = lambda _: None
) -> Claim:
    """Make the directory of a new job and write its job.json, or find that of an interrupted job of the same name.

    job_dir None: the next free ``./elastic-jobs/<name>-<n>``. fresh: an old job in it is moved to the next free
    ``<job_dir>.old-<n>``, after before_moving(job_dir), which raises ConfigError if the new job could not begin. Raises
    ConfigError for a directory that is in use, holds a completed job, another job or other files, or cannot be written.
    """
    from elastic.config import check_text
    from elastic.wire import codec  # which commands that only ask do not need

    try:
        check_text("job directory", Path.cwd() / DEFAULT_PARENT if job_dir is None else job_dir.absolute())
        chosen = next_free(Path.cwd() / DEFAULT_PARENT, spec.name) if job_dir is None else job_dir.absolute()
        if job_dir is not None and _make_room(chosen, spec.name, before_moving if fresh else None):
            write_atomically(chosen / "job.json", codec.to_json(spec), file_modes.SETTINGS)
            return Claim(chosen, again=True)
        file_modes.make_directory(chosen / "logs")
        file_modes.make_directory(chosen / "journal")
        with suppress(FileExistsError):  # made by a start that was killed, or by another command
            create_atomically(chosen / "id", secrets.token_hex(8).encode())
        # Exclusive: if two commands saw an empty directory, one gets it.
        create_atomically(chosen / "job.json", codec.to_json(spec), file_modes.SETTINGS)
    except FileExistsError:
        raise ConfigError(f"{chosen} was taken by another job just now; give another --job-dir") from None
    except OSError as error:
        raise ConfigError(
            f"cannot use {error.filename} for the job: {error.strerror}; give another --job-dir"
        ) from error
    return Claim(chosen, again=False)


def read_json(path: Path, *fields: str) -> dict[str, Any] | None:
    """A small document that its writer replaces as a whole; None if the file does not exist. Raises ConfigError for a
    file that no such writer has left, as one without these fields."""
    try:
        document: object = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}; remove it, or restore it from a copy") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path} is damaged: it holds no JSON object; remove it, or restore it from a copy")
    if missing := [name for name in fields if name not in document]:
        raise ConfigError(f"{path} is damaged: it has no {', '.join(missing)}; remove it, or restore it from a copy")
    return document


def read_settings(job_dir: Path) -> Settings:
    """The settings that a start of `elastic run` has left; without such a start, only the script's own checkpoints.
    Raises ConfigError for a file that is damaged or of another version."""
    path = job_dir / "checkpoints.json"
    if (document := read_json(path)) is None:
        return Settings(root=str(job_dir / "checkpoints"))
    try:
        return Settings.of(document)
    except TypeError as error:
        raise ConfigError(
            f"{path} is damaged, or of another version of elastic: {error}; use the version that has run the job"
        ) from error


def next_free(parent: Path, name: str) -> Path:
    """Make and return the first ``<parent>/<name>-<n>`` that does not exist."""
    file_modes.make_directory(parent)
    for number in count(1):
        path = parent / f"{name}-{number}"
        try:
            path.mkdir(file_modes.of_directory())
        except FileExistsError:
            continue
        return path
    raise AssertionError("unreachable")


def _is_ours(path: Path) -> bool:
    """Whether a command that was killed before its directory held a job has left this file."""
    if path.name in ("logs", "journal"):
        return path.is_dir() and not any(path.iterdir())
    return path.name == "id" or is_temporary(path, "id") or is_temporary(path, "job.json")


def _in_use(job_dir: Path) -> ConfigError:
    return ConfigError(
        f"{job_dir} is in use by a live job. Watch it with `elastic status --job-dir {job_dir}`, or give another "
        "--job-dir."
    )


def _make_room(job_dir: Path, name: str, before_moving: Callable[[Path], None] | None) -> bool:
    """Whether the directory has a job that goes on; otherwise it is free for a new job now. before_moving: as `claim`
    has it; None: an old job is not moved."""
    if not job_dir.exists():
        return False
    if not job_dir.is_dir():
        raise ConfigError(f"--job-dir {job_dir} is a file; give a directory")
    if is_live(job_dir):
        raise _in_use(job_dir)
    if not (job_dir / "job.json").exists():
        if any(not _is_ours(path) for path in job_dir.iterdir()):
            raise ConfigError(f"{job_dir} is not empty and holds no job; give a new or an empty --job-dir")
        return False
    if before_moving is not None:
        before_moving(job_dir)
        aside = next(path for n in count(1) if not (path := job_dir.with_name(f"{job_dir.name}.old-{n}")).exists())
        job_dir.rename(aside)
        return False
    result, before = read_json(job_dir / "result.json"), read_job(job_dir)
    if result is not None and result.get("exit_code", 0) == 0:
        raise ConfigError(
            f"{job_dir} holds a completed job, which is not overwritten. Give another --job-dir, or --fresh to move "
            "the old one aside and start anew."
        )
    if before.name != name:
        raise ConfigError(
            f"{job_dir} holds the interrupted job {before.name}, and this one is {name}. Give --name {before.name} to "
            "go on with it, another --job-dir, or --fresh to move the old one aside and start anew."
        )
    return True


def lock_identity(path: Path) -> str:
    """The same text for all processes that hold a lock one after the other, while this machine runs. path: the file
    that keeps it, beside the lock. Raises OSError."""
    if not path.exists():
        with suppress(FileExistsError):
            create_atomically(path, secrets.token_hex(16).encode(), 0o600)
    return f"{path.read_text()} {BOOT_ID.read_text().strip()}"


class JobLock:
    """The job directory's lock: only one agent writes its ledger. Held until the process ends."""

    def __init__(self, path: Path, otherwise: str, holder: str = "") -> None:
        """otherwise: advice for the ConfigError that is raised if another process holds the lock. holder: what that
        error says of this process, besides its pid."""
        self._file = file_modes.opener(str(path), os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._file, 512, 0).decode(errors="replace").strip()
            os.close(self._file)
            raise ConfigError(f"{path.parent} is in use by a running agent ({holder}); {otherwise}") from None
        with suppress(OSError):  # a full disk has no room for the name of the holder, and the lock holds all the same
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"{holder}pid {os.getpid()}".encode(), 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)
