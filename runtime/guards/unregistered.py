"""Unregistered: finds objects that the script trains but has not registered.

The search starts at the loop: the variables of the functions around it, and the attributes of those objects, where
training scripts and Trainer classes keep their objects. It runs once, when the first step is handed out, and keeps weak
references; they are checked for changes when that step is over, and now and then later.
"""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

from elastic.errors import Unregistered
from runtime.recovery.state.change_detection import tensor_mark, value_sum
from runtime.recovery.state.registrable import unwrapped
from runtime.script_files import OURS, is_library

_WATCHED = (nn.Module, torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler)
_BASES = (nn.Module.state_dict, torch.optim.Optimizer.state_dict)
DEPTH_MAX = 4
_OBJECTS_MAX = 20_000
"""How many objects are searched: a script may keep its data set in a list of objects."""
CONTAINER_MAX = 1000
"""A longer list or dict holds data, and is not searched."""
ELEMENTS = 1024


@dataclass(frozen=True, slots=True)
class Stray:
    """An object with a state of its own. name: as the script calls it, such as "self.ema"."""

    name: str
    kind: str
    mark: Callable[[], object]
    before: object


class Strays:
    """The unregistered objects of one script."""

    def __init__(self, registered: Mapping[str, Any], frame: FrameType | None) -> None:
        """frame: the caller that runs the loop, or code that it calls."""
        carried = set(_carried(registered.values()))
        # Registered tensors in another object, such as a compiled model or a part of it, are no strays.
        tensors = {
            id(tensor) for thing in registered.values() if isinstance(thing, nn.Module) for tensor in _state(thing)
        }
        self._strays = []
        for name, thing in _visible(frame):
            if id(thing) in carried or id(unwrapped(thing)) in carried:
                continue
            carried.add(id(thing))
            mark = _mark_of(weakref.ref(thing), tensors)
            self._strays.append(Stray(name, type(thing).__name__, mark, mark()))

    def check(self, when: str) -> None:
        """Raise Unregistered if an object has changed since the search. when: such as "step 7"."""
        changed = [stray for stray in self._strays if stray.mark() not in (stray.before, None)]
        if not changed:
            return
        first = changed[0]
        others = f" (and so did {', '.join(stray.name for stray in changed[1:])})" if changed[1:] else ""
        raise Unregistered(
            f"{first.name} ({first.kind}) changed by the end of {when}{others}, but is not registered: newcomers and "
            f"checkpoints would be without it. Write job.register({_keyword(first.name)}={first.name}) before the "
            'loop; or, if nothing depends on it, job.steps(..., allow={"Unregistered"}).'
        )


def caller() -> FrameType | None:
    """The nearest frame outside this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(OURS):
        frame = frame.f_back
    return frame


def _keyword(name: str) -> str:
    """The last word of a dotted name, without the index of a list."""
    return name.partition("[")[0].rpartition(".")[2]


def _carried(things: Iterable[Any]) -> Iterator[int]:
    """Ids of the objects that registered objects hold, if their own state_dict() can be trusted to include them.

    The inherited state_dict() of modules and optimizers may lack some: a base optimizer inside an optimizer is a stray.
    """
    todo = list(things)
    seen: set[int] = set()
    while todo:
        thing = todo.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        yield id(thing)
        if isinstance(thing, nn.Module):
            todo += thing.modules()
        state_dict = getattr(type(thing), "state_dict", None)
        if state_dict is None or state_dict in _BASES:
            continue
        for value in vars(thing).values() if hasattr(thing, "__dict__") else ():
            inner = value if isinstance(value, list | tuple) else [value]
            # A scheduler does not carry the optimizer that it drives.
            kinds = (LRScheduler,) if isinstance(thing, LRScheduler) else _WATCHED
            todo += [item for item in inner if isinstance(item, kinds)]


def _visible(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """(name, object) of every watched object that the frame and its callers can name, nearest first."""
    seen: set[int] = set()
    nearest = True
    while frame is not None:
        if nearest or not is_library(frame.f_code.co_filename):
            nearest = False
            yield from _inside(frame.f_locals, seen)
            if frame.f_globals is not frame.f_locals:
                yield from _inside(frame.f_globals, seen)
        frame = frame.f_back


def _inside(names: Mapping[str, Any], seen: set[int]) -> Iterator[tuple[str, Any]]:
    todo = [(name, value, 0) for name, value in list(names.items())]
    for name, value, depth in todo:
        # By type(), because isinstance() asks a proxy for its target, which may not exist yet.
        if id(value) in seen or issubclass(type(value), ModuleType | type):
            continue
        if issubclass(type(value), _WATCHED):
            seen.add(id(value))
            yield name, value
            if issubclass(type(value), torch.optim.Optimizer):
                bases = [(key, item) for key, item in vars(value).items() if isinstance(item, torch.optim.Optimizer)]
                todo += [(f"{name}.{key}", item, depth + 1) for key, item in bases]
        elif depth < DEPTH_MAX and len(todo) < _OBJECTS_MAX:
            children = list(_children(name, value))
            if children:
                seen.add(id(value))
                todo += [(path, child, depth + 1) for path, child in children]


def _children(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    kind = type(value)
    if issubclass(kind, list | tuple | dict) and len(value) > CONTAINER_MAX:
        return
    if issubclass(kind, list | tuple):
        yield from ((f"{name}[{i}]", item) for i, item in enumerate(value))
    elif issubclass(kind, dict):
        yield from ((f"{name}[{key!r}]", item) for key, item in list(value.items()))
    elif kind.__dictoffset__ and not str(kind.__module__).startswith(("runtime.", "torch.", "builtins")):
        yield from ((f"{name}.{key}", item) for key, item in list(vars(value).items()))


def _state(module: nn.Module) -> Iterator[torch.Tensor]:
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.layout == torch.strided and not (is_lazy(tensor) or tensor.is_meta or tensor.is_quantized):
            yield tensor


def _tensor_mark(tensor: torch.Tensor) -> object:
    """A mark with some of the values, because a change through `.data` leaves the version; a teacher may be large."""
    start = tensor.detach().flatten()[:ELEMENTS] if tensor.is_contiguous() else tensor.detach()[:1]
    return tensor_mark(tensor, False), value_sum(start)


def _mark_of(thing: weakref.ref[Any], registered: set[int]) -> Callable[[], object]:
    """A function whose result compares equal while the object has not changed; None once the object is gone."""

    def mark() -> object:
        match thing():
            case nn.Module() as module:
                return [_tensor_mark(tensor) for tensor in _state(module) if id(tensor) not in registered]
            case torch.optim.Optimizer() as optimizer:
                return [
                    _tensor_mark(value) if isinstance(value, torch.Tensor) else repr(value)
                    for state in optimizer.state.values()
                    for value in (state.values() if isinstance(state, dict) else [state])
                ]
            case LRScheduler() as scheduler:
                return scheduler.last_epoch
            case torch.amp.GradScaler() as scaler:
                return json.dumps(scaler.state_dict())
            case _:
                return None

    return mark
