"""Tensors that a script keeps beside its model and changes itself: averages of the weights, centres, statistics.

A copy of a model is a module, a dict, a list or an object with a tensor of the shape of each trainable parameter of
that model, or a flat tensor with as many elements. It is state like the model itself: newcomers copy it, checkpoints
have it, digests count it. What a silent turn does to a tensor, be it in a copy or not, is undone.

Whether a tensor has changed is seen by its version, which does not rise where a script writes through `.data`. Scripts
update averages in this way, so a copy of a model is compared by its values, or copied without a comparison.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from runtime.frontends.ddp import mistakes
from runtime.frontends.ddp.frames.places import CODE, DEPTH_MAX, ScriptFrames, ValuePlace, is_dict
from runtime.frontends.ddp.frames.plain_values import TENSOR_MAX, fill
from runtime.recovery.state.change_detection import value_sum, version_of

KEPT_MAX = 1 << 20
"""Elements of a tensor outside of a copy of the model. The values of a larger one are not kept: it is data."""
COLLECTION_MAX = 4096
"""Entries of a dict, list or tuple that is looked into."""
_CLOSED = (type, ModuleType, FunctionType, DataLoader, Dataset, Sampler, str, bytes)
_WITHOUT_TENSORS = CODE | {bool, bytes, float, int, str, type, type(None)}
"""Types of most names of a script."""


@dataclass(slots=True)
class CopyGroup:
    """The tensors that one object holds."""

    place: ValuePlace
    owners: tuple[object, ...]
    """What a local name holds, the object that this holds, and so on down to the object that holds the tensors."""
    tensors: dict[ValuePlace, torch.Tensor] = field(default_factory=dict)


class ModelCopies:
    """Registered under a name of its own where a script has such copies; used by the script's thread only, but for
    `state_dict`."""

    def __init__(
        self,
        frames: ScriptFrames,
        modules: Iterable[nn.Module],
        snapshots: Iterable[dict[Any, Any]] = (),
        *,
        below_max: int = COLLECTION_MAX,
    ) -> None:
        """Find the copies that the script has made so far. modules: what is registered. snapshots: what the script has
        loaded, which is no copy, but what it has taken out of it may be one. below_max: of the objects in a collection
        so many are looked into."""
        self._frames, self._below_max = frames, below_max
        self._modules = list(modules)
        # What only `snapshots` holds, its variable and this question's argument, is of no use to the script any more.
        self._snapshots = [snapshot for snapshot in snapshots if sys.getrefcount(snapshot) > 3]
        self._closed = {id(thing) for thing in (*self._modules, *self._snapshots)}
        self._shapes = [
            Counter(parameter.shape for parameter in module.parameters() if parameter.requires_grad)
            for module in self._modules
        ]
        self._kept: dict[ValuePlace, tuple[torch.Tensor, int, torch.Tensor]] = {}
        """Tensor, its version, and its values of that version."""
        self._watched: dict[ValuePlace, tuple[torch.Tensor, int]] = {}
        """Between `keep` and `put_back`: all tensors, and the version that each had."""
        self._keeping = threading.Lock()
        """While the values of copies are read: by another thread, before a silent turn changes them."""
        self._late: dict[ValuePlace, tuple[torch.Tensor, int]] = {}
        """Tensors of copies that the script has made since, and the sums of their values."""
        self.missed: list[tuple[ReferenceType[torch.Tensor], str]] | None = None
        """The tensors of copies that this worker has made in epochs that it has passed by, so of weights which it had
        before it joined, and their spellings. None: the first step is still to come."""
        self._names: set[ValuePlace] = set()
        copies = [group for group in self._groups() if self._is_copy(group)]
        self._names = {group.place for group in copies}
        self.tensors = {place: tensor for group in copies for place, tensor in group.tensors.items()}
        """Those of the copies that the script had when its training loop began."""
        frames.holders |= {
            id(owner)
            for group in copies
            for owner in group.owners
            if hasattr(owner, "__dict__") and not isinstance(owner, nn.Module)
        }

    @property
    def found(self) -> bool:
        """Whether the script had a copy of a model when its training loop began."""
        return bool(self._names)

    def holds(self, value: object) -> bool:
        """Whether this very object is a tensor of such a copy."""
        return any(tensor is value for tensor in self.tensors.values())

    def step(self, number: int) -> None:
        """A step begins. Raises ConfigError for a copy that the script has made since its training loop began, and
        changes: that is looked at in steps 1, 2, 4, 8 and so on.
        """
        look = number & (number - 1) == 0 or self.missed is None
        if not (self._names or look):
            return
        late = {place: tensor for group in self.refresh() for place, tensor in group.tensors.items()}
        if not look:
            return
        if self.missed is None:
            long = {place: tensor for place, tensor in late.items() if tensor.numel() > TENSOR_MAX}
            self.missed = [(ref(tensor), place.spelling) for place, tensor in long.items()]
            return  # the others are plain values, which come in this step
        for place, tensor in late.items():
            was, values = self._late.get(place, (None, 0))
            if was is tensor and value_sum(tensor) != values:
                raise mistakes.made_late(f"{place.spelling}, an average of the weights,")
        self._late = {place: (tensor, value_sum(tensor)) for place, tensor in late.items()}

    def refresh(self) -> list[CopyGroup]:
        """Find the tensors anew. Returns the copies that the script has made since its training loop began."""
        groups = [group for group in self._groups() if self._is_copy(group)]
        self.tensors = {
            place: tensor for group in groups if group.place in self._names for place, tensor in group.tensors.items()
        }
        return [group for group in groups if group.place not in self._names]

    def keep(self) -> None:
        """Keep the values of all tensors for `put_back`; once more before that does nothing."""
        if self._watched:
            return
        with self._keeping:
            for place in self.tensors:
                self._kept.pop(place, None)  # frees memory, perhaps as much as the model has, before more is taken
        kept: dict[ValuePlace, tuple[torch.Tensor, int, torch.Tensor]] = {}
        watched: dict[ValuePlace, tuple[torch.Tensor, int]] = {}
        for group in self._groups():
            whole = group.place in self._names or self._is_copy(group)
            for place, tensor in group.tensors.items():
                watched[place] = (tensor, version_of(tensor))
                if whole or tensor.numel() <= KEPT_MAX:
                    before = self._kept.get(place)
                    if before is None or before[0] is not tensor or before[1] != version_of(tensor):
                        before = (tensor, version_of(tensor), tensor.detach().clone())
                    kept[place] = before
        with self._keeping:
            self._kept, self._watched = kept, watched

    def check_unchanged(self) -> None:
        """Raise NotInPlace if the script has changed a copy of a model since `keep`."""
        for group in self._groups() if self._watched and self._names else ():
            for place, tensor in group.tensors.items() if group.place in self._names else ():
                was, version = self._watched.get(place, (None, 0))
                same = was is tensor and version == version_of(tensor)
                if not same or value_sum(tensor) != value_sum(self._kept[place][2]):
                    raise mistakes.averaged_early(place.spelling)

    def put_back(self) -> None:
        """Give all tensors the values that they had at `keep`. Raises NotInPlace for a tensor that is too large to have
        been kept."""
        if not self._watched:
            return
        now = {place: tensor for group in self._groups() for place, tensor in group.tensors.items()}
        moved: dict[ValuePlace, object] = {}
        for place, (tensor, version) in self._watched.items():
            changed = version_of(tensor) != version
            if changed and place not in self._kept:
                raise mistakes.changed_data(place.spelling, tensor.numel())
            if changed or (place in self.tensors and place in self._kept):
                fill(tensor, self._kept[place][2])
                self._kept[place] = (tensor, version_of(tensor), self._kept[place][2])
            if place in self._kept and place in now and now[place] is not tensor:
                moved[place] = tensor
        self._frames.write(moved)
        self._watched.clear()

    def done(self) -> None:
        """The turn was not silent: what it has done stays."""
        self._watched.clear()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The values of all copies by their place, as they were before the silent turn in progress. They stay the same
        while a newcomer reads them, which takes as long as several turns."""
        with self._keeping:
            return {
                place.text: self._kept[place][2] if place in self._watched else tensor.detach().clone()
                for place, tensor in self.tensors.items()
            }

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Raises ValueError if this script's copies have other places."""
        own = {place.text: (place, tensor) for place, tensor in self.tensors.items()}
        if own.keys() != state.keys():
            raise ValueError(f"averages of the weights differ in {', '.join(sorted(own.keys() ^ state.keys()))}")
        for name, (place, tensor) in own.items():
            with torch.no_grad():
                tensor.copy_(state[name])
            if place in self._watched:
                self._watched[place] = (tensor, version_of(tensor))
                self._kept[place] = (tensor, version_of(tensor), tensor.detach().clone())

    def _is_copy(self, group: CopyGroup) -> bool:
        shapes = Counter(tensor.shape for tensor in group.tensors.values())
        largest = max((tensor.numel() for tensor in group.tensors.values() if tensor.dim() == 1), default=0)
        return any(
            wanted <= shapes or (len(wanted) > 1 and largest == sum(shape.numel() * n for shape, n in wanted.items()))
            for wanted in self._shapes
            if wanted
        )

    def _groups(self) -> Iterator[CopyGroup]:
        """All tensors in the script's frames that are not registered, by the object that holds them."""
        storages = {
            tensor.untyped_storage().data_ptr()
            for module in self._modules
            for tensor in (*module.parameters(), *module.buffers())
            if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided
        }
        seen: set[object] = set(self._closed)
        # An average keeps its place, whichever other name refers to it since, as a checkpoint that the script saves. A
        # checkpoint is a dict, and may be gone soon: averages have their places elsewhere if they can.
        known = {(place.frame, place.function, place.name) for place in self._names}
        names = [(place, value) for place, value in self._frames.names() if type(value) not in _WITHOUT_TENSORS]
        names.sort(key=lambda at: ((at[0].frame, at[0].function, at[0].name) not in known, is_dict(at[1])))
        for place, value in names:
            yield from self._inside(place, (value,), storages, seen)

    def _inside(
        self, place: ValuePlace, owners: tuple[Any, ...], storages: set[int], seen: set[object]
    ) -> Iterator[CopyGroup]:
        owner = owners[-1]
        if id(owner) in seen:
            return
        group = CopyGroup(place, owners)
        below: list[tuple[ValuePlace, Any]] = []
        if _is_tensor(owner):
            group.tensors[place] = owner
        else:
            seen.add(id(owner))
            most = self._below_max if isinstance(owner, dict | list | tuple) else sys.maxsize
            for key, value in _entries(owner):
                if _is_tensor(value):
                    group.tensors[place.under(key)] = value
                elif type(value) not in _WITHOUT_TENSORS and len(place.path) < DEPTH_MAX and len(below) < most:
                    below.append((place.under(key), value))
        group.tensors = {
            key: tensor
            for key, tensor in group.tensors.items()
            if seen.isdisjoint((id(tensor), _memory(tensor))) and tensor.untyped_storage().data_ptr() not in storages
        }
        seen.update(map(_memory, group.tensors.values()))
        if group.tensors:
            yield group
        for inner, value in below:
            yield from self._inside(inner, (*owners, value), storages, seen)


