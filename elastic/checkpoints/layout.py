"""The layout of the data files: safetensors, with the places of rows as torch.distributed.checkpoint writes them. A
file has 8 bytes, the length of its header; the header, JSON; the data.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastic.checkpoints.description import ITEM_BYTES, Described, sizes, unique_names
from elastic.checkpoints.manifest import FileEntry
from elastic.errors import CheckpointCorrupt

HEADER_BYTES_MAX = 1 << 28
LENGTH = struct.Struct("<Q")
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""dtype -> its name in safetensors. Complex numbers have no name, and are stored as their two parts."""
_ITEM_BYTES = {name: ITEM_BYTES[dtype] for dtype, name in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """Consecutive rows of a tensor: bytes begin..end-1 of the file. dtype: its name in safetensors.

    offsets: where in the tensor the rows begin; only the first can differ from 0.
    """

    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    begin: int
    end: int


def header_bytes(file: FileEntry, prefix: bytes) -> int:
    """The length of a file's header, from its first 8 bytes. Raises CheckpointCorrupt."""
    if len(prefix) != LENGTH.size:
        raise _corrupt(file, f"it ends after {len(prefix)} bytes")
    length = int(LENGTH.unpack(prefix)[0])
    if length > min(HEADER_BYTES_MAX, file.size - LENGTH.size):
        raise _corrupt(file, f"its header would have {length} bytes")
    return length


def pieces(file: FileEntry, encoded: bytes) -> list[TensorPiece]:
    """The pieces of tensors in a file, in the order of its data. encoded: its header. Raises CheckpointCorrupt."""
    start = LENGTH.size + len(encoded)
    try:
        header = json.loads(encoded)
        places = json.loads(header.pop("__metadata__")["DCP_SHARDING_INFO"])
        found = []
        for name, said in header.items():
            offsets = sizes(places[name]["saved_offsets"], f"the place of {name[:100]}")
            shape, (begin, end) = sizes(said["shape"], f"the shape of {name[:100]}"), sizes(said["data_offsets"], name)
            if len(offsets) != len(shape) or any(offsets[1:]):
                raise ValueError(f"{name[:100]} cannot lie at {offsets}")
            if end - begin != math.prod(shape) * _ITEM_BYTES[said["dtype"]]:
                raise ValueError(f"{name[:100]} has {end - begin} bytes")
            found.append(TensorPiece(file.name, name, said["dtype"], shape, offsets, start + begin, start + end))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _corrupt(file, f"its header: {type(error).__name__} {error}") from error
    found.sort(key=lambda piece: (piece.begin, piece.end))
    at = start
    for piece in found:
        if piece.begin != at:
            raise _corrupt(file, f"{piece.name[:100]} does not lie where its neighbour ends")
        at = piece.end
    if at != file.size:
        raise _corrupt(file, "its header does not cover it")
    return found


def check_covered(tensors: Sequence[Described], found: Iterable[TensorPiece]) -> None:
    """Raise CheckpointCorrupt unless these pieces are all rows of these tensors, each once."""
    by_name: dict[str, list[TensorPiece]] = {}
    for piece in found:
        by_name.setdefault(piece.name, []).append(piece)
    for name, tensor in zip(unique_names([tensor.name for tensor in tensors]), tensors, strict=True):
        dtype, shape = as_stored(tensor)
        rows = 0
        parts = by_name.pop(name, [])
        for piece in sorted(parts, key=lambda piece: piece.offsets):
            same = piece.dtype == dtype and piece.shape[1:] == shape[1:] and len(piece.shape) == len(shape)
            if not same or (shape and piece.offsets[0] != rows):
                raise CheckpointCorrupt(f"{piece.file} is damaged: {name[:100]} is not as the manifest describes it")
            rows += piece.shape[0] if shape else 1
        if not parts or rows != (shape[0] if shape else 1):
            raise CheckpointCorrupt(f"{name[:100]} has {rows} of {shape[0] if shape else 1} rows in the files")
    if by_name:
        raise CheckpointCorrupt(f"the files hold {min(by_name)[:100]}, which the manifest does not describe")


def as_stored(tensor: Described) -> tuple[str, tuple[int, ...]]:
    """(dtype by safetensors' name, shape): a complex tensor gets a last dimension of its two parts."""
    parts = {"complex64": "F32", "complex128": "F64"}.get(tensor.dtype)
    return (parts, (*tensor.shape, 2)) if parts else (DTYPES[tensor.dtype], tensor.shape)


def _corrupt(file: FileEntry, because: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(f"{file.name} is damaged: {because}")
