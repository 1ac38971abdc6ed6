"""What a callback keeps that plain_state.plain_attributes leaves out: modules, such as an average of the weights or a
reference model that follows them; lists and dictionaries with long tensors; and objects of a user's own with such. Of
a sharded tensor (DTensor) the shard of this process stands for it.

What has not changed since training began is not told: each process has made it by itself, as it has its data.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from elastic.errors import ConfigError, NotCarried
from runtime.frontends.ddp.frames.plain_values import fill
from runtime.frontends.frameworks.plain_state import ANY_LENGTH, is_plain, is_sharded, plain_attributes

LIBRARIES = frozenset(
    (
        *("builtins", "functools", "torch", "transformers", "accelerate", "datasets", "tokenizers", "peft", "trl"),
        *("lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics", "runtime"),
    )
)
"""Packages of objects whose attributes are not looked at."""
SAMPLE = 8
"""Elements of a tensor whose values are looked at: a change through `.data` leaves the version as it is."""

Told = dict[str, dict[str, Any]]
"""{"values": {name: value}, "modules": {name: {name of a tensor: tensor}}, "objects": {name: Told}}, of attributes."""
NOTHING: Told = {"values": {}, "modules": {}, "objects": {}}

_SCALARS = (bool, int, float, str, type(None))
_OF_DTENSOR = "_is_shard_of_dtensor"
"""The name of an attribute that shards get: the version of their DTensor. Their own does not rise with it."""

Key = tuple[str, int]
Path = tuple[str, ...]
"""Where a Told has an attribute with tensors: ("values", name) or ("modules", name). If an object has it that is itself
an attribute of the callback, ("objects", name of the object) stands before."""
Place = tuple[Key, Path]
Samples = Mapping[Any, torch.Tensor]


def numbered(entries: Iterable[tuple[str, Any]]) -> list[tuple[Key, Any]]:
    """(name, value) of callbacks -> ((name, how many of that name are before it), value)."""
    seen: dict[str, int] = {}
    found = []
    for name, value in entries:
        seen[name] = seen.get(name, -1) + 1
        found.append(((name, seen[name]), value))
    return found


def addresses(model: nn.Module) -> set[int]:
    """Where its tensors lie."""
    return {tensor.data_ptr() for _, tensor in _named(model) if is_strided(tensor) and tensor.numel()}


def is_strided(thing: Any) -> bool:
    """Whether it is a tensor of torch's own class that has memory, each element in a place of its own; a shard may have
    no elements."""
    return (
        type(thing) in (torch.Tensor, nn.Parameter)
        and thing.layout is torch.strided
        and thing.device.type != "meta"
        and not (thing.is_conj() or thing.is_neg())
        and all(stride or size <= 1 for size, stride in zip(thing.shape, thing.stride(), strict=True))
    )


def samples(tensors: Iterable[torch.Tensor]) -> Samples:
    """Device and dtype -> bytes of the first elements of such tensors."""
    found = defaultdict(list)
    for tensor in tensors:
        if tensor.is_contiguous():
            found[tensor.device, tensor.dtype].append(tensor.detach().view(-1)[:SAMPLE])
    return {kind: torch.cat(some).view(torch.uint8) for kind, some in found.items()}


class CallbackReader:
    """Reads what callbacks keep besides tensors of the model, at one moment."""

    def __init__(self, model: nn.Module | None, apart: Collection[object] = ()) -> None:
        """apart: modules that are carried in another way, and objects that are data of each process."""
        self._model = model
        self._apart = [model, *apart]
        self._addresses: set[int] | None = None

    def told(self, owner: object, *, without: Collection[str] = ()) -> Told:
        """What an object keeps, also in objects in its attributes; the tensors themselves. without: names of
        attributes. Of an object without any such tensors it says that it is there."""
        found = self._own(owner, without)
        for name, value in list(vars(owner).items()):
            library = type(value).__module__.partition(".")[0] in LIBRARIES
            if library or isinstance(value, nn.Module | Dataset) or not hasattr(value, "__dict__"):
                continue
            if not self._is_apart(value) and name not in without and not isinstance(value, type):
                found["objects"][name] = below = self._own(value)
                below["values"].update(plain_attributes(value) if has_any(below) else {})
        return found

    def _own(self, owner: object, without: Collection[str] = ()) -> Told:
        found: Told = {"values": {}, "modules": {}, "objects": {}}
        for name, value in list(vars(owner).items()):
            if name in without:
                continue
            if isinstance(value, nn.Module):
                if not self._is_apart(value):
                    tensors = {key: shard for key, shard in _named(value) if self._is_own(shard)}
                    found["modules"].update({name: tensors} if tensors else {})
            elif _is_long(value) and all(self._is_own(_shard(tensor)) for tensor in _tensors(value)):
                found["values"][name] = _by_reference(value)
        return found

    def _is_apart(self, value: object) -> bool:
        return any(value is other for other in self._apart)

    def _is_own(self, tensor: torch.Tensor) -> bool:
        """Whether it has memory, which is not the model's."""
        if not is_strided(tensor):
            return False
        if self._addresses is None:  # most callbacks keep nothing that has to be compared
            self._addresses = set() if self._model is None else addresses(self._model)
        return not tensor.numel() or tensor.data_ptr() not in self._addresses


