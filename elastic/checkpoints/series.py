"""One series of checkpoints on its storage: its entries, their checks, their removal."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass, replace

from elastic.checkpoints.description import described_tensors
from elastic.checkpoints.layout import LENGTH, TensorPiece, check_covered, header_bytes, pieces
from elastic.checkpoints.manifest import FileEntry, Manifest
from elastic.checkpoints.naming import MANIFEST, PERIODIC, EntryName
from elastic.checkpoints.policy import Keep, superfluous
from elastic.checkpoints.select import REMOVED, Found, assess, newest_first, problem_of_sizes
from elastic.checkpoints.settings import Settings
from elastic.checkpoints.storage import MemoryStorage, Storage, put, storage_at
from elastic.errors import CheckpointCorrupt, ElasticError

CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Series:
    """name: the directory below the storage's root."""

    storage: Storage
    name: str = PERIODIC

    def path(self, entry: EntryName | str, file: str = "") -> str:
        return f"{self.name}/{entry}/{file}".rstrip("/")

    def names(self) -> list[EntryName]:
        """The names of all entries, complete or not, oldest first."""
        found = (EntryName.parse(name) for name in self.storage.directories(self.name))
        return sorted(name for name in found if name is not None)

    def look(self, name: EntryName, job_id: str = "") -> Found:
        """Assess an entry without reading its data."""
        try:
            content = self.storage.read(self.path(name, MANIFEST))
        except FileNotFoundError:
            return assess(name, job_id, None, {})
        except OSError as error:
            return Found(name, None, f"its manifest cannot be read: {error}")
        return self._unless_removed(assess(name, job_id, content, self.storage.files(self.path(name))))

    def all(self, job_id: str = "") -> list[Found]:
        """All entries, newest first."""
        found = (self.look(name, job_id) for name in self.names())
        return newest_first(entry for entry in found if not entry.removed)

    def verify(self, found: Found, steps: int | None = None) -> Found:
        """The entry after a full check: every byte is compared, and the files' content with the manifest.

        steps: number of steps in the ledger; None: it does not matter.
        """
        if found.problem or found.manifest is None:
            return found
        if steps is not None and found.name.step > steps:
            return replace(found, problem=f"the ledger ends after {steps} steps")
        problems = (self._problem_of(found.name, file) for file in found.manifest.files)
        problem = next((problem for problem in problems if problem), "") or self._problem_within(found.manifest)
        return self._unless_removed(replace(found, problem=problem))

    def pieces(self, manifest: Manifest) -> list[TensorPiece]:
        """The pieces in its data files, after a check that the manifest describes them. Nothing is allocated beyond the
        size of the files. Raises CheckpointCorrupt and OSError."""
        if problem := problem_of_sizes(manifest, self.storage.files(self.path(manifest.entry))):
            raise CheckpointCorrupt(problem)
        found: list[TensorPiece] = []
        for file in manifest.data:
            with self.storage.open(self.path(manifest.entry, file.name)) as source:
                found += pieces(file, source.read(header_bytes(file, source.read(LENGTH.size))))
        check_covered(described_tensors(manifest.header), found)
        return found

    def newest(self, job_id: str = "", steps: int | None = None) -> tuple[Found | None, list[Found]]:
        """The newest entry that is complete and undamaged, and the newer ones that were skipped, newest first.

        steps: as in `verify`.
        """
        skipped: list[Found] = []
        for found in self.all(job_id):
            if not (found := self.verify(found, steps)).problem:
                return found, skipped
            skipped += [] if found.removed else [found]
        return None, skipped

    def publish(self, manifest: Manifest) -> None:
        """Make the entry a checkpoint. Its files must be durable. To repeat this with the same content is harmless."""
        put(self.storage, self.path(manifest.entry, MANIFEST), manifest.to_json())

    def prune(
        self,
        keep: Keep,
        job_id: str,
        *,
        newest: EntryName | None = None,
        skipped: Collection[str] = (),
        thorough: bool = False,
        steps: int | None = None,
    ) -> list[EntryName]:
        """Remove this job's entries that the rule does not keep; returns their names. Raises OSError if one cannot be
        removed, after all others were: on NFS a directory stays for as long as another process has a file of it open.

        newest: newer entries are ignored; the worker that has just completed this one knows nothing of them. skipped:
        names of entries that cannot be used: they replace no others, and are removed when there are newer ones.
        thorough: read every byte first, so that a damaged entry replaces no other. steps: as in `verify`, if thorough.
        """
        found = [entry for entry in self.all(job_id) if newest is None or entry.name <= newest]
        found = [self.verify(entry, steps) if thorough else entry for entry in found]
        complete = [entry.name for entry in found if not entry.problem and str(entry.name) not in skipped]
        ours = [entry for entry in found if entry.manifest is None or not job_id or entry.manifest.job_id == job_id]
        unusable = [entry.name for entry in ours if str(entry.name) in skipped and not entry.unfinished]
        unfinished = [entry.name for entry in found if entry.unfinished]
        gone, refused = superfluous(keep, complete, unusable + unfinished), list[OSError]()
        for name in gone:
            try:
                self.remove(name)
            except OSError as error:
                refused.append(error)
        if refused:
            raise refused[0]
        return gone

    def replace_with(self, newest: EntryName) -> list[EntryName]:
        """Remove all other entries of jobs without an id, also those with more steps: such a job is one process, and
        earlier ones of the same script are over. Newer entries of the process that has taken this one stay. Returns
        the names of those removed. Raises OSError."""
        newest = EntryName.of(str(newest))  # its token as those of the entries
        older = [name for name in self.names() if name.token != newest.token or name < newest]
        gone = []
        for name in older:
            found = self.look(name)
            # What has no manifest may be another process's, which writes it now; so `prune` judges it, too.
            if (found.unfinished and name < newest) or (found.manifest is not None and not found.manifest.job_id):
                gone.append(name)
        for name in gone:
            self.remove(name)
        return gone

    def keep_only(self, entry: str) -> None:
        """Remove all other entries, of any job."""
        for name in self.names():
            if str(name) != entry:
                self.remove(name)

    def remove(self, name: EntryName) -> None:
        """Remove an entry, its manifest first: the rest of an interrupted removal is no checkpoint."""
        self.storage.remove(self.path(name, MANIFEST))
        self.storage.remove_directory(self.path(name))

    def _unless_removed(self, found: Found) -> Found:
        """The entry, or one that says so if its manifest, which goes first, is gone by now: then no file is damaged."""
        if not found.problem:
            return found
        try:
            self.storage.read(self.path(found.name, MANIFEST))
        except FileNotFoundError:
            return Found(found.name, None, REMOVED)
        except OSError:  # so it is not known to be gone, and what was found before holds
            return found
        return found

    def _problem_of(self, name: EntryName, file: FileEntry) -> str:
        digest = hashlib.sha256()
        size = 0
        buffer = memoryview(bytearray(CHUNK_BYTES))
        try:
            with self.storage.open(self.path(name, file.name)) as source:
                while got := source.readinto(buffer):
                    digest.update(buffer[:got])
                    size += got
        except FileNotFoundError:
            return f"its file {file.name} is missing"
        except OSError as error:
            return f"its file {file.name} cannot be read: {error}"
        if size != file.size:
            return f"its file {file.name} has {size} bytes instead of {file.size}"
        if digest.hexdigest() != file.sha256:
            return f"its file {file.name} is damaged: its SHA-256 is not the one in the manifest"
        return ""

    def _problem_within(self, manifest: Manifest) -> str:
        try:
            self.pieces(manifest)
        except CheckpointCorrupt as error:
            return str(error)
        except OSError as error:
            return f"its files cannot be read: {error}"
        return ""


def newest_at(url: str, job_id: str) -> EntryName | None:
    """The newest whole checkpoint of a job at that path or URL. Raises ElasticError if it cannot be read from here."""
    try:
        found, _ = Series(storage_at(url)).newest(job_id)
    except OSError as error:
        raise ElasticError(f"{url} cannot be read from here: {error}") from error
    return None if found is None else found.name


def newest_in_memory(settings: Settings) -> str:
    """The newest snapshot of this machine that looks whole without a read of its data; or ""."""
    if not settings.memory:
        return ""
    whole = (found.name for found in Series(MemoryStorage(settings.memory)).all(settings.job_id) if not found.problem)
    return str(next(whole, ""))
