"""The manifest: the files of a checkpoint, where it was taken, and a digest of all that.

It is the commit mark: written last, and never replaced. It is JSON with a digest of its own, so that a flipped bit in
it is found as surely as one in the data.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from elastic.checkpoints.description import BYTES_MAX, check_values, described_tensors
from elastic.checkpoints.naming import EntryName, is_inside, is_series
from elastic.errors import CheckpointCorrupt

MANIFEST_FORMAT = 1
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of the checkpoint. size in bytes; sha256 in hex."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The place in the job where the state was taken."""

    step: int
    """Number of applied steps; the step with this index comes next."""
    epoch: int
    epoch_start: int
    """Index of the first step of this epoch."""
    seed: int
    shards: int
    """Number of shards; 0: the script has not said it yet."""
    once: dict[str, Any] = field(default_factory=dict)
    """Results of this epoch's collective calls before its steps; a resumed run does not repeat the calls."""
    shared: dict[str, Any] = field(default_factory=dict)
    """Name -> value of each `shared` call before the loop."""
    data: dict[str, Any] | None = None
    """How the samples of this epoch are planned (SamplePlan.about); None if the script draws its own."""
    values: dict[str, Any] = field(default_factory=dict)
    """job.state when this epoch was handed out, as in description.check_values."""
    reduction: str = ""
    """How gradients were summed, as in --reduction; "": not known."""
    compression: str = "none"
    """What they were rounded to, as in --compression."""
    outer: str = "none"
    """How replicas average, as in --outer; "none": by the script, or not at all."""
    stop: str | None = None
    """Why all workers leave after the step that comes next: a stop() that no reduction had carried yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A complete checkpoint. header: see description.py."""

    job: str
    job_id: str
    series: str
    entry: str
    moment: Moment
    generation: int
    world: int
    taken: str
    """Time of day, ISO 8601 in UTC, for people."""
    files: tuple[FileEntry, ...]
    header: dict[str, Any]

    @property
    def name(self) -> EntryName:
        """The entry's name. Raises CheckpointCorrupt if it is not valid."""
        return EntryName.of(self.entry)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def data(self) -> tuple[FileEntry, ...]:
        """The files that hold tensors; the other files are the script's."""
        return tuple(file for file in self.files if file.name.endswith(".safetensors") and "/" not in file.name)

    def to_json(self) -> bytes:
        """The JSON, with the order of its dicts, because the order of dicts in job.state matters."""
        body = {"format": MANIFEST_FORMAT, **asdict(self)}
        return json.dumps({"sha256": _digest(body), **body}, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def from_json(cls, content: bytes) -> Self:
        """Read a manifest. Raises CheckpointCorrupt, saying what is wrong."""
        try:
            body = json.loads(content)
            said = body.pop("sha256")
            if _digest(body) != said:
                raise CheckpointCorrupt("its manifest is damaged: its digest is not the one it names")
            if (version := body.pop("format")) != MANIFEST_FORMAT:
                raise CheckpointCorrupt(f"its format is {version}, and this version reads {MANIFEST_FORMAT}")
            moment = Moment(**body.pop("moment"))
            files = tuple(FileEntry(**file) for file in body.pop("files"))
            manifest = cls(moment=moment, files=files, **body)
            manifest._check()
        except CheckpointCorrupt:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointCorrupt(f"its manifest is damaged: {type(error).__name__} {error}") from error
        return manifest

    def _check(self) -> None:
        moment = self.moment
        numbers = (moment.step, moment.epoch, moment.epoch_start, moment.shards, self.generation, self.world)
        whole = all(type(number) is int and number >= 0 for number in numbers) and type(moment.seed) is int
        if not whole or self.name.step != moment.step:
            raise CheckpointCorrupt("its manifest is damaged: a number is out of bounds")
        texts = (self.job, self.job_id, self.series, self.taken)
        tables = (self.header, moment.once, moment.shared, *([] if moment.data is None else [moment.data]))
        printable = all(isinstance(text, str) and text.isprintable() for text in texts)
        stop = moment.stop is None or isinstance(moment.stop, str)
        if not (printable and stop and is_series(self.series) and all(isinstance(table, dict) for table in tables)):
            raise CheckpointCorrupt("its manifest is damaged: a field is of another type")
        check_values(moment.values)
        _check_files(self.files, "its manifest")
        nbytes = sum(tensor.nbytes for tensor in described_tensors(self.header))
        held = sum(file.size for file in self.data)
        if nbytes > held:
            raise CheckpointCorrupt(f"its manifest is damaged: tensors of {nbytes} bytes in files of {held}")


@dataclass(frozen=True, slots=True)
class PartNote:
    """One member's note about its part. taken: as in Manifest, by this member's clock."""

    files: tuple[FileEntry, ...]
    taken: str

    def to_json(self) -> bytes:
        body = asdict(self)
        return json.dumps({"sha256": _digest(body), **body}, separators=(",", ":"), sort_keys=True).encode() + b"\n"

    @classmethod
    def from_json(cls, content: bytes) -> Self:
        """Read a note. Raises CheckpointCorrupt."""
        try:
            body = json.loads(content)
            said = body.pop("sha256")
            if _digest(body) != said:
                raise CheckpointCorrupt("the note of a part is damaged")
            note = cls(tuple(FileEntry(**file) for file in body["files"]), body["taken"])
            if not isinstance(note.taken, str):
                raise CheckpointCorrupt("the note of a part is damaged: it does not say when it was taken")
            _check_files(note.files, "the note of a part")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointCorrupt(f"the note of a part is damaged: {error}") from error
        return note


def _check_files(files: tuple[FileEntry, ...], what: str) -> None:
    """Raise CheckpointCorrupt for bad files, and TypeError or AttributeError for fields that are not text."""
    for file in files:
        good = is_inside(file.name) and _SHA256.fullmatch(file.sha256) and type(file.size) is int
        if not good or not 0 <= file.size <= BYTES_MAX:
            raise CheckpointCorrupt(f"{what} is damaged: {file.name[:100]!r} cannot be one of its files")
    if len({file.name for file in files}) < len(files):
        raise CheckpointCorrupt(f"{what} is damaged: it names a file twice")


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, separators=(",", ":"), sort_keys=True).encode()).hexdigest()
