"""Which steps the files of an offline run of Weights & Biases hold.

A .wandb file has a header of seven bytes, and then records as LevelDB's log has them
(https://github.com/google/leveldb/blob/main/doc/log_format.md): blocks of 32 KiB; in a block a checksum of four bytes,
a length of two and a kind of one before each piece. The records are protobuf messages of the package wandb.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HEADER = 7
BLOCK = 1 << 15
_PIECE = struct.Struct("<IHB")
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


@dataclass(frozen=True, slots=True)
class Held:
    """What a file holds. steps: in the order in which they were logged. ended: its process has closed it."""

    steps: list[int]
    ended: bool


def segments(directory: Path, run: str) -> list[Path]:
    """The files of an offline run, oldest first: each leader has written one."""
    return sorted(directory.glob(f"wandb/offline-run-*-{run}/run-{run}.wandb"))


def held(path: Path) -> Held:
    """A torn end is left out, as by `wandb sync`."""
    from wandb.proto.wandb_internal_pb2 import Record

    steps, ended = list[int](), False
    for text in records(path.read_bytes()):
        record = Record.FromString(text)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            steps.append(record.history.step.num)
        ended = ended or kind == "exit"
    return Held(steps, ended)


def records(content: bytes) -> Iterator[bytes]:
    """The records that are complete."""
    place, record = HEADER, b""
    while place + _PIECE.size <= len(content):
        left = BLOCK - place % BLOCK
        if left < _PIECE.size:
            place += left
            continue
        _, length, kind = _PIECE.unpack_from(content, place)
        place += _PIECE.size
        piece = content[place : place + length]
        if kind not in (_WHOLE, _FIRST, _MIDDLE, _LAST) or len(piece) < length:
            return
        place += length
        record = piece if kind in (_WHOLE, _FIRST) else record + piece
        if kind in (_WHOLE, _LAST):
            yield record
