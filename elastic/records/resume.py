"""`elastic run` on the directory of an interrupted job: its checkpoint, and the steps done again.

checkpoints.json   settings for the workers of this run (elastic/checkpoints/settings.py)
resumes.jsonl      one line for each time the job was started again: the checkpoint, which steps of the ledger are
                   done again, and which checkpoints were skipped and why
runs/<n>/          journals and result of an earlier run
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from elastic.checkpoints.naming import OWNER, EntryName
from elastic.checkpoints.select import Found
from elastic.checkpoints.series import Series
from elastic.checkpoints.settings import Settings
from elastic.checkpoints.storage import MemoryStorage, Storage, put, storage_at
from elastic.config import JobSpec
from elastic.errors import CheckpointDirTaken, ConfigError
from elastic.process import file_modes
from elastic.records import ledger
from elastic.records.files import read_resumes, write_atomically
from elastic.records.job_directory import job_id, read_settings

PER_RUN = ("journal", "journal.jsonl", "flight", "result.json", "rendezvous.json", "spill")
"""Files that a later run does not need; they are moved aside for people."""


PROBE = "probe"
"""A file that is written to see whether a directory of checkpoints can be used, and removed at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """Step `step` comes next. redone: first and last step that the ledger has and that are done again, or None."""

    checkpoint: str
    """"": there has never been a complete checkpoint, so the job starts again from its first step."""
    step: int
    redone: tuple[int, int] | None
    skipped: tuple[tuple[str, str], ...]
    """(checkpoint, why), newest first. If the job goes on from memory, only checkpoints that look damaged without a
    read of their data are named."""
    memory: bool = False
    """Whether workers of this run have left the entry in this machine's memory."""

    def sentences(self) -> Iterator[str]:
        for entry, because in self.skipped:
            yield f"skipped the checkpoint {entry}: {because}"
        again = "" if self.redone is None else f"; steps {self.redone[0]} to {self.redone[1]} are done again"
        kind = "snapshot in memory" if self.memory else "checkpoint"
        where = f"goes on from step {self.step}, {kind} {self.checkpoint}" if self.checkpoint else (
            "starts again from its first step, because no checkpoint was ever completed"
        )  # fmt: skip
        yield f"this job was interrupted; it {where}{again}"


def settings_of(spec: JobSpec, job_dir: Path, memory: Path | None = None) -> Settings:
    """The settings for a new job's workers. Raises ConfigError for a directory that belongs to another job."""
    root = spec.checkpoint_dir or str(job_dir / "checkpoints")
    storage, identity = storage_at(root), job_id(job_dir)
    if spec.checkpoint_every != "off" or spec.checkpoint_dir:  # else only job.save writes there, in the job's own
        own(storage, spec.name, identity)
    return Settings(
        root=storage.url,
        every=spec.checkpoint_every,
        keep=spec.checkpoint_keep,
        job=spec.name,
        job_id=identity,
        ledger=str(job_dir / "steps.jsonl"),
        memory=str(memory) if memory is not None else "",
        snapshot_every=spec.snapshot_every,
    )


def check_fresh(spec: JobSpec, job_dir: Path) -> None:
    """Before the old job of this directory is moved aside. Raises ConfigError if the new one could not have its
    directory of checkpoints, because that cannot be used or is the old job's or another one's."""
    if not spec.checkpoint_dir:
        return
    storage = storage_at(spec.checkpoint_dir)
    if Path(storage.url).resolve().is_relative_to(job_dir.resolve()):
        return  # it is moved with the old job
    if owner := owner_of(storage):
        if owner.get("job_id") == job_id(job_dir):
            raise CheckpointDirTaken(
                f"{storage.url} belongs to the job that --fresh would move aside; give another --checkpoint-dir, too"
            )
        raise _taken(storage, owner)
    try:
        put(storage, PROBE, b"")
        storage.remove(PROBE)
    except OSError as error:
        raise _unusable(storage, error) from error


def begin(spec: JobSpec, job_dir: Path, *, again: bool, memory: Path | None = None) -> Resumption | None:
    """Prepare a claimed directory for a run. again: an earlier run has ended without completing the job. memory: the
    directory of snapshots, all taken under this command (host_memory.py); None: there are none.

    Raises ConfigError if no checkpoint is usable, the directory is another job's, or the disk is full.
    """
    try:
        return _begin(spec, job_dir, again=again, memory=memory)
    except OSError as error:
        raise ConfigError(
            f"cannot prepare {error.filename or job_dir} for a run: {error.strerror}; start the job again when that is "
            "mended"
        ) from error


def _begin(spec: JobSpec, job_dir: Path, *, again: bool, memory: Path | None) -> Resumption | None:
    settings, resumption = settings_of(spec, job_dir, memory), None
    if again:
        snapshots = _snapshots(settings)
        resumption = decide(Series(storage_at(settings.root)), settings.job_id, steps_on_file(job_dir), snapshots)
        if snapshots is not None:
            snapshots.keep_only(resumption.checkpoint if resumption.memory else "")
        earlier = read_resumes(job_dir)
        created_s = (job_dir / "id").stat().st_mtime
        settings = replace(
            settings,
            resume=resumption.checkpoint,
            skipped=tuple(name for name, _ in resumption.skipped),
            resume_from=settings.memory if resumption.memory else "",
            interruptions=len(earlier) + 1,
            observed_s=max(0.0, time.time() - created_s),
        )
        _put_aside(job_dir, len(earlier) + 1)
        _record(job_dir, len(earlier) + 1, resumption)
    write_atomically(job_dir / "checkpoints.json", json.dumps(asdict(settings)).encode(), file_modes.SETTINGS)
    return resumption


