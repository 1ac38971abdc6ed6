"""What a script gives to elastic.keep, as tensors and plain values: the state_dict() of each object.

A sharded tensor (DTensor) is kept as the shard that this process has. Everything else has to be the same in all
processes, and is kept once.
"""

from __future__ import annotations

import ctypes
import functools
import json
import sys
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from elastic.errors import ConfigError, NotCarried
from runtime import torch_names
from runtime.allreduce.reduction.partial_sum import Json
from runtime.recovery.kept.boxes import Box
from runtime.recovery.state.encoding import NamedTensor, encode
from runtime.recovery.state.object_copies import load_nonpersistent, nonpersistent


@dataclass(frozen=True, slots=True)
class Piece:
    """What this process has of one tensor of the state.

    tensor: the shard, or the whole tensor. shape: of the whole. distributed: whether it is a DTensor. sharded: whether
    other processes have other shards of it. steady: whether only the step of an optimizer changes it. source: the
    tensor of the script, whose version counts changes; that of the shard of a DTensor does not.
    """

    path: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    box: Box
    distributed: bool
    sharded: bool
    steady: bool
    source: torch.Tensor

    @property
    def bytes(self) -> int:
        return self.tensor.nbytes


@dataclass(frozen=True, slots=True)
class _Shard:
    """The DTensor in whose place its shard is, and what the piece says of it."""

    source: torch.Tensor
    box: Box
    sharded: bool


@dataclass(frozen=True, slots=True, eq=False)
class StateOfObject:
    """The state of one object. plain: as encoding.py writes it, with the numbers of tensors in the place of tensors;
    text: the same as JSON. pieces: these tensors, numbered from `first` on."""

    name: str
    first: int
    plain: Json
    text: str
    pieces: tuple[Piece, ...]
    is_sharded: bool


@dataclass(frozen=True, slots=True)
class CurrentState:
    """parts: of each object, in the order in which elastic.keep was given them."""

    parts: tuple[StateOfObject, ...]

    @property
    def plain(self) -> dict[str, Json]:
        return {part.name: part.plain for part in self.parts}

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return tuple(piece for part in self.parts for piece in part.pieces)

    @property
    def is_sharded(self) -> bool:
        return any(part.is_sharded for part in self.parts)


def named(objects: Sequence[object], others: Mapping[str, object]) -> dict[str, Any]:
    """Name -> object, for elastic.keep(*objects, **others). Raises ConfigError for what cannot be kept."""
    found: dict[str, Any] = {}
    for one in map(_bare, objects):
        kind = "model" if isinstance(one, nn.Module) else "optimizer" if isinstance(one, torch.optim.Optimizer) else ""
        name = base = kind or ("scheduler" if isinstance(one, LRScheduler) else type(one).__name__.lower())
        number = 2
        while name in found or name in others:
            name, number = f"{base}{number}", number + 1
        found[name] = one
    found |= {name: _bare(one) for name, one in others.items() if one is not None}
    for name, one in found.items():
        if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
            raise ConfigError(
                f"elastic.keep: {name} is a {type(one).__name__} without state_dict() and load_state_dict(), so its "
                "state cannot be kept; give it both, or leave it out"
            )
    return found


def _bare(one: object) -> object:
    """The optimizer or the scheduler in accelerate's wrapper, which is called an Optimizer and has no hooks."""
    if type(one).__module__.startswith("accelerate."):
        return getattr(one, "optimizer" if isinstance(one, torch.optim.Optimizer) else "scheduler", one)
    return one


def state_of(objects: Mapping[str, Any]) -> CurrentState:
    """The state of these objects now. Raises NotCarried, naming a value that cannot be kept."""
    parts: list[StateOfObject] = []
    for name, one in objects.items():
        parts.append(object_state(name, one, sum(len(part.pieces) for part in parts)))
    return CurrentState(tuple(parts))


@torch.no_grad()
def object_state(name: str, one: Any, first: int) -> StateOfObject:
    """The state of one object now. first: the number of its first tensor. Raises NotCarried."""
    tensors: list[NamedTensor] = [("", _NONE)] * first
    shards: dict[str, _Shard] = {}
    plain = encode(_with_shards(one.state_dict(), name, shards), name, tensors)
    steady = {path for path, _ in tensors[first:]} if isinstance(one, torch.optim.Optimizer) else set()
    if isinstance(one, nn.Module):
        steady = {f"{name}.{key}" for key, _ in one.named_parameters(remove_duplicate=False)}
    pieces = tuple(_piece(path, tensor, shards, path in steady) for path, tensor in tensors[first:])
    return StateOfObject(name, first, plain, text_of(plain), pieces, any(piece.sharded for piece in pieces))


_NONE = torch.empty(0)


def text_of(plain: Json) -> str:
    return json.dumps(plain, separators=(",", ":"))


