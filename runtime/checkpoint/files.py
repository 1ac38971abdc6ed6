"""The data files: safetensors, with the places of the rows as torch.distributed.checkpoint writes them.

So `torch.distributed.checkpoint.HuggingFaceStorageReader(directory)` reads a checkpoint too, into any sharding, and
every file opens with the safetensors library. One has: 8 bytes, the length of the header; the header, JSON; the data.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from elastic.checkpoints.manifest import FileEntry
from elastic.checkpoints.storage import Sink, Source
from elastic.errors import CheckpointCorrupt
from runtime.checkpoint.stager import Staged
from runtime.encoding import to_blob

CHUNK_BYTES = 4 << 20
HEADER_BYTES_MAX = 1 << 28
_LENGTH = struct.Struct("<Q")
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True, slots=True)
class Stored:
    """Rows of a tensor in a file: where in the tensor, where in the file's data (bytes), and of which kind."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    begin: int
    end: int


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as the format can say it: a complex one gets a last dimension of its two parts."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def unique_names(names: list[str]) -> list[str]:
    """Names for the files: two entries of one name, such as keys 1 and "1" of one dict, stay apart."""
    seen: dict[str, int] = {}
    found = []
    for name in names:
        count = seen.setdefault(name, 0)
        seen[name] += 1
        found.append(f"{name}#{count}" if count else name)
    return found


def write(sink: Sink, name: str, staged: Sequence[Staged]) -> FileEntry:
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
    for content in (memoryview(_LENGTH.pack(len(encoded)) + encoded), *(_bytes(piece.rows) for piece in staged)):
        for start in range(0, content.nbytes, CHUNK_BYTES):
            part = content[start : start + CHUNK_BYTES]
            digest.update(part)
            sink.write(part)
        size += content.nbytes
    return FileEntry(name, size, digest.hexdigest())


class Reading:
    """A file being read from start to end, and hashed on the way. Raises CheckpointCorrupt for what is no such file."""

    def __init__(self, source: Source, entry: FileEntry) -> None:
        self._source = source
        self._entry = entry
        self._digest = hashlib.sha256()
        self._read = 0

    def header(self) -> list[Stored]:
        """What the file holds, in the order of its data. Called first."""
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size))
        if length > min(HEADER_BYTES_MAX, self._entry.size):
            raise self._corrupt(f"its header would have {length} bytes")
        try:
            header = json.loads(self._take(length))
            places = json.loads(header.pop("__metadata__")["DCP_SHARDING_INFO"])
            found = [
                Stored(
                    name,
                    _DTYPES[said["dtype"]],
                    tuple(said["shape"]),
                    tuple(places[name]["saved_offsets"]),
                    *said["data_offsets"],
                )
                for name, said in header.items()
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise self._corrupt(f"its header: {type(error).__name__} {error}") from error
        found.sort(key=lambda stored: (stored.begin, stored.end))
        end = 0
        for stored in found:
            if stored.begin != end or stored.end - end != math.prod(stored.shape) * stored.dtype.itemsize:
                raise self._corrupt(f"{stored.name} does not lie where its neighbour ends")
            end = stored.end
        if _LENGTH.size + length + end != self._entry.size:
            raise self._corrupt("its header does not cover it")
        return found

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
