"""The side thread that writes this member's part of a checkpoint, and completes it when all parts are there.

Members agree through the storage only: each writes its data, then a note about it; a member that finds the notes of all
members writes the manifest. After the last note at least one member finds them all, and two write the same. The loop
waits for none of this, but before a save of the script while this member's part of the one before is not written: each
of them is a copy of the state.
"""

from __future__ import annotations

import contextlib
import hashlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from elastic.checkpoints.manifest import FileEntry, Manifest, Moment, PartNote
from elastic.checkpoints.naming import FILES, MANIFEST, PERIODIC, EntryName, is_inside, part_file, part_note
from elastic.checkpoints.policy import Keep
from elastic.checkpoints.series import Series
from elastic.checkpoints.settings import Settings
from elastic.checkpoints.storage import Storage, put
from elastic.errors import CheckpointError
from elastic.records.temp_dirs import TempDirectory
from runtime.allreduce.reduction.partial_sum import Json
from runtime.recovery.checkpoint import safetensors_files
from runtime.recovery.checkpoint.ledger_barrier import await_step
from runtime.recovery.checkpoint.stager import Copied, Staged
from runtime.session import LoopPlace

ATTEMPTS = 5
"""How often a part is tried on a storage that answers with errors, with a growing pause between tries."""
PAUSE_S = 0.5
NOTES_POLL_S = 0.2
"""Seconds before the first look whether the others are done; the pause doubles up to NOTES_POLL_MAX_S."""
NOTES_POLL_MAX_S = 5.0
OTHERS_S = 60.0
"""Seconds for which the end of the script waits for the parts of others in a save that it has asked for."""
POINTER_S = 2.0
"""Seconds for which the end of the script waits for the answer whether it may remove older checkpoints."""
LEDGER_S = 60.0
"""Seconds for which the manifest waits until the ledger has the steps before it."""
ROOM_POLL_S = 0.2
"""Seconds after which a save that waits for room looks whether it still may wait."""
CHUNK_BYTES = 4 << 20

T = TypeVar("T")

Note = Callable[..., None]
"""note(event, **fields): write a line of the journal."""

Answer = Callable[[bool], None]
Point = Callable[[str, EntryName, Answer], None]
"""point(series, name, answer): ask to move the pointer of the series to an entry that is complete now. answer is
called, on any thread, with whether the pointer is there and this worker's, or is never called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaverTask:
    """One staged checkpoint. place: this worker's, in the generation whose members write it.

    shares: rank -> its part. A save that the script has asked for has the parts of all ranks, so that one survivor can
    write a dead member's part; a periodic one has this member's part only, and is taken again instead.
    """

    series: str
    name: EntryName
    place: LoopPlace
    moment: Moment
    header: dict[str, Json]
    shares: dict[int, list[Staged]]
    copied: Copied
    taken: str
    own_files: TempDirectory | None = None
    """A directory with files of on_checkpoint hooks; removed when they are written."""
    has_own_files: bool = False
    """Whether rank 0's part has such files, which no other member can write."""
    stall_s: float = 0.0
    """How long the loop stood still for it, in seconds."""


@dataclass(frozen=True, slots=True)
class Prune:
    """The pointer of the series is at this entry and this worker's: older entries may be removed."""

    series: str
    name: EntryName


class Review:
    """Another save is to come: look for the parts of others, and keep the parts of all ranks only of the newest one."""


@dataclass(slots=True)
class EntryProgress:
    """The progress of the newest periodic checkpoint that this member has taken part in."""

    place: LoopPlace | None = None
    complete: bool = True
    """Whether it is complete; true also without any, because nothing has to be repeated."""
    cost_s: float | None = None
    """Training time that a checkpoint costs, in seconds: the stall, and the processor time of writing it."""
    failures: dict[str, str] = field(default_factory=dict)
    """Series -> what went wrong with the last save of that name, for the script."""
    failed: dict[str, EntryName] = field(default_factory=dict)
    """Series -> the last save of that name that has failed."""


