"""Reading a checkpoint: a StorageReader of torch.distributed.checkpoint that checks every byte it delivers.

It reads any fsspec path, and into any sharding:

    reader = EntryReader.at("s3://bucket/run/checkpoints", "_periodic", "step-000000000500.0.g3-0123abcd")
    torch.distributed.checkpoint.load(state_dict, storage_reader=reader)
"""

from __future__ import annotations

import math
import os
from typing import Any, Self, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from elastic.checkpoints.manifest import FileEntry, Manifest
from elastic.checkpoints.naming import EntryName
from elastic.checkpoints.series import Series
from elastic.checkpoints.storage import storage_at
from elastic.errors import CheckpointCorrupt, NoCheckpoint
from runtime.checkpoint.files import Reading, Stored, plain, unique_names
from runtime.encoding import from_blob
from runtime.partial import Json


class EntryReader(StorageReader):
    """One complete checkpoint. Raises CheckpointCorrupt and OSError."""

    def __init__(self, series: Series, manifest: Manifest) -> None:
        self._series = series
        self.manifest = manifest
        self._data = [file for file in manifest.files if file.name.endswith(".safetensors") and "/" not in file.name]
        self._wanted: dict[tuple[str, tuple[int, ...]], list[ReadItem]] = {}

    @classmethod
    def at(cls, root: str, series: str, entry: str) -> Self:
        """Raises NoCheckpoint if there is no complete one of that name."""
        place, name = Series(storage_at(root), series), EntryName.parse(entry)
        found = place.look(name) if name is not None else None
        if found is None or found.manifest is None or found.problem:
            raise NoCheckpoint(f"{root}/{series}/{entry} cannot be used: {found.problem if found else 'no such name'}")
        return cls(place, found.manifest)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._wanted = {}

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        stored = [piece for file in self._data for piece in self._header(file)]
        tensors: dict[str, Any] = {}
        for name in {piece.name for piece in stored}:
            pieces = [piece for piece in stored if piece.name == name]
            ends = [[o + s for o, s in zip(piece.offsets, piece.shape, strict=True)] for piece in pieces]
            tensors[name] = TensorStorageMetadata(
                TensorProperties(dtype=pieces[0].dtype),
                torch.Size([max(column) for column in zip(*ends, strict=True)]),
                [ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.shape)) for piece in pieces],
            )
        return Metadata(state_dict_metadata=tensors)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        self.reset()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all files, each once and in order, and give the planner what it asked for."""
        for item in plan.items:
            key = (item.storage_index.fqn, tuple(item.storage_index.offset or ()))
            self._wanted.setdefault(key, []).append(item)
        for file in self._data:
            self._read(file, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False

    def _header(self, file: FileEntry) -> list[Stored]:
        with self._series.storage.open(self._series.path(self.manifest.entry, file.name)) as source:
            return Reading(source, file).header()

    def _read(self, file: FileEntry, planner: LoadPlanner) -> None:
        with self._series.storage.open(self._series.path(self.manifest.entry, file.name)) as source:
            reading = Reading(source, file)
            for stored in reading.header():
                items = self._wanted.get((stored.name, stored.offsets), [])
                whole = _whole_target(items, stored, planner)
                rows = torch.empty(stored.shape, dtype=stored.dtype) if whole is None else whole
                reading.fill(rows)
                for item in items:
                    if whole is None:
                        planner.resolve_tensor(item).detach().copy_(_piece(rows, item))
                    planner.commit_tensor(item, planner.resolve_tensor(item))
            reading.finish()


def read(series: Series, manifest: Manifest) -> list[torch.Tensor]:
    """The tensors that manifest.header describes, as bytes in its order: uint8, shape (nbytes,), CPU.

    Raises CheckpointCorrupt if a byte is not as it was written, or a tensor has no bytes.
    """
    entries = cast(list[dict[str, Json]], manifest.header["tensors"])
    names = unique_names([cast(str, entry["name"]) for entry in entries])
    blobs = [torch.empty(cast(int, entry["nbytes"]), dtype=torch.uint8) for entry in entries]
    targets = {
        name: plain(from_blob(blob, cast(str, entry["dtype"]), cast(list[int], entry["shape"])))
        for name, entry, blob in zip(names, entries, blobs, strict=True)
    }
    reader, planner = EntryReader(series, manifest), DefaultLoadPlanner()
    metadata = reader.read_metadata()
    _check_covered(targets, metadata)
    planner.set_up_planner(targets, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    (plan,) = reader.prepare_global_plan(planner.create_global_plan([planner.create_local_plan()]))
    reader.read_data(planner.finish_plan(plan), planner).wait()
    return blobs


def _check_covered(targets: dict[str, torch.Tensor], metadata: Metadata) -> None:
    for name, target in targets.items():
        stored = metadata.state_dict_metadata.get(name)
        chunks = stored.chunks if isinstance(stored, TensorStorageMetadata) else []
        covered = sum(math.prod(chunk.sizes) for chunk in chunks)
        same = isinstance(stored, TensorStorageMetadata) and stored.size == target.shape
        if not same or covered != target.numel():
            raise CheckpointCorrupt(f"{name} has {covered} of {target.numel()} elements in the checkpoint's files")


def _whole_target(items: list[ReadItem], stored: Stored, planner: LoadPlanner) -> torch.Tensor | None:
    """Where the rows can be read to without a detour: one reader wants all of them, in one piece of memory."""
    if len(items) != 1 or tuple(items[0].lengths) != stored.shape:
        return None
    target = planner.resolve_tensor(items[0]).detach()
    plain_cpu = target.device.type == "cpu" and target.dtype == stored.dtype
    return target if plain_cpu and target.is_contiguous() and tuple(target.shape) == stored.shape else None


def _piece(rows: torch.Tensor, item: ReadItem) -> torch.Tensor:
    for dimension, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        rows = rows.narrow(dimension, offset, length)
    return rows