def has_any(told: Told) -> bool:
    """Whether there are tensors in it."""
    return any(True for _ in _attributes(told))


class _Mark:
    """What tensors were at a moment."""

    def __init__(self, every: Iterable[torch.Tensor]) -> None:
        tensors = list(every)
        self._places = [(t.data_ptr(), version(t)) for t in tensors]
        self._samples = samples(tensors)
        self.count = len(tensors)

    def is_of(self, other: _Mark) -> bool:
        """Whether nothing has changed between the two moments."""
        return self._places == other._places and not differ(self._samples, other._samples)

    def was_moved(self, other: _Mark) -> bool:
        """Whether all that has changed is the device of the tensors, or their dtype."""
        pairs = list(zip(self._samples.items(), other._samples.items(), strict=False))
        same = self.count == other.count and len(self._samples) == len(other._samples)
        return same and self._samples.keys() != other._samples.keys() and all(_alike(*pair) for pair in pairs)


def _alike(mine: tuple[Any, torch.Tensor], theirs: tuple[Any, torch.Tensor]) -> bool:
    """Whether samples have the same values, in the coarser of their dtypes. Each: (device and dtype, bytes)."""
    (first, second), dtypes = (found.view(kind[1]).cpu() for kind, found in (mine, theirs)), (mine[0][1], theirs[0][1])
    coarse = min(dtypes, key=lambda dtype: dtype.itemsize)
    return torch.equal(first.to(coarse), second.to(coarse))


def version(tensor: torch.Tensor) -> int:
    """The version of a tensor; of a shard, the version of its DTensor. 0 of one that was made in inference mode."""
    return getattr(tensor, _OF_DTENSOR, 0 if tensor.is_inference() else tensor._version)


