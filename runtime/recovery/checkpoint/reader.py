"""Reading a checkpoint: a StorageReader of torch.distributed.checkpoint that checks every byte it delivers.

It reads any fsspec path, and into any sharding:

    reader = EntryReader.at("s3://bucket/run/checkpoints", "_periodic", "step-000000000500.0.g3-0123abcd")
    torch.distributed.checkpoint.load(state_dict, storage_reader=reader)
"""

from __future__ import annotations

import os
from typing import Any, Self

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

from elastic.checkpoints.description import described_tensors, unique_names
from elastic.checkpoints.layout import TensorPiece
from elastic.checkpoints.manifest import FileEntry, Manifest
from elastic.checkpoints.naming import EntryName
from elastic.checkpoints.series import Series
from elastic.checkpoints.storage import storage_at
from elastic.errors import NoCheckpoint
from runtime.recovery.checkpoint.safetensors_files import Reading, dtype_of, plain
from runtime.recovery.state.encoding import from_blob


class EntryReader(StorageReader):
    """One complete checkpoint. Raises CheckpointCorrupt and OSError."""

    def __init__(self, series: Series, manifest: Manifest) -> None:
        self._series = series
        self.manifest = manifest
        self._wanted: dict[tuple[str, tuple[int, ...]], list[ReadItem]] = {}

    @classmethod
    def at(cls, root: str, series: str, entry: str) -> Self:
        """The reader of an entry. Raises NoCheckpoint if there is no complete entry of that name."""
        place, name = Series(storage_at(root), series), EntryName.parse(entry)
        found = place.look(name) if name is not None else None
        if found is None or found.manifest is None or found.problem:
            raise NoCheckpoint(f"{root}/{series}/{entry} cannot be used: {found.problem if found else 'no such name'}")
        return cls(place, found.manifest)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._wanted = {}

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        stored: dict[str, list[TensorPiece]] = {}
        for piece in self._series.pieces(self.manifest):
            stored.setdefault(piece.name, []).append(piece)
        tensors: dict[str, Any] = {}
        for name, pieces in stored.items():
            ends = [[o + s for o, s in zip(piece.offsets, piece.shape, strict=True)] for piece in pieces]
            tensors[name] = TensorStorageMetadata(
                TensorProperties(dtype=dtype_of(pieces[0])),
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
        """Read all files, each once and in order, and give the planner the tensors that it asked for."""
        for item in plan.items:
            key = (item.storage_index.fqn, tuple(item.storage_index.offset or ()))
            self._wanted.setdefault(key, []).append(item)
        for file in self.manifest.data:
            self._read(file, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False

    def _read(self, file: FileEntry, planner: LoadPlanner) -> None:
        with self._series.storage.open(self._series.path(self.manifest.entry, file.name)) as source:
            reading = Reading(source, file)
            for stored in reading.header():
                items = self._wanted.get((stored.name, stored.offsets), [])
                whole = _whole_target(items, stored, planner)
                rows = torch.empty(stored.shape, dtype=dtype_of(stored)) if whole is None else whole
                reading.fill(rows)
                for item in items:
                    if whole is None:
                        planner.resolve_tensor(item).detach().copy_(_piece(rows, item))
                    planner.commit_tensor(item, planner.resolve_tensor(item))
            reading.finish()


def read(series: Series, manifest: Manifest) -> list[torch.Tensor]:
    """The tensors that manifest.header describes, as bytes in its order: uint8, shape (nbytes,), CPU.

    Raises CheckpointCorrupt if a byte differs from what was written, or a tensor has no bytes.
    """
    tensors = described_tensors(manifest.header)
    reader, planner = EntryReader(series, manifest), DefaultLoadPlanner()
    metadata = reader.read_metadata()  # checked before memory is allocated
    blobs = [torch.empty(tensor.nbytes, dtype=torch.uint8) for tensor in tensors]
    names = unique_names([tensor.name for tensor in tensors])
    targets = {
        name: plain(from_blob(blob, tensor.dtype, tensor.shape))
        for name, tensor, blob in zip(names, tensors, blobs, strict=True)
    }
    planner.set_up_planner(targets, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    (plan,) = reader.prepare_global_plan(planner.create_global_plan([planner.create_local_plan()]))
    reader.read_data(planner.finish_plan(plan), planner).wait()
    return blobs


def _whole_target(items: list[ReadItem], stored: TensorPiece, planner: LoadPlanner) -> torch.Tensor | None:
    """The memory into which the rows can be read directly, if one reader wants all of them in one piece; else None."""
    if len(items) != 1 or tuple(items[0].lengths) != stored.shape:
        return None
    target = planner.resolve_tensor(items[0]).detach()
    plain_cpu = target.device.type == "cpu" and target.dtype == dtype_of(stored)
    return target if plain_cpu and target.is_contiguous() and tuple(target.shape) == stored.shape else None


def _piece(rows: torch.Tensor, item: ReadItem) -> torch.Tensor:
    for dimension, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        rows = rows.narrow(dimension, offset, length)
    return rows
