"""Writes and reads the data files, whose layout is in elastic/checkpoints/layout.py.

So `torch.distributed.checkpoint.HuggingFaceStorageReader(directory)` reads a checkpoint too, into any sharding, and the
safetensors library opens every file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch

from elastic.checkpoints.layout import DTYPES, LENGTH, TensorPiece, header_bytes, pieces
from elastic.checkpoints.manifest import FileEntry
from elastic.checkpoints.storage import FileSink, FileSource
from elastic.errors import CheckpointCorrupt
from runtime.recovery.checkpoint.stager import Staged
from runtime.recovery.state.encoding import to_blob

CHUNK_BYTES = 4 << 20
_NAMES: dict[torch.dtype, str] = {getattr(torch, name): known for name, known in DTYPES.items()}


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in a form that the format has: a complex tensor gets a last dimension of its two parts."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def write(sink: FileSink, name: str, staged: Sequence[Staged]) -> FileEntry:
    """Write one file. The result has the digest of the written bytes."""
    header: dict[str, Any] = {}
    places: dict[str, Any] = {}
    end = 0
    for piece in staged:
        rows = plain(torch.empty(piece.rows, dtype=piece.dtype, device="meta"))
        begin, end = end, end + rows.nbytes
        header[piece.name] = {"dtype": _NAMES[rows.dtype], "shape": list(rows.shape), "data_offsets": [begin, end]}
        places[piece.name] = {"saved_offsets": [piece.first, *[0] * (rows.dim() - 1)] if rows.dim() else []}
    header["__metadata__"] = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(places)}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    digest = hashlib.sha256()
    size = 0
    contents = (_bytes(part) for piece in staged for part in piece.content)
    for content in (memoryview(LENGTH.pack(len(encoded)) + encoded), *contents):
        for start in range(0, content.nbytes, CHUNK_BYTES):
            part = content[start : start + CHUNK_BYTES]
            digest.update(part)
            sink.write(part)
        size += content.nbytes
    return FileEntry(name, size, digest.hexdigest())


class Reading:
    """Reads a file from start to end and hashes it meanwhile. Raises CheckpointCorrupt for a file that is not valid."""

    def __init__(self, source: FileSource, entry: FileEntry) -> None:
        self._source = source
        self._entry = entry
        self._digest = hashlib.sha256()
        self._read = 0

    def header(self) -> list[TensorPiece]:
        """The file's tensors, in the order of its data. To be called first."""
        return pieces(self._entry, self._take(header_bytes(self._entry, self._take(LENGTH.size))))

    def fill(self, target: torch.Tensor) -> None:
        """Read the next tensor. target: contiguous, CPU."""
        self._into(_bytes(target))

    def finish(self) -> None:
        """Check the digest, after everything has been read."""
        if self._read != self._entry.size or self._digest.hexdigest() != self._entry.sha256:
            raise self._corrupt("its SHA-256 is not the one in the manifest")

    def _take(self, size: int) -> bytes:
        buffer = bytearray(size)
        self._into(memoryview(buffer))
        return bytes(buffer)

    def _into(self, view: memoryview) -> None:
        for start in range(0, view.nbytes, CHUNK_BYTES):
            part = view[start : start + CHUNK_BYTES]
            got = 0
            while got < part.nbytes:
                count = self._source.readinto(part[got:])
                if not count:
                    raise self._corrupt(f"it ends after {self._read + got} bytes")
                got += count
            self._digest.update(part)
            self._read += part.nbytes

    def _corrupt(self, because: str) -> CheckpointCorrupt:
        return CheckpointCorrupt(f"{self._entry.name} is damaged: {because}")


def _bytes(tensor: torch.Tensor) -> memoryview:
    return to_blob(tensor).numpy().data if tensor.numel() else memoryview(b"")
