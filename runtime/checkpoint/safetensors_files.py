"""Writing and reading the data files, which are laid out as elastic/checkpoints/layout.py says.

So `torch.distributed.checkpoint.HuggingFaceStorageReader(directory)` reads a checkpoint too, into any sharding, and
every file opens with the safetensors library.
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
from runtime.checkpoint.stager import Staged
from runtime.state.encoding import to_blob

CHUNK_BYTES = 4 << 20
_NAMES: dict[torch.dtype, str] = {getattr(torch, name): known for name, known in DTYPES.items()}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def dtype_of(piece: TensorPiece) -> torch.dtype:
    return _DTYPES[piece.dtype]


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as the format can say it: a complex one gets a last dimension of its two parts."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def write(sink: FileSink, name: str, staged: Sequence[Staged]) -> FileEntry:
    """Write one file; what is returned has the digest of the bytes that went out."""
    header: dict[str, Any] = {}
    places: dict[str, Any] = {}
    end = 0
    for piece in staged:
        rows = plain(piece.rows)
        begin, end = end, end + rows.numel() * rows.element_size()
        header[piece.name] = {"dtype": _NAMES[rows.dtype], "shape": list(rows.shape), "data_offsets": [begin, end]}
        places[piece.name] = {"saved_offsets": [piece.first, *[0] * (rows.dim() - 1)] if rows.dim() else []}
    header["__metadata__"] = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(places)}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    digest = hashlib.sha256()
    size = 0
    for content in (memoryview(LENGTH.pack(len(encoded)) + encoded), *(_bytes(piece.rows) for piece in staged)):
        for start in range(0, content.nbytes, CHUNK_BYTES):
            part = content[start : start + CHUNK_BYTES]
            digest.update(part)
            sink.write(part)
        size += content.nbytes
    return FileEntry(name, size, digest.hexdigest())


class Reading:
    """A file being read from start to end, and hashed on the way. Raises CheckpointCorrupt for what is no such file."""

    def __init__(self, source: FileSource, entry: FileEntry) -> None:
        self._source = source
        self._entry = entry
        self._digest = hashlib.sha256()
        self._read = 0

    def header(self) -> list[TensorPiece]:
        """What the file holds, in the order of its data. Called first."""
        return pieces(self._entry, self._take(header_bytes(self._entry, self._take(LENGTH.size))))

    def fill(self, target: torch.Tensor) -> None:
        """The next tensor. target: contiguous, CPU."""
        self._into(_bytes(target))

    def finish(self) -> None:
        """Everything has been read: now it is known whether it was right."""
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
