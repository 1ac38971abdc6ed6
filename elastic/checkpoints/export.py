"""A checkpoint as plain files that need nothing of this project: safetensors, and one JSON document.

<name>.safetensors   the tensors of a registered object under the keys of its state_dict()
<name>-nonpersistent.safetensors  the buffers of a module that its state_dict() leaves out, if it has any
job-state.safetensors  those of job.state, if it has any
checkpoint.json      where the job stood, job.state, and the rest of every state_dict(); {"__tensor__": [file, key]}
                     stands where a tensor was
files/               what on_checkpoint hooks have left
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from elastic.checkpoints.manifest import Manifest
from elastic.checkpoints.naming import FILES
from elastic.checkpoints.series import CHUNK_BYTES, Series
from elastic.errors import CheckpointCorrupt, ConfigError

_LENGTH = struct.Struct("<Q")
_STATE = "job.state"


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of a tensor, bytes begin..end-1 of a file."""

    file: str
    first: int
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Target:
    """Where a tensor of the checkpoint goes."""

    file: str
    key: str


def export(series: Series, manifest: Manifest, directory: Path) -> list[Path]:
    """Write the files into a new or empty directory; returns their paths. Verify the checkpoint before.

    Raises ConfigError if the directory is in use, CheckpointCorrupt and OSError.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise ConfigError(f"{directory} is not empty; give a new directory")
    except OSError as error:
        raise ConfigError(f"cannot write to {directory}: {error.strerror}") from error
    pieces = _pieces(series, manifest)
    entries: list[dict[str, Any]] = manifest.header["tensors"]
    objects: dict[str, Any] = manifest.header["objects"]
    left_out = {
        value["__tensor__"] for entry in objects.values() for value in entry.get("nonpersistent", {}).values() if value
    }
    targets = [_target(entry["name"], list(objects), number in left_out) for number, entry in enumerate(entries)]
    by_file: dict[str, list[tuple[str, list[Piece]]]] = {}
    seen: dict[str, int] = {}
    for entry, target in zip(entries, targets, strict=True):
        name = entry["name"]
        count = seen[name] = seen.get(name, 0) + 1
        stored = name if count == 1 else f"{name}#{count - 1}"
        by_file.setdefault(target.file, []).append((target.key, pieces[stored]))
    written = [_write(series, manifest, directory / name, tensors) for name, tensors in sorted(by_file.items())]
    written += [_copy(series, manifest, directory, file.name) for file in manifest.files if "/" in file.name]
    document = {
        "job": manifest.job,
        "taken": manifest.taken,
        **asdict(manifest.moment),
        "state": _told(manifest.header["state"], targets),
        "objects": {name: _told(tree, targets) for name, tree in objects.items()},
    }
    (directory / "checkpoint.json").write_text(json.dumps(document, indent=1))
    return [*written, directory / "checkpoint.json"]


def _target(name: str, objects: list[str], left_out: bool) -> Target:
    owner = max((one for one in (*objects, _STATE) if name.startswith(f"{one}.")), key=len)
    file = ("job-state" if owner == _STATE else owner) + ("-nonpersistent" if left_out else "")
    return Target(f"{file}.safetensors", name.removeprefix(f"{owner}."))


def _told(tree: Any, targets: list[Target]) -> Any:
    """The tree with the names of its tensors in the place of their numbers."""
    if isinstance(tree, list):
        return [_told(item, targets) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if isinstance(number := tree.get("__tensor__"), int):
        return {"__tensor__": [targets[number].file, targets[number].key]}
    return {key: _told(item, targets) for key, item in tree.items()}


def _pieces(series: Series, manifest: Manifest) -> dict[str, list[Piece]]:
    """By tensor, in the order of their rows."""
    found: dict[str, list[Piece]] = {}
    for file in manifest.files:
        if "/" in file.name:
            continue
        for name, piece in _pieces_of(series, manifest, file.name):
            found.setdefault(name, []).append(piece)
    for pieces in found.values():
        pieces.sort(key=lambda piece: piece.first)
    return found


def _pieces_of(series: Series, manifest: Manifest, file: str) -> Iterator[tuple[str, Piece]]:
    with series.storage.open(series.path(manifest.entry, file)) as source:
        try:
            (length,) = _LENGTH.unpack(source.read(_LENGTH.size))
            header: dict[str, Any] = json.loads(source.read(length))
            places = json.loads(header.pop("__metadata__")["DCP_SHARDING_INFO"])
            start = _LENGTH.size + length
            for name, said in header.items():
                begin, end = said["data_offsets"]
                first = (places[name]["saved_offsets"] or [0])[0]
                yield name, Piece(file, first, said["dtype"], tuple(said["shape"]), start + begin, start + end)
        except (ValueError, KeyError, TypeError, struct.error) as error:
            raise CheckpointCorrupt(f"{file} is damaged: {error}") from error


def _write(series: Series, manifest: Manifest, path: Path, tensors: list[tuple[str, list[Piece]]]) -> Path:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, pieces in tensors:
        rows = sum(piece.shape[0] for piece in pieces if piece.shape)
        shape = [rows, *pieces[0].shape[1:]] if pieces[0].shape else []
        begin, end = end, end + sum(piece.end - piece.begin for piece in pieces)
        header[key] = {"dtype": pieces[0].dtype, "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("xb") as out:
        out.write(_LENGTH.pack(len(encoded)) + encoded)
        for _, pieces in tensors:
            for piece in pieces:
                with series.storage.open(series.path(manifest.entry, piece.file)) as source:
                    source.seek(piece.begin)
                    left = piece.end - piece.begin
                    while left:
                        chunk = source.read(min(CHUNK_BYTES, left))
                        if not chunk:
                            raise CheckpointCorrupt(f"{piece.file} ends too early")
                        out.write(chunk)
                        left -= len(chunk)
    return path


def _copy(series: Series, manifest: Manifest, directory: Path, name: str) -> Path:
    (directory / FILES).mkdir(exist_ok=True)
    with series.storage.open(series.path(manifest.entry, name)) as source, (directory / name).open("xb") as out:
        while chunk := source.read(CHUNK_BYTES):
            out.write(chunk)
    return directory / name
