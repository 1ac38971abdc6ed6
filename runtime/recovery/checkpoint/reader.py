"""Reads the tensors of a checkpoint or snapshot into memory, and checks every byte."""

from __future__ import annotations

import torch

from elastic.checkpoints.description import described_tensors, unique_names
from elastic.checkpoints.layout import TensorPiece
from elastic.checkpoints.manifest import Manifest
from elastic.checkpoints.series import Series
from elastic.errors import CheckpointCorrupt
from runtime.recovery.checkpoint.safetensors_files import Reading, plain
from runtime.recovery.state.encoding import from_blob


def read(series: Series, manifest: Manifest) -> list[torch.Tensor]:
    """The tensors that manifest.header describes, as bytes in its order: uint8, shape (nbytes,), CPU.

    Reads each file once, from start to end. Raises OSError, and CheckpointCorrupt if a byte differs from what was
    written, or a tensor has no bytes.
    """
    tensors = described_tensors(manifest.header)
    pieces = series.pieces(manifest)  # checked before memory is allocated: each row of each tensor once
    blobs = [torch.empty(tensor.nbytes, dtype=torch.uint8) for tensor in tensors]
    names = unique_names([tensor.name for tensor in tensors])
    targets = {
        name: plain(from_blob(blob, tensor.dtype, tensor.shape))
        for name, tensor, blob in zip(names, tensors, blobs, strict=True)
    }
    by_file: dict[str, list[TensorPiece]] = {}
    for piece in pieces:
        by_file.setdefault(piece.file, []).append(piece)
    for file in manifest.data:
        with series.storage.open(series.path(manifest.entry, file.name)) as source:
            reading = Reading(source, file)
            expected = by_file.get(file.name, [])
            if reading.header() != expected:
                raise CheckpointCorrupt(f"{file.name} is damaged: its header is another than before")
            for piece in expected:
                reading.fill(_rows(targets[piece.name], piece))
            reading.finish()
    return blobs


def _rows(target: torch.Tensor, piece: TensorPiece) -> torch.Tensor:
    """The piece's part of its tensor's memory."""
    return target.narrow(0, piece.offsets[0], piece.shape[0]) if piece.shape else target
