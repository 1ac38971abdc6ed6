"""Exports a checkpoint as plain files, independent of this project: safetensors, and one JSON document.

<name>.safetensors   the tensors of a registered object under the keys of its state_dict()
<name>-nonpersistent.safetensors  the buffers of a module that its state_dict() leaves out, if it has any
job-state.safetensors  the tensors of job.state, if it has any
checkpoint.json      where the job stood, job.state, and the rest of every state_dict(); {"__tensor__": [file, key]}
                     stands where a tensor was
files/               files of on_checkpoint hooks
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from elastic.checkpoints.description import STATE, described_tensors, unique_names
from elastic.checkpoints.layout import LENGTH, TensorPiece
from elastic.checkpoints.manifest import Manifest
from elastic.checkpoints.naming import FILES, is_inside
from elastic.checkpoints.series import CHUNK_BYTES, Series
from elastic.errors import CheckpointCorrupt, ConfigError


@dataclass(frozen=True, slots=True)
class Target:
    """The file and key of a tensor of the checkpoint."""

    file: str
    key: str


def export(series: Series, manifest: Manifest, directory: Path) -> list[Path]:
    """Write the files into a new or empty directory; returns their paths. Verify the checkpoint before.

    Raises ConfigError if the directory is in use or cannot be written, and removes it again if this has made it;
    CheckpointCorrupt and OSError.
    """
    pieces = _pieces(series, manifest)
    try:
        made = not directory.exists()
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise ConfigError(f"{directory} is not empty; give a new directory")
    except OSError as error:
        raise ConfigError(f"cannot write to {directory}: {error.strerror}") from error
    try:
        return _write_all(series, manifest, pieces, directory)
    except BaseException as error:
        if made:  # or the next try would find it in use
            shutil.rmtree(directory, ignore_errors=True)
        if isinstance(error, OSError):
            raise ConfigError(f"cannot export {manifest.entry} to {directory}: {error}") from error
        raise


def _write_all(series: Series, manifest: Manifest, pieces: dict[str, list[TensorPiece]], directory: Path) -> list[Path]:
    objects: dict[str, Any] = manifest.header["objects"]
    left_out = {
        value["__tensor__"]
        for entry in objects.values()
        for value in entry.get("nonpersistent", {}).values()
        if isinstance(value, dict)
    }
    names = unique_names([tensor.name for tensor in described_tensors(manifest.header)])
    targets = [_target(name, list(objects), number in left_out) for number, name in enumerate(names)]
    by_file: dict[str, list[tuple[str, list[TensorPiece]]]] = {}
    for stored, target in zip(names, targets, strict=True):
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
    owner = max((one for one in (*objects, STATE) if f"{name}.".startswith(f"{one}.")), key=len)
    file = ("job-state" if owner == STATE else owner) + ("-nonpersistent" if left_out else "") + ".safetensors"
    if not is_inside(file):
        raise CheckpointCorrupt(f"{owner[:100]!r} cannot be the name of a file, and so not be exported")
    return Target(file, name.removeprefix(f"{owner}."))


def _told(tree: Any, targets: list[Target]) -> Any:
    """The tree, with the files and keys of its tensors instead of their numbers."""
    if isinstance(tree, list):
        return [_told(item, targets) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if isinstance(number := tree.get("__tensor__"), int):
        return {"__tensor__": [targets[number].file, targets[number].key]}
    return {key: _told(item, targets) for key, item in tree.items()}


def _pieces(series: Series, manifest: Manifest) -> dict[str, list[TensorPiece]]:
    """Name of a tensor -> its pieces, in the order of their rows."""
    found: dict[str, list[TensorPiece]] = {}
    for piece in sorted(series.pieces(manifest), key=lambda piece: piece.offsets):
        found.setdefault(piece.name, []).append(piece)
    return found


def _write(series: Series, manifest: Manifest, path: Path, tensors: list[tuple[str, list[TensorPiece]]]) -> Path:
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
        out.write(LENGTH.pack(len(encoded)) + encoded)
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
