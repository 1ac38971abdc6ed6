"""Whether an entry can be used, and if not, why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from elastic.checkpoints.manifest import Manifest
from elastic.checkpoints.naming import EntryName
from elastic.errors import CheckpointCorrupt


@dataclass(frozen=True, slots=True)
class Found:
    """An entry on the storage. problem: why it cannot be used; "": no problem is known."""

    name: EntryName
    manifest: Manifest | None
    problem: str = ""

    @property
    def unfinished(self) -> bool:
        """Whether it was never completed, or is being written now."""
        return self.manifest is None and self.problem == UNFINISHED

    @property
    def removed(self) -> bool:
        """Whether somebody has removed it while it was read: a job that trains keeps only its newest ones."""
        return self.manifest is None and self.problem == REMOVED


UNFINISHED = "it was never completed"
REMOVED = "it was removed just now"


def assess(name: EntryName, job_id: str, content: bytes | None, sizes: Mapping[str, int]) -> Found:
    """Assess an entry without reading its data.

    content: of its manifest; None: there is none. sizes: file -> bytes on the storage. job_id "": any job's.
    """
    if content is None:
        return Found(name, None, UNFINISHED)
    try:
        manifest = Manifest.from_json(content)
    except CheckpointCorrupt as error:
        return Found(name, None, str(error))
    if job_id and manifest.job_id != job_id:
        return Found(name, manifest, f"it is of another job, {manifest.job} ({manifest.job_id})")
    if manifest.entry != str(name):
        return Found(name, manifest, f"its manifest is that of {manifest.entry}")
    return Found(name, manifest, problem_of_sizes(manifest, sizes))


def problem_of_sizes(manifest: Manifest, sizes: Mapping[str, int]) -> str:
    """Why these files cannot be those of the manifest; "" if they can."""
    for file in manifest.files:
        if file.name not in sizes:
            return f"its file {file.name} is missing"
        if sizes[file.name] != file.size:
            return f"its file {file.name} has {sizes[file.name]} bytes instead of {file.size}"
    return ""


def newest_first(found: Iterable[Found]) -> list[Found]:
    return sorted(found, key=lambda entry: entry.name, reverse=True)
