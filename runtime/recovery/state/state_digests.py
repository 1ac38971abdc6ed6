"""Digests over a whole state, and fingerprints over a part of it that rotates with the step."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence, Set
from typing import Any, TypeAlias, cast

import torch

from elastic.checkpoints.description import is_dense
from runtime.allreduce.reduction.host_copies import host_copies
from runtime.allreduce.reduction.partial_sum import Json
from runtime.recovery.state import encoding
from runtime.recovery.state.change_detection import value_sum

FINGERPRINT_PARAMETERS = 4
FINGERPRINT_ELEMENTS = 1024

Leaf: TypeAlias = tuple[str, str, torch.Tensor | None]
"""(name, dtype and shape, values) of a tensor, (name, value, None) of a plain value."""


def leaves(header: dict[str, Json], tensors: Sequence[torch.Tensor], undigested: Set[str]) -> list[Leaf]:
    """The leaves of a copy, in the order of registration. undigested: objects and tensors that are left out."""
    found: list[Leaf] = []
    for entry, tensor in zip(cast(list[dict[str, Any]], header["tensors"]), tensors, strict=True):
        if undigested.isdisjoint((entry["name"], entry["name"].partition(".")[0])):
            found.append((entry["name"], f"{entry['dtype']} {entry['shape']}", tensor))
    trees = {
        name: cast(dict[str, Json], entry)["state"] for name, entry in cast(dict[str, Json], header["objects"]).items()
    }
    digested = {name: tree for name, tree in trees.items() if name not in undigested}
    for name, tree in (*digested.items(), ("job.state", header["state"])):
        found += [(path, json.dumps(value), None) for path, value in encoding.plain_leaves(tree, name)]
    return found


def digest(of: Iterable[Leaf]) -> str:
    """SHA-256, in hex, in the order of names."""
    sha = hashlib.sha256()
    for path, description, payload in sorted(of, key=lambda leaf: leaf[:2]):
        _update(sha, path, description, payload)
    return sha.hexdigest()


def digests(of: Iterable[Leaf]) -> dict[str, str]:
    """Name -> digest of each leaf, cut to 16 hex digits."""
    found: dict[str, str] = {}
    for path, description, payload in of:
        sha = hashlib.sha256()
        _update(sha, path, description, payload)
        found[path] = sha.hexdigest()[:16]
    return found


def checksums(of: Iterable[Leaf]) -> dict[str, str]:
    """Registered object -> 16 hex digits of its values, in memory's speed. Any single bit counts."""
    found: dict[str, hashlib.blake2b] = {}
    for path, description, payload in sorted(of, key=lambda leaf: leaf[:2]):
        hashed = found.setdefault(path.partition(".")[0], hashlib.blake2b(digest_size=8))
        hashed.update(f"{path}\0{description}\0{value_sum(payload) if payload is not None else 0}".encode())
    return {name: hashed.hexdigest() for name, hashed in found.items()}


def _update(sha: hashlib._Hash, path: str, description: str, payload: torch.Tensor | None) -> None:
    sha.update(f"{path}\0{description}\0".encode())
    if payload is not None:
        sha.update(encoding.to_blob(payload).numpy().data)


def hash_some(hashed: hashlib.blake2b, tensors: Sequence[torch.Tensor], step: int, *, rows: bool = False) -> None:
    """Hash elements of a few tensors, of others in each step. rows: in row-major order; else in memory order, except of
    a tensor with gaps: what is between its elements is not copied to a newcomer."""
    count = len(tensors)
    share = min(FINGERPRINT_PARAMETERS, count)
    windows = []
    for place in range(step * share, (step + 1) * share):
        turn, at = divmod(place, count)
        tensor = tensors[at]
        if rows or not is_dense(tensor.shape, tensor.stride()):
            tensor = tensor.detach().contiguous()
        windows.append(_window(tensor, turn))
    for window in host_copies(windows):
        hashed.update(window.view(torch.uint8).numpy().data)


def _window(parameter: torch.Tensor, turn: int) -> torch.Tensor:
    """Some elements, others at each turn, in memory order: reshaping a channels_last parameter would copy all of it."""
    windows = max(1, math.ceil(parameter.numel() / FINGERPRINT_ELEMENTS))
    first = turn % windows * FINGERPRINT_ELEMENTS
    count = min(FINGERPRINT_ELEMENTS, parameter.numel() - first)
    return parameter.detach().as_strided((count,), (1,), parameter.storage_offset() + first)