def parameters_of(one: torch.optim.Optimizer) -> list[torch.Tensor]:
    """By the number that they have in the state_dict()."""
    return [parameter for group in one.param_groups for parameter in group["params"]]


SAMPLED = 4
SAMPLED_BYTES = 16


class Ends:
    """A few elements of each of these tensors, at both ends: where they are, to be read in each step."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self.addresses: list[int] = []
        self.sizes: list[int] = []
        """addresses, sizes: where the ends of contiguous tensors on the CPU are, in bytes. To read one from there takes
        a microsecond."""
        self.others: list[torch.Tensor] = []
        """The other tensors, whose ends torch has to copy."""
        for piece in pieces:
            tensor = piece.tensor
            if tensor.is_cpu and tensor.is_contiguous():
                if size := piece.bytes:
                    begin, part = tensor.data_ptr(), min(size, SAMPLED_BYTES)
                    self.addresses += [begin + size - part, begin]
                    self.sizes += [part, part]
            elif tensor.numel():
                self.others.append(tensor.detach())


@torch.no_grad()
def sample(every: Iterable[Ends]) -> int:
    """A checksum of these elements. It tells processes apart whose weights have gone different ways: a step changes
    nearly all elements. What the calling thread's stream of a device has to do is waited for, once."""
    found: dict[torch.device, list[torch.Tensor]] = {}
    total = 0
    for ends in every:
        total = zlib.crc32(b"".join(map(ctypes.string_at, ends.addresses, ends.sizes)), total)
        for tensor in ends.others:
            first, last = ((end,) * (tensor.dim() - 1) for end in (0, -1))
            both = (tensor[first][:SAMPLED], tensor[last][-SAMPLED:]) if tensor.dim() else (tensor.reshape(1),)
            of_device = found.setdefault(tensor.device, [])
            of_device += [(torch.view_as_real(end) if end.is_complex() else end).double().reshape(-1) for end in both]
    return zlib.crc32(b"".join(torch.cat(ends).cpu().numpy().tobytes() for ends in found.values()), total)


def _piece(path: str, tensor: torch.Tensor, shards: Mapping[str, _Shard], steady: bool) -> Piece:
    if (shard := shards.get(path)) is None:
        box = _whole(tensor.shape)
        return Piece(path, tensor, box.shape, box, False, False, steady, tensor)
    shape = tuple(shard.source.shape)
    return Piece(path, tensor, shape, shard.box, True, shard.sharded, steady, shard.source)


@functools.lru_cache(maxsize=10_000)
def _whole(shape: torch.Size) -> Box:
    return Box.whole(shape)


class LeftOutBuffers:
    """The buffers of models that their state_dict() leaves out, as an object with a state, for each rank its own. Those
    that cannot be carried, as sparse ones, are left out here, too."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._models = {name: one for name, one in objects.items() if isinstance(one, nn.Module)}
        self._places = [
            (name, path, owner, key)
            for name, model in self._models.items()
            for path, owner, key, _ in nonpersistent(model)
        ]

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, path, owner, key in self._places:
            if _is_carried(buffer := owner._buffers.get(key)):
                found.setdefault(name, {})[path] = buffer
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in state.keys() & self._models.keys():
            load_nonpersistent(self._models[name], state[name])


def _is_carried(value: object) -> bool:
    try:
        encode(value, "", [])
    except NotCarried:
        return False
    return True


def is_distributed(value: object) -> bool:
    """Whether it is a DTensor; their module is not imported for this."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def box_of(tensor: Any, path: str) -> tuple[Box, bool]:
    """Where this process's shard of a DTensor lies, and whether other processes may have another one. Raises NotCarried
    for a tensor that is a sum which nobody has computed yet."""
    if any(placement.is_partial() for placement in tensor.placements):
        raise NotCarried(f"{path} is a DTensor with the placements {tensor.placements}: a partial sum is not kept")
    return _box_of(tuple(tensor.shape), tensor.device_mesh, tuple(tensor.placements))


@functools.cache
def _box_of(shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...]) -> tuple[Box, bool]:
    """The same in each step, and slow."""
    torch_names.check(torch_names.OF_SHARDS)
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    extent, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    return Box(tuple(offset), tuple(extent)), any(not isinstance(one, Replicate) for one in placements)


_LEAVES = frozenset((torch.Tensor, nn.Parameter, int, float, bool, str, type(None)))


def _with_shards(value: Any, path: str, shards: dict[str, _Shard]) -> Any:
    """The value with this process's shard in the place of each DTensor, which is noted under its path."""
    if type(value) in _LEAVES:
        return value
    if is_distributed(value):
        box, sharded = box_of(value, path)
        shards[path] = _Shard(value, box, sharded)
        return value.to_local()
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _with_shards(item, f"{path}.{key}", shards)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(_with_shards(item, f"{path}.{i}", shards) for i, item in enumerate(value))
    return value
