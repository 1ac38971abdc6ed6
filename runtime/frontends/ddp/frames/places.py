"""Where values are in the frames of a script, from a local name through objects to an attribute or a key."""

from __future__ import annotations

import argparse
import contextlib
import copyreg
import ctypes
import inspect
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Mapping
from types import BuiltinFunctionType, FrameType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple, TypeGuard

import torch

from runtime.frontends.ddp.script.objects import is_meter
from runtime.script_files import is_library

DEPTH_MAX = 3
"""Objects between a local name and a value, at most: trainer.state.meter.count has so many."""
MODELS = -1
"""In place of the number of a frame: the place is in a module of the script's model."""
GLOBALS = -2
"""In place of the number of a frame: the place is a global of a module of the script that a frame's function is of."""
OBJECTS_MAX = 64
"""Objects that are looked into, for each frame, and entries of a dict that is looked into."""
_COLLECTIONS: Any = (dict, list, tuple)
_DICTS = (dict, OrderedDict, defaultdict, Counter)
KEYS: Collection[type] = (int, str)
"""A value in a dict is followed if its key has one of these types."""
_OF_OPTIMIZERS = frozenset({"param_groups", "state", "defaults"})
"""What the job keeps of each optimizer. A copy of it, in an optimizer of the script's own class, would have other
parameters than the model."""
CODE = frozenset({BuiltinFunctionType, FunctionType, ModuleType})
"""Types of most globals of a script: such a value counts nothing, and is not looked into."""


class ValuePlace(NamedTuple):
    """The place of a value: a local name of a frame, or an attribute, a key or an index of what that name holds. A
    tuple, because each turn makes one for every name."""

    frame: int
    """0: the outermost frame of the script. MODELS, GLOBALS: none."""
    function: str
    """The function of the frame; of GLOBALS, the file of the module."""
    name: str
    path: tuple[str | int, ...] = ()
    """Attributes, keys and indices from the object with that name to the value."""

    @property
    def text(self) -> str:
        """A text of digits is a key of another dict than the number, so it has quotation marks."""
        keys = [repr(key) if type(key) is str and is_whole(key) else str(key) for key in self.path]
        return f"{self.frame} {self.function} {'.'.join((self.name, *keys))}"

    @property
    def spelling(self) -> str:
        """The value as a script would spell it, without brackets, and its function, file or model."""
        return f"{'.'.join(map(str, (self.name, *self.path)))} in {self.function}"

    def under(self, key: str | int) -> ValuePlace:
        """The place of an attribute, of a key or of an index of the object that is here."""
        return ValuePlace(self.frame, self.function, self.name, (*self.path, key))