def has_advanced(job_dir: Path) -> bool:
    """Whether this run has completed a checkpoint or snapshot newer than the one it began from, or has found that one
    unreadable; then another run begins from something else."""
    settings = read_settings(job_dir)
    began = EntryName.parse(settings.resume)
    durable, snapshots = Series(storage_at(settings.root)), _snapshots(settings)
    both = (durable, snapshots)
    newest = max(_newest_step(series, settings.job_id, settings.skipped) for series in both if series is not None)
    if began is None or newest > began.step:
        return newest > 0
    source = snapshots if settings.resume_from else durable
    return source is not None and bool(source.verify(source.look(began, settings.job_id)).problem)


def decide(series: Series, job_id: str, steps: int, snapshots: Series | None = None) -> Resumption:
    """The newest complete checkpoint or snapshot whose steps the ledger has. steps: how many steps the ledger has.

    Raises ConfigError.
    """
    snapshot = snapshots.newest(job_id, steps)[0] if snapshots is not None else None
    found: Found | None = None
    if snapshot is None or snapshot.name.step < _newest_step(series, job_id):
        found, skipped = series.newest(job_id, steps)
    else:  # the checkpoints' data need not be read
        skipped = [other for other in series.all(job_id) if other.problem and not other.unfinished]
    memory = snapshot is not None and (found is None or snapshot.name.step >= found.name.step)
    found = snapshot if memory else found
    if found is None and any(not other.unfinished for other in skipped):
        why = "; ".join(f"{other.name}: {other.problem}" for other in skipped)
        raise ConfigError(
            f"this job was interrupted, and none of its checkpoints can be used ({why}). Repair one, or start anew "
            "with --fresh."
        )
    step = found.name.step if found is not None else 0
    return Resumption(
        checkpoint=str(found.name) if found is not None else "",
        step=step,
        redone=(step, steps - 1) if steps > step else None,
        skipped=tuple((str(other.name), other.problem) for other in skipped),
        memory=memory,
    )


def _snapshots(settings: Settings) -> Series | None:
    return Series(MemoryStorage(settings.memory)) if settings.memory else None


def _newest_step(series: Series, job_id: str, skipped: Collection[str] = ()) -> int:
    """The step of the newest entry that looks complete and is not skipped; -1: there is none."""
    whole = (found.name for found in series.all(job_id) if not found.problem)
    return next((name.step for name in whole if str(name) not in skipped), -1)


def owner_of(storage: Storage) -> dict[str, Any]:
    """Whose directory it is: {"job", "job_id"}, or {} of nobody's. Raises ConfigError if that cannot be read."""
    try:
        owner: dict[str, Any] = json.loads(storage.read(OWNER))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise _unusable(storage, error) from error
    return owner


def own(storage: Storage, name: str, identity: str) -> None:
    """Mark the directory as that job's. Raises CheckpointDirTaken if it is another job's, and ConfigError if it cannot
    be used, perhaps only now."""
    owner = owner_of(storage)
    if not owner:
        try:
            put(storage, OWNER, json.dumps({"job": name, "job_id": identity}).encode())
        except OSError as error:
            raise _unusable(storage, error) from error
        owner = owner_of(storage)  # of two jobs that found no owner, the later one owns it
    if owner.get("job_id") != identity:
        raise _taken(storage, owner)


def _taken(storage: Storage, owner: dict[str, Any]) -> CheckpointDirTaken:
    return CheckpointDirTaken(
        f"{storage.url} holds the checkpoints of another job, {owner.get('job')} ({owner.get('job_id')}); give "
        "this job another checkpoint directory"
    )


def _unusable(storage: Storage, error: Exception) -> ConfigError:
    because = getattr(error, "strerror", None) or error
    return ConfigError(
        f"the checkpoint directory {storage.url} cannot be used: {because}; give another --checkpoint-dir, or none "
        "and --checkpoint-every off"
    )


def redone(job_dir: Path) -> tuple[int, int] | None:
    """First and last step of the ledger that the newest run does again; None: it does none, or is the first."""
    newest = next(reversed(read_resumes(job_dir)), None)
    return None if newest is None or newest["redone"] is None else (newest["redone"][0], newest["redone"][1])


def steps_on_file(job_dir: Path) -> int:
    """How many steps the ledger has."""
    path = job_dir / "steps.jsonl"
    return sum(1 for _ in ledger.lines(path)) if path.exists() else 0


def _put_aside(job_dir: Path, run: int) -> None:
    """Move the files of an earlier run aside, also after a killed start that has moved some of them."""
    aside = job_dir / "runs" / str(run)
    file_modes.make_directory(aside)
    for name in PER_RUN:
        if (job_dir / name).exists() and not (aside / name).exists():
            (job_dir / name).rename(aside / name)
    file_modes.make_directory(job_dir / "journal")


def _record(job_dir: Path, run: int, resumption: Resumption) -> None:
    line = {"run": run + 1, "t_wall": time.time(), **asdict(resumption)}
    path = job_dir / "resumes.jsonl"
    before = path.read_bytes() if path.exists() else b""
    write_atomically(path, before + json.dumps(line).encode() + b"\n")
