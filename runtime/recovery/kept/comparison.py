"""What of a state all processes have alike: it is compared when the first step of a round is kept."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Collection, Mapping
from typing import Any

import torch

from elastic.errors import Disagree
from runtime.recovery.kept.content import CurrentState, parameters_of
from runtime.recovery.state.encoding import plain_leaves, to_blob
from runtime.recovery.transfer.checksum import checksum


def apart_paths(state: CurrentState, *, own: bool) -> frozenset[str]:
    """The paths of weights and optimizers' tensors that differ between the processes. own: whether they may, as may
    everything else; otherwise Disagree is raised, naming what differs."""
    if len(set(gathered(_digest(state, own=own)))) == 1:
        return frozenset()
    every = gathered(_leaves(state, own=own))
    first = every[0]
    paths = {path for other in every for path in {*first, *other} if first.get(path) != other.get(path)}
    if own:
        return frozenset(paths)
    path = min(paths, default="the state")
    rank = next((rank for rank, other in enumerate(every) if other.get(path) != first.get(path)), 0)
    raise Disagree(
        f"elastic.keep: {path} is {first.get(path)} on rank 0 and {every[rank].get(path)} on rank {rank}; only the "
        "shards of a DTensor may differ, and a loader's position is that of the whole job; or start the script with "
        "--restart --ranks N, where each rank keeps its own"
    )


def apart_states(objects: Mapping[str, Any], apart: Collection[str]) -> frozenset[str]:
    """NAME.state.NUMBER for each parameter of an optimizer of which a path in `apart` tells that it differs between the
    processes, or a part of its state: what the optimizer adds to that state later differs, too."""
    differing = {
        id(parameter)
        for name, one in objects.items()
        if isinstance(one, torch.nn.Module)
        for key, parameter in one.named_parameters(remove_duplicate=False)
        if f"{name}.{key}" in apart
    }
    states = {parameter_state(path) for path in apart}
    return frozenset(
        state
        for name, one in objects.items()
        if isinstance(one, torch.optim.Optimizer)
        for number, parameter in enumerate(parameters_of(one))
        if (state := f"{name}.state.{number}") in states or id(parameter) in differing
    )


def shards_of(state: CurrentState, *, bits: bool) -> str:
    """A digest of where the shards of this process lie, and of what they hold if asked: replicas have it alike."""
    told = [
        [piece.path, piece.box.offset, piece.box.shape, _bits(piece.tensor) if bits else 0]
        for piece in state.pieces
        if piece.sharded
    ]
    return hashlib.blake2b(json.dumps(told).encode(), digest_size=16).hexdigest()


def parameter_state(path: str) -> str:
    """NAME.state.NUMBER of NAME.state.NUMBER.KEY, the path of a tensor in the state of an optimizer."""
    return ".".join(path.split(".")[:3])


def _digest(state: CurrentState, *, own: bool) -> int:
    """Of all that has to be the same in all processes, with the bits of weights and optimizers that are no shards."""
    told: list[object] = []
    for piece in state.pieces:
        same = piece.steady and not piece.sharded
        if same or not own:
            bits = _bits(piece.tensor) if same else 0
            told.append([piece.path, list(piece.shape), str(piece.tensor.dtype), piece.sharded, bits])
    return zlib.crc32(json.dumps([{} if own else state.plain, told], sort_keys=True).encode())


def _bits(tensor: torch.Tensor) -> int:
    return checksum(to_blob(tensor).numpy().data) if tensor.numel() else 0


def _leaves(state: CurrentState, *, own: bool) -> dict[str, str]:
    plain = {} if own else state.plain
    found = {path: str(value) for name, each in plain.items() for path, value in plain_leaves(each, name)}
    for piece in state.pieces:
        same = piece.steady and not piece.sharded
        if same or not own:
            found[piece.path] = f"{piece.tensor.dtype} {piece.shape}"
        if same:
            found[piece.path] += f" with checksum {_bits(piece.tensor):08x}"
    return found


def gathered(own: Any) -> list[Any]:
    """What all processes say, by rank. A script without a process group speaks for itself."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return [own]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found