class ScriptFrames:
    """The frames of the script's own files that stand around a call, innermost last."""

    def __init__(self, below: FrameType | None = None) -> None:
        """below: the innermost frame that stands now and is not the script's; it and all frames around it are left out.
        None: no frame is left out for that reason."""
        self._outside: set[int] = set()
        while below is not None:
            self._outside.add(id(below))
            below = below.f_back
        self.looked_into: dict[str, int] = {}
        """How many objects `values` has looked into when it was called last, by the function or file that names them:
        OBJECTS_MAX at most."""
        self.holders: set[int] = set()
        """Ids of objects that hold averages of the weights: their numbers count too, whatever class they are of."""
        self._modules: dict[ValuePlace, torch.nn.Module] = {}
        """The modules of the script's own classes within its models."""

    def add_model(self, model: torch.nn.Module) -> None:
        """Its modules of the script's own classes may count in their attributes, as in forward()."""
        before = len(self._modules)
        for path, module in model.named_modules():
            if is_defined_by_script(type(module)):
                self._modules[ValuePlace(MODELS, f"model {before}", path)] = module

    def standing(self) -> list[FrameType]:
        """The frames, outermost first."""
        found: list[FrameType] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and id(frame) not in self._outside:
            if not is_library(frame.f_code.co_filename):
                found.append(frame)
            frame = frame.f_back
        return found[::-1]

    def names(self) -> Iterator[tuple[ValuePlace, Any]]:
        """Each local name of each frame, and its value; and the globals that the functions of the frames have, of a
        module whose own frame does not stand any more because the script has imported it."""
        standing = self.standing()
        for number, frame in enumerate(standing):
            for name, value in _locals(frame).items():
                if not name.startswith("__"):
                    yield ValuePlace(number, frame.f_code.co_qualname, name), value
        for file, names in _globals(standing).items():
            for name, value in list(names.items()):
                if not name.startswith("__"):
                    yield ValuePlace(GLOBALS, file, name), value

    def values(self) -> Iterator[tuple[ValuePlace, Any]]:
        """Local names, and attributes and keys of the script's own objects and classes, of namespaces and of short
        dicts."""
        for place, module in self._modules.items():
            for key, value in list(vars(module).items()):
                if key != "training" and not key.startswith("_"):
                    yield place.under(key), value
        seen: set[int] = set()
        objects = dict[int, int]()
        functions = dict[int, str]()
        for place, value in self.names():
            yield place, value
            functions[place.frame] = place.function
            if type(value) not in CODE:
                yield from self._inside(place, value, seen, objects)
        self.looked_into = {functions[frame]: number for frame, number in objects.items()}

    def _inside(
        self, place: ValuePlace, owner: Any, seen: set[int], objects: dict[int, int]
    ) -> Iterator[tuple[ValuePlace, Any]]:
        if isinstance(owner, type) and is_defined_by_script(owner) and id(owner) not in seen:
            seen.add(id(owner))
            yield from ((place.under(key), value) for key, value in list(vars(owner).items()) if key[:2] != "__")
        if not self.is_followed(owner) or id(owner) in seen or objects.get(place.frame, 0) >= OBJECTS_MAX:
            return
        seen.add(id(owner))
        objects[place.frame] = objects.get(place.frame, 0) + 1
        left_out = _OF_OPTIMIZERS if isinstance(owner, torch.optim.Optimizer) else ()
        for key, value in list((owner if isinstance(owner, dict) else attributes(owner)).items()):
            if type(key) in KEYS and key not in left_out:
                yield place.under(key), value
                if len(place.path) + 1 < DEPTH_MAX:
                    yield from self._inside(place.under(key), value, seen, objects)

    def is_followed(self, value: object) -> bool:
        """Whether the class of a value is defined in a file of the script, and it has attributes; or the value is a
        namespace, a short dict, or a meter of a library. A module of a network is none of these: see `add_model`."""
        if is_dict(value):
            return len(value) <= OBJECTS_MAX
        if isinstance(value, type | torch.nn.Module | torch.Tensor):
            return False
        own = isinstance(value, SimpleNamespace | argparse.Namespace) or id(value) in self.holders
        return own or is_meter(value) or is_defined_by_script(type(value))

    def write(self, values: Mapping[ValuePlace, object]) -> None:
        """Put a value at each of these places. What cannot be written, as its owner is another object by now or is
        immutable, stays."""
        standing = self.standing() if values else []
        for number, frame in enumerate(standing):
            mine = {place: value for place, value in values.items() if place.frame == number}
            if mine:
                _write(frame, mine)
        imported = _globals(standing)
        for place, value in values.items():
            if place.frame == GLOBALS and place.function in imported:
                _put(imported[place.function], place, value)
        for place, value in values.items():
            if place.frame == MODELS:
                setattr(self._modules[ValuePlace(*place[:3])], str(place.path[0]), value)


def is_whole(text: str) -> bool:
    """Whether a text is that of a whole number."""
    return text.removeprefix("-").isdecimal()


def is_dict(value: object) -> TypeGuard[dict[Any, Any]]:
    """Whether it is a dict of Python itself."""
    return type(value) in _DICTS


def is_defined_by_script(cls: type) -> bool:
    """Whether a class stands in a file of the script."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return file is not None and not is_library(file)


def attributes(owner: Any) -> dict[str, Any]:
    """Those of its dict and those of its slots."""
    slots = [name for cls in type(owner).__mro__ for name in copyreg._slotnames(cls)]  # type: ignore[attr-defined]
    return {**getattr(owner, "__dict__", {}), **{name: getattr(owner, name) for name in slots if hasattr(owner, name)}}


def _locals(frame: FrameType) -> dict[str, Any]:
    """A copy of the frame's names and values.

    Below Python 3.13 a function's frame.f_locals is a dict that the interpreter keeps with the frame: it would keep
    alive what the script drops. So it is emptied, unless the script holds it too, by locals().
    """
    names = frame.f_locals
    found = dict(names)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.getrefcount(names) <= 3:
        names.clear()
    return found


def _globals(standing: list[FrameType]) -> dict[str, dict[str, Any]]:
    """File -> the globals of the functions of these frames, without those that are the local names of a frame."""
    own = {id(frame.f_globals) for frame in standing if frame.f_code.co_name == "<module>"}
    return {frame.f_code.co_filename: frame.f_globals for frame in standing if id(frame.f_globals) not in own}


def _put(names: dict[str, Any], place: ValuePlace, value: object) -> None:
    if not place.path:
        names[place.name] = value
        return
    with contextlib.suppress(AttributeError, LookupError, TypeError):
        owner: Any = names[place.name]
        for key in place.path[:-1]:
            owner = owner[key] if isinstance(owner, _COLLECTIONS) else getattr(owner, str(key))
        if isinstance(owner, _COLLECTIONS):
            owner[place.path[-1]] = value
        else:
            setattr(owner, str(place.path[-1]), value)


def _write(frame: FrameType, values: Mapping[ValuePlace, object]) -> None:
    names = frame.f_locals
    for place, value in values.items():
        _put(names, place, value)
    if sys.version_info < (3, 13) and names is not frame.f_globals:
        # Until then f_locals is a copy, and this is what debuggers call to write it back.
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
        if sys.getrefcount(names) <= 3:
            names.clear()