class CallbackTensors:
    """Long tensors when a step was handed out. A newcomer goes through the whole step, so it must not have what
    callbacks do before the gradients: on_step_begin(), or what stands behind the first of several batches of a step.
    Those of a callback that does nothing there are told without a copy: others copy them with the weights.
    """

    def __init__(self, *, copies: bool = False, behind: bool = False) -> None:
        """copies: callbacks are called between two batches of a step. behind: tensors are noted when training begins
        and then behind each step, and are copied by the caller."""
        self._copies = copies
        self._behind = behind
        self._first: dict[Place, _Mark] = {}
        """What the tensors were when they were noted first, but for those that have changed since."""
        self._objects: set[Place] | None = None
        """Objects that were there then. None: nothing was noted yet."""
        self._new: set[Place] = set()
        """Tensors that were not there then."""
        self._changed: set[Place] = set()
        """Tensors that have changed since, or were loaded."""
        self._noted: list[tuple[Key, Told, _Mark]] = []
        self._quiet: set[Key] = set()
        """Callbacks that were seen to do nothing before the gradients."""
        self._copied: set[Key] = set()
        """Callbacks that were seen to change tensors there."""
        self.late = ""
        """An attribute that is told and that put_back() cannot give to a callback whose training begins: a module or a
        sharded tensor that was not there then, what an object has that was not, or a module that has grown. "": there
        is none."""

    def begin(self, callbacks: Iterable[tuple[str, Told]]) -> None:
        """To be called twice, if the model is filled before callbacks are told that training begins: before that and
        behind. What they make of it meanwhile is told: another process makes it of other weights."""
        again = self._objects is not None
        self._objects = set()
        for key, long in numbered(callbacks):
            self._objects |= {(key, ("objects", name)) for name in long["objects"]}
            for path, tensors in _attributes(long):
                mark = _Mark(tensors)
                if again and ((key, path) not in self._first or not self._first[key, path].is_of(mark)):
                    self._changed.add((key, path))
                self._first.setdefault((key, path), mark)

    def note(self, callbacks: Iterable[tuple[str, Told]], model: nn.Module | None) -> list[Told]:
        """A step is handed out. callbacks: the name of each, and what it keeps. model: that is trained. Returns what
        others get."""
        every = list(callbacks)
        if self._objects is None:
            self.begin(every)
        self._noted, told = [], []
        for key, long in numbered(every):
            for path, tensors in _attributes(long):
                if (place := (key, path)) not in self._changed and self._has_changed(place, tensors, model):
                    self._changed.add(place)
                    if self._is_late(place, tensors):
                        self.late = self.late or f"{'.'.join(path[1::2])} of {key[0]}"
            changed = _only(long, self._told_of(key))
            if has_any(changed) and not self._behind:
                self._noted.append((key, changed, _Mark(_all_tensors(changed))))
            told.append(changed if self._behind or key in self._quiet else deepcopy(changed))
        return told

    def _has_changed(self, place: Place, tensors: list[torch.Tensor], model: nn.Module | None) -> bool:
        """A module that a callback has made meanwhile is not the same in all processes if it is a copy of the model."""
        mark = _Mark(tensors)
        if place not in self._first:
            self._new.add(place)
            if place[1][-2] == "values" or _is_copy(tensors, model):
                return True
        first = self._first.setdefault(place, mark)
        if place[1][-2] == "modules" and first.was_moved(mark):
            self._first[place] = mark
            return False
        return not first.is_of(mark)

    def _is_late(self, place: Place, tensors: list[torch.Tensor]) -> bool:
        key, path = place
        if place not in self._new:
            return path[-2] == "modules" and self._first[place].count != len(tensors)
        there = path[0] == "values" or (key, path[:2]) in (self._objects or ())
        return path[-2] == "modules" or not there or any(hasattr(tensor, _OF_DTENSOR) for tensor in tensors)

    def check_fillable(self, where: str) -> None:
        """Raise NotCarried if something is late. where: in which methods of callbacks it should be made."""
        if self.late:
            raise NotCarried(
                f"{self.late} was made when training had begun, and could not be filled in the next round: make it in "
                f"{where}"
            )

    def _told_of(self, key: Key) -> set[Path]:
        """What is told of a callback: if anything, then all of the objects that it has had from the beginning, as they
        may count something beside their tensors."""
        changed = {path for owner, path in self._changed if owner == key}
        objects = {path for owner, path in self._first.keys() - self._new if owner == key and path[0] == "objects"}
        return changed | objects if changed else changed

    def loaded(self, callbacks: Iterable[tuple[str, Told]]) -> None:
        """These have got what others kept."""
        self._changed |= {(key, path) for key, long in numbered(callbacks) for path, _ in _attributes(long)}

    def look(self) -> None:
        """The gradients are about to be computed. Raises ConfigError for a callback that changes tensors before them in
        this step, and has not in others."""
        for key, long, mark in self._noted if not self._copies else ():
            if _Mark(_all_tensors(long)).is_of(mark):
                self._quiet |= {key} - self._copied
            elif key not in self._quiet:
                self._copied.add(key)
            else:
                raise ConfigError(
                    f"callback {key[0]} changes tensors between the beginning of this step and its gradients, and has "
                    "not in steps before: a worker that joins would change them twice. Change them behind the step, as "
                    "in on_step_end()"
                )


def put_back(owner: Any, found: Told, where: str, *, strict: bool) -> None:
    """Give an object what was told of another, in the tensors, lists and dictionaries that it has, where they fit:
    other objects may have them, too. where: how an error calls the object. strict: raise ConfigError for a module that
    is not there yet, or has other tensors; if not, it is left as it is."""
    for name, value in found["values"].items():
        here = getattr(owner, name, None)
        filled = _filled(here, value)
        if filled is not here and not (type(filled) in _SCALARS and type(filled) is type(here) and filled == here):
            setattr(owner, name, filled)
    for name, tensors in found["modules"].items():
        module = getattr(owner, name, None)
        mine = _fitting(module, tensors) if isinstance(module, nn.Module) else None
        if mine is not None:
            for key, tensor in tensors.items():
                fill(mine[key], tensor)
        elif strict:
            raise _refusal(where, name)
    for name, below in found["objects"].items():
        if hasattr(thing := getattr(owner, name, None), "__dict__"):
            put_back(thing, below, f"{name} of {where}", strict=strict)
        elif strict and has_any(below):
            raise _refusal(where, name)