def _memory(tensor: torch.Tensor) -> object:
    """Equal for a tensor and a view of all of it, as state_dict() gives."""
    return (tensor.data_ptr(), tensor.numel()) if tensor.numel() else id(tensor)


def _is_tensor(value: object) -> bool:
    return (
        type(value) in (torch.Tensor, nn.Parameter)
        and isinstance(value, torch.Tensor)
        and value.is_leaf
        and value.layout == torch.strided
        and value.device.type != "meta"
    )


def _entries(owner: Any) -> Iterator[tuple[str | int, Any]]:
    if isinstance(owner, nn.Module):
        yield from owner.named_parameters()
        yield from owner.named_buffers()
        for path, module in owner.named_modules():
            for key, value in vars(module).items():
                if _is_tensor(value):
                    yield f"{path}.{key}".lstrip("."), value
    elif isinstance(owner, dict):
        if len(owner) <= COLLECTION_MAX:
            yield from ((key, value) for key, value in list(owner.items()) if type(key) in (str, int))
    elif isinstance(owner, list | tuple):
        if len(owner) <= COLLECTION_MAX:
            yield from enumerate(owner)
    elif hasattr(owner, "__dict__") and not isinstance(owner, _CLOSED) and not _is_torchs(type(owner)):
        yield from list(vars(owner).items())


def _is_torchs(cls: type) -> bool:
    return cls.__module__.split(".")[0] in ("torch", "runtime", "elastic", "builtins")