class Saver:
    """The user's thread calls `put` and `finish`; everything else runs on the side thread, started when needed."""

    def __init__(
        self, settings: Settings, storage: Storage, place: Callable[[], LoopPlace], note: Note, point: Point
    ) -> None:
        self._settings = settings
        self._storage = storage
        self._place = place
        self._note = note
        self._point = point
        self._asked: dict[str, EntryName] = {}
        """Series -> the entry for which the answer about the pointer has not come yet."""
        self._keep = Keep.parse(settings.keep)
        self._tasks: queue.SimpleQueue[SaverTask | Prune | Review] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self.pending = 0
        """Number of this member's parts that are not written yet."""
        self._saving = 0
        """How many of them are of saves that the script has asked for."""
        self._put_s = 0.0
        """When the last of these was queued, by the monotonic clock."""
        self._unfinished: dict[str, SaverTask] = {}
        """Series -> the task whose own part is written, while parts of others are not."""
        self._never: dict[tuple[str, EntryName], str] = {}
        """Series and entry that will never be complete, because this member could not write its part -> its note."""
        self.standing = EntryProgress()
        self._finishing = False
        self._thread: threading.Thread | None = None

    def put(self, task: SaverTask) -> None:
        """Queue a task; returns at once."""
        with self._idle:
            self.pending += 1
            self._saving += task.series != PERIODIC
        if task.series == PERIODIC:
            self.standing.place, self.standing.complete = task.place, False
        else:
            self._put_s = time.monotonic()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="checkpoint", daemon=True)
            self._thread.start()
        self._tasks.put(task)

    @property
    def full(self) -> bool:
        """Whether there is no room for another save: this member's part of one is not written yet, or the parts of
        others lack of more than one."""
        return self._saving > 0 or len(self._whole) > 1

    def make_room(self, hurries: Callable[[], bool], within_s: float) -> bool:
        """Wait until at most one save is in memory, whose own part is written. Call it outside of what members do
        together: only this member's storage is waited for, and that asks no other member for anything.

        hurries: whether it must not wait any longer; the save is then one copy of the state more. within_s: for how
        long the last save may be written. False: it is written for longer, and there is no room.
        """
        if not self._await_saves(hurries, self._put_s + within_s):
            return False
        # Of all saves but the last one, each member has written its part, or failed, before it took part in this call.
        # What lacks is that of members which are gone: the side thread sees now whether this member is to write it.
        if len(self._whole) > 1 and not hurries():
            with self._idle:
                self.pending += 1
                self._saving += 1
            self._tasks.put(Review())
            return self._await_saves(hurries, time.monotonic() + within_s)
        return True

    def _await_saves(self, hurries: Callable[[], bool], until_s: float) -> bool:
        """Wait until this member's parts of all saves are written or have failed. False: not until then."""
        while True:
            with self._idle:
                if self._idle.wait_for(lambda: self._saving == 0, ROOM_POLL_S):
                    return True
            if hurries():  # asked without the lock: it takes others
                return True
            if time.monotonic() > until_s:
                return False

    @property
    def _whole(self) -> list[SaverTask]:
        """The saves with the parts of all ranks that are not complete yet, the newest one last."""
        return [task for task in list(self._unfinished.values()) if task.series != PERIODIC and task.shares]

    def await_written(self, within_s: float) -> bool:
        """Wait until this member's parts are written or have failed. Whether that has happened in time."""
        with self._idle:
            return self._idle.wait_for(lambda: self.pending == 0, within_s)

    def finish(self, within_s: float) -> None:
        """Wait until this member's parts are written or have failed, then for others' parts of the script's saves."""
        if not self.await_written(within_s):
            self.standing.failures[""] = f"a checkpoint was still being written after {within_s:g} s"
        with self._idle:
            self._finishing = True
            if not self._idle.wait_for(lambda: not self._asked_for, OTHERS_S):
                for series in self._asked_for:
                    late = f"the parts of other workers were not there after {OTHERS_S:g} s"
                    self.standing.failures[series] = f"save({series!r}): {late}"
            self._idle.wait_for(lambda: not self._asked and self.pending == 0, POINTER_S)
            self._finishing = False

    @property
    def _asked_for(self) -> list[str]:
        return [series for series in list(self._unfinished) if series != PERIODIC]

    # ---------------------------------------------------------------------------------------- the side thread

    def _work(self) -> None:
        look_s = NOTES_POLL_S
        while True:
            try:
                task = self._tasks.get(timeout=look_s if self._unfinished else None)
            except queue.Empty:
                look_s = NOTES_POLL_S if self._finishing else min(NOTES_POLL_MAX_S, 2 * look_s)
                self._look()
                with self._idle:
                    self._idle.notify_all()
                continue
            look_s = NOTES_POLL_S
            if isinstance(task, Prune):
                self._prune(task)
            elif isinstance(task, Review):
                self._review()
            else:
                self._unfinished.pop(task.series, None)
                self._guarded(task, self._write)
            saved = isinstance(task, Review) or (isinstance(task, SaverTask) and task.series != PERIODIC)
            del task
            with self._idle:
                self.pending -= 1
                self._saving -= saved
                self._idle.notify_all()

    def _look(self) -> None:
        for task in list(self._unfinished.values()):
            self._guarded(task, self._complete)

    def _review(self) -> None:
        self._look()
        for task in self._whole[:-1]:
            self._unfinished[task.series] = replace(task, shares={})  # the others' notes may still complete it

    def _guarded(self, task: SaverTask, act: Callable[[SaverTask], None]) -> None:
        """Journal what goes wrong with a checkpoint; training goes on."""
        try:
            act(task)
        except Exception as error:
            # A storage library may raise anything, and this thread must live on for the next checkpoint.
            self._unfinished.pop(task.series, None)
            self.failed(task.series, task.name, error)

    def failed(self, series: str, name: EntryName, error: Exception) -> None:
        """Journal that a checkpoint will not become complete, for want of this member's part. Any thread."""
        because = f"{type(error).__name__}: {error}"
        self._note("checkpoint_failed", series=series, entry=str(name), because=because)
        if series != PERIODIC:
            self.standing.failures[series] = f"save({series!r}) after step {name.step}: {because}"
            self.standing.failed[series] = name

    def _write(self, task: SaverTask) -> None:
        begun_s, begun_cpu_s = time.monotonic(), time.thread_time()
        task.copied()
        self._remove_never()
        try:
            size = self._tried(task, lambda: self._write_part(task, task.place.rank))
        except Exception:
            self._never[task.series, task.name] = part_note(task.place.rank, task.place.world)
            raise
        finally:
            if task.own_files is not None:
                task.own_files.remove()
        cpu_s = time.thread_time() - begun_cpu_s
        if task.series == PERIODIC:
            self.standing.cost_s = task.stall_s + cpu_s
        self._note(
            "checkpoint_part_written",
            series=task.series,
            entry=str(task.name),
            bytes=size,
            stall_ms=round(1000 * task.stall_s, 3),
            seconds=round(time.monotonic() - begun_s, 3),
            cpu_s=round(cpu_s, 3),
        )
        self._unfinished[task.series] = replace(task, shares={}) if task.series == PERIODIC else task
        self._complete(task)

    def _remove_never(self) -> None:
        """Remove what others wrote of entries that will never be complete: on a full disk it takes the room of the next
        one. Not at once, because others may still be writing. A note that is there all the same keeps its entry."""
        for (directory, name), note in self._never.items():
            series = Series(self._storage, directory)
            with contextlib.suppress(OSError):  # the next complete entry removes it, too
                if note not in self._storage.files(series.path(name)):
                    series.remove(name)
        self._never.clear()

    def _tried(self, task: SaverTask, act: Callable[[], T]) -> T:
        pause_s = PAUSE_S
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return act()
            except OSError as error:
                if attempt == ATTEMPTS or "://" not in self._storage.url:
                    raise  # a local disk stays full or read-only
                self._note("checkpoint_retried", entry=str(task.name), because=str(error), attempt=attempt)
            time.sleep(pause_s)
            pause_s *= 2
        raise AssertionError("unreachable")

    def _write_part(self, task: SaverTask, rank: int) -> int:
        series, world = Series(self._storage, task.series), task.place.world
        written: list[FileEntry] = []
        if task.shares[rank]:
            name = part_file(rank, world)
            with self._storage.create(series.path(task.name, name)) as sink:
                written.append(safetensors_files.write(sink, name, task.shares[rank]))
        if task.own_files is not None and rank == task.place.rank:
            written += self._write_own(series, task.name, task.own_files.path)
        note = PartNote(tuple(written), task.taken)
        put(self._storage, series.path(task.name, part_note(rank, world)), note.to_json())
        return sum(file.size for file in written)

    def _write_own(self, series: Series, name: EntryName, directory: Path) -> list[FileEntry]:
        found = []
        for path in sorted(directory.iterdir()):
            inside = f"{FILES}/{path.name}"
            if not path.is_file() or not is_inside(inside):
                raise CheckpointError(f"on_checkpoint left {path.name!r}: only plain files with plain names are kept")
            digest = hashlib.sha256()
            size = 0
            with path.open("rb") as source, self._storage.create(series.path(name, inside)) as sink:
                while chunk := source.read(CHUNK_BYTES):
                    digest.update(chunk)
                    sink.write(chunk)
                    size += len(chunk)
            found.append(FileEntry(inside, size, digest.hexdigest()))
        return found

    def _complete(self, task: SaverTask) -> None:
        """Complete the checkpoint if all parts are there; give it up if one will never come."""
        series, place = Series(self._storage, task.series), task.place
        there = self._storage.files(series.path(task.name))
        notes = [part_note(rank, place.world) for rank in range(place.world)]
        missing = [rank for rank, note in enumerate(notes) if note not in there]
        if MANIFEST not in there:
            if missing and not self._write_for_the_dead(task, missing):
                return
            self._publish(series, task, notes)
        self._unfinished.pop(task.series, None)
        failed = self.standing.failed.get(task.series)
        if failed is None or failed <= task.name:  # a save that found no room may have failed behind this one
            self.standing.failures.pop(task.series, None)
        if task.series == PERIODIC and self.standing.place == place:
            self.standing.complete = True

    def _publish(self, series: Series, task: SaverTask, notes: list[str]) -> None:
        parts = [PartNote.from_json(self._storage.read(series.path(task.name, note))) for note in notes]
        if task.series == PERIODIC and self._settings.ledger:
            await_step(Path(self._settings.ledger), task.moment.step, LEDGER_S, durable=self._storage.durable)
        manifest = Manifest(
            job=self._settings.job,
            job_id=self._settings.job_id,
            series=task.series,
            entry=str(task.name),
            moment=task.moment,
            generation=task.place.generation,
            world=task.place.world,
            taken=max(part.taken for part in parts),
            files=tuple(file for part in parts for file in part.files),
            header=task.header,
        )
        self._tried(task, lambda: series.publish(manifest))
        self._note(
            "checkpoint_complete", series=task.series, entry=str(task.name), step=task.moment.step, bytes=manifest.size
        )
        with self._idle:
            self._asked[series.name] = task.name
        self._point(series.name, task.name, lambda holds: self._answered(Prune(series.name, task.name), holds))

    def _answered(self, prune: Prune, holds: bool) -> None:
        with self._idle:
            if self._asked.get(prune.series) == prune.name:
                del self._asked[prune.series]
            self.pending += holds
            self._idle.notify_all()
        if holds:
            self._tasks.put(prune)

    def _prune(self, granted: Prune) -> None:
        """Remove older entries. An entry that cannot be removed now is tried again after the next checkpoint."""
        series = Series(self._storage, granted.series)
        periodic, job_id = series.name == PERIODIC, self._settings.job_id
        keep, skipped = (self._keep, self._settings.skipped) if periodic else (Keep(1), ())
        try:
            if periodic or job_id:
                gone = series.prune(keep, job_id, newest=granted.name, skipped=skipped)
            else:
                gone = series.replace_with(granted.name)
        except OSError as error:
            self._note("checkpoints_not_pruned", series=series.name, because=str(error))
            return
        if gone:
            self._note("checkpoints_pruned", series=series.name, entries=[str(name) for name in gone])

    def _write_for_the_dead(self, task: SaverTask, missing: list[int]) -> bool:
        """Write the parts of dead members. Whether all parts are there. Raises CheckpointError if one never will be."""
        wrote, members = task.place.members, self._place().members
        if any(wrote[rank] in members for rank in missing):
            return False
        for rank in missing:
            if rank not in task.shares or (rank == 0 and task.has_own_files):
                raise CheckpointError(
                    f"{wrote[rank]} left the job before its part was written; the checkpoint before this one stands"
                )
        if task.place.rank != min(rank for rank, worker in enumerate(wrote) if worker in members):
            return False
        for rank in missing:
            self._tried(task, lambda rank=rank: self._write_part(task, rank))  # type: ignore[misc]
            self._note("checkpoint_part_taken_over", entry=str(task.name), series=task.series, of=wrote[rank])
        return True