def _fitting(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """The tensors of a module by name, if they have the shapes of these. Buffers of another shape are replaced: tables
    of positions grow with use."""
    mine, buffers = dict(_named(module)), dict(module.named_buffers())
    if not mine.keys() >= tensors.keys() or not all(is_strided(mine[key]) for key in tensors):
        return None
    other = {key for key, tensor in tensors.items() if mine[key].shape != tensor.shape}
    if not all(key in buffers and not is_sharded(buffers[key]) for key in other):
        return None
    for key in other:
        mine[key] = torch.empty_like(tensors[key], device=buffers[key].device)
        for part in module.modules():
            part._buffers.update({name: mine[key] for name, one in part._buffers.items() if one is buffers[key]})
    return mine


def differ(before: Samples, now: Samples) -> bool:
    """Whether values differ. A module that was cast, or is on another device now, is none that has changed."""
    return before.keys() == now.keys() and not all(torch.equal(before[kind], now[kind]) for kind in now)


def _named(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """FSDP2 leaves the parameters of a root unsharded behind a forward without a backward."""
    if (fsdp := sys.modules.get("torch.distributed.fsdp")) is not None:
        for part in module.modules():
            if isinstance(part, fsdp.FSDPModule):
                part.reshard()
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        yield name, _shard(tensor)


def _shard(tensor: Any) -> Any:
    """What this process has of a tensor, without its graph."""
    if type(tensor) in (torch.Tensor, nn.Parameter):
        return tensor.detach()
    if not is_sharded(tensor):
        return tensor
    shard = tensor.to_local().detach()
    setattr(shard, _OF_DTENSOR, version(tensor))
    return shard


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _attributes(told: Told, path: Path = ()) -> Iterator[tuple[Path, list[torch.Tensor]]]:
    """The attributes with tensors, and their tensors."""
    for kind in ("values", "modules"):
        for name, value in told[kind].items():
            if tensors := list(_tensors(value)):
                yield (*path, kind, name), tensors
    for name, below in told["objects"].items():
        yield from _attributes(below, (*path, "objects", name))


def _all_tensors(told: Told) -> Iterator[torch.Tensor]:
    for _, tensors in _attributes(told):
        yield from tensors


def _only(told: Told, paths: Collection[Path], path: Path = ()) -> Told:
    """Those attributes alone; of an object with one of them also the numbers that it has beside its tensors."""
    if not any(known[: len(path)] == path for known in paths):
        return NOTHING
    return {
        "values": {
            name: value
            for name, value in told["values"].items()
            if (*path, "values", name) in paths or not any(True for _ in _tensors(value))
        },
        "modules": {name: value for name, value in told["modules"].items() if (*path, "modules", name) in paths},
        "objects": {
            name: found
            for name, below in told["objects"].items()
            if any((found := _only(below, paths, (*path, "objects", name))).values())
        },
    }


def _is_copy(tensors: list[torch.Tensor], model: nn.Module | None) -> bool:
    """Whether a module has tensors of the same shapes as the model, in their order."""
    return model is not None and [t.shape for t in tensors] == [t.shape for _, t in _named(model) if is_strided(t)]


def _is_long(value: object) -> bool:
    return is_plain(value, ANY_LENGTH) and not is_plain(value)


def _by_reference(value: Any) -> Any:
    """A copy of the lists and dictionaries, with the tensors themselves."""
    return deepcopy(value, {id(tensor): _shard(tensor) for tensor in _tensors(value)})


def _filled(here: Any, there: Any) -> Any:
    """The value of another process: in what is here where that has the same form, else a copy."""
    if isinstance(there, torch.Tensor) and isinstance(here, torch.Tensor):
        shard = _shard(here)
        if is_strided(shard) and (shard.shape, shard.dtype) == (there.shape, there.dtype):
            fill(shard, there)
            return here
        return there.to(here.device, copy=True)
    if type(there) is type(here) and isinstance(there, dict) and here.keys() == there.keys():
        for key, item in there.items():
            here[key] = _filled(here[key], item)
        return here
    if type(there) is type(here) is list and len(here) == len(there):
        here[:] = [_filled(mine, item) for mine, item in zip(here, there, strict=True)]
        return here
    return deepcopy(there)


def _refusal(where: str, name: str) -> ConfigError:
    return ConfigError(
        f"{name} of {where} has tensors in the other workers, or in the checkpoint, and is another, or not there, in "
        "this worker: make it in __init__(), or when training begins, in all workers, from the same model"
    )
