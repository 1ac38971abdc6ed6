"""The plain values in the frames of a script: counters, running sums, the best accuracy so far.

A script counts turns where it means steps. So what a silent turn has done to plain values is undone before the next
turn of the same pass, and a newcomer gets those that change from a member. Looked at are the frames of the script's own
files that stand around the loop: their numbers, strings and short tensors, the length of their lists, and the same of
objects whose classes the script defines, one level deep.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import math
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType, SimpleNamespace
from typing import Any, TypeAlias, TypeGuard

import torch

from runtime.script_end import LIBRARIES, OURS

Plain: TypeAlias = int | float | bool | str | None

TEXT_MAX = 200
"""Longer strings are data."""
TENSOR_MAX = 64
"""Elements; larger tensors are data."""
OBJECTS_MAX = 64
"""Of one frame, that are looked into."""
_ABSENT = object()
_KINDS = (int, float, bool, str, type(None))


@dataclass(frozen=True, slots=True)
class ValuePlace:
    """Where a value is: a local name of a frame, or an attribute or a key of the object with that name."""

    frame: int
    """From the outermost one of the script."""
    function: str
    name: str
    attribute: str = ""

    @property
    def text(self) -> str:
        return f"{self.frame} {self.function} {self.name}" + f".{self.attribute}" * bool(self.attribute)


class FrameValues:
    """What there was at one moment. Made by `read`."""

    def __init__(self) -> None:
        self._plain: dict[ValuePlace, Plain] = {}
        self._lists: dict[ValuePlace, tuple[list[Any], int]] = {}
        self._tensors: dict[ValuePlace, tuple[torch.Tensor, torch.Tensor]] = {}
        self._outside: Collection[int] = ()
        self._grown: dict[str, torch.dtype] = {}
        """Numbers that have become tensors: place -> dtype."""

    @classmethod
    def read(cls, outside: Collection[int] = ()) -> FrameValues:
        """Of the script's frames that have come to this call. outside: ids of frames that are not the script's."""
        found = cls()
        found._outside = outside
        for number, frame in enumerate(frames(outside)):
            for place, value in _values(number, frame):
                match value:
                    case list():
                        found._lists[place] = (value, len(value))
                    case torch.Tensor():
                        found._tensors[place] = (value, value.detach().clone())
                    case _:
                        found._plain[place] = value
        return found

    def plain(self) -> dict[str, Plain]:
        """Numbers, strings and None, by the text of their place."""
        return {place.text: value for place, value in self._plain.items()}

    def put_back(self) -> None:
        """As it was then. What has come since stays."""
        now = FrameValues.read(self._outside)
        wanted: dict[ValuePlace, object] = {
            place: value for place, value in self._plain.items() if _differs(now._at(place), value)
        }
        for place, (values, length) in self._lists.items():
            if now._lists.get(place, (None, 0))[0] is values:
                del values[length:]
        with torch.no_grad():
            for place, (tensor, before) in self._tensors.items():
                if not torch.equal(tensor, before):
                    tensor.copy_(before)
                here = now._at(place)
                if here is not tensor and here is not _ABSENT:
                    wanted[place] = tensor
        self._write(wanted)

    def added(self) -> dict[str, float]:
        """What has been added since to the numbers and to the elements of the tensors: place -> difference. A number
        may have become a tensor; what is infinite, or true or false, is no sum."""
        now = FrameValues.read(self._outside)
        found: dict[str, float] = {}
        for place, was in self._plain.items():
            here = now._at(place)
            if _is_number(was) and isinstance(here, torch.Tensor) and here.numel() == 1:
                self._grown[place.text] = here.dtype
                here = here.item()
            if _is_number(was) and _is_number(here) and here != was and math.isfinite(here - was):
                found[place.text] = float(here - was)
        seen: set[int] = set()
        for place, (tensor, before) in self._tensors.items():
            here = now._at(place)
            if not isinstance(here, torch.Tensor) or here.shape != before.shape or before.dtype == torch.bool:
                continue
            if id(tensor) not in seen and not torch.equal(here, before):
                for number, value in enumerate((here.double() - before.double()).reshape(-1).tolist()):
                    if math.isfinite(value):
                        found[f"{place.text} {number}"] = value
            seen.add(id(tensor))
        return found

    def add(self, totals: Mapping[str, float], ranks: int) -> None:
        """To each number and tensor what all ranks have added to it, divided by their number. A whole number becomes a
        fraction if need be; a tensor of whole numbers is rounded. Called when the values are those of this moment."""
        wanted: dict[ValuePlace, object] = {}
        for place, here in self._plain.items():
            if place.text in totals and isinstance(here, int | float):
                total = totals[place.text]
                share: float = int(total) // ranks if total % ranks == 0 and type(here) is int else total / ranks
                value: object = here + share
                if (kind := self._grown.get(place.text)) is not None:
                    value = torch.tensor(here + share, dtype=kind if total % ranks == 0 else torch.float64)
                wanted[place] = value
        self._write(wanted)
        for place, (tensor, _) in self._tensors.items():
            if any(f"{place.text} {number}" in totals for number in range(tensor.numel())):
                values = [totals.get(f"{place.text} {number}", 0.0) / ranks for number in range(tensor.numel())]
                with torch.no_grad():
                    tensor += torch.tensor(values, dtype=torch.float64).reshape(tensor.shape).to(tensor)

    def _at(self, place: ValuePlace) -> object:
        """The value there, or _ABSENT."""
        if place in self._plain:
            return self._plain[place]
        return self._tensors[place][0] if place in self._tensors else _ABSENT

    def become(self, others: Mapping[str, Plain]) -> None:
        """Take over the values that a member had when it was here. A whole number keeps what this worker has added to
        its own since then, as the member has done too; every other value that it has changed since stays."""
        now = FrameValues.read(self._outside)
        wanted: dict[ValuePlace, Plain] = {}
        for place, before in self._plain.items():
            if place.text not in others or place not in now._plain:
                continue
            there, here = others[place.text], now._plain[place]
            if type(there) is int and type(here) is int and type(before) is int:
                wanted[place] = there + here - before
            elif type(here) is type(before) and here == before:
                wanted[place] = there
        self._write({place: value for place, value in wanted.items() if _differs(now._at(place), value)})

    def predicted(self, at_forward: FrameValues, earlier: Mapping[str, int]) -> dict[tuple[FrameType, str], object]:
        """The whole numbers of local names as they will be at the end of the turn: those that the script had changed
        when the model ran stay, the others grow as they did in the step before, earlier, or by 1."""
        found: dict[tuple[FrameType, str], object] = {}
        standing = frames(self._outside)
        for place, before in self._plain.items():
            if type(before) is int and not place.attribute and place.frame < len(standing):
                here = at_forward._plain.get(place)
                grown = here if here != before else before + before - earlier.get(place.text, before - 1)
                found[standing[place.frame], place.name] = grown
        return found

    def become_earlier(self, earlier: Mapping[str, int]) -> None:
        """Whole numbers become what they would be now in a step that had begun with these."""
        now = FrameValues.read(self._outside)
        wanted: dict[ValuePlace, Plain] = {}
        for place, before in self._plain.items():
            here = now._plain.get(place)
            if type(here) is int and type(before) is int and (place.text in earlier or here != before):
                wanted[place] = earlier.get(place.text, before - 1) + here - before
        self._write(wanted)

    def _write(self, values: Mapping[ValuePlace, object]) -> None:
        for number, frame in enumerate(frames(self._outside) if values else ()):
            mine = {place: value for place, value in values.items() if place.frame == number}
            if mine:
                _write(frame, mine)


class FrameCounters:
    """Which plain values a script changes while it trains, and what they are in the step in progress."""

    def __init__(self) -> None:
        self._before: dict[str, Plain] | None = None
        self._changing: set[str] = set()
        self.earlier: dict[str, int] = {}
        """The whole numbers among them, as they were at the beginning of the step before."""

    def of(self, values: FrameValues) -> dict[str, Plain]:
        """Those that have changed from one step to another."""
        return {name: value for name, value in values.plain().items() if name in self._changing}

    def step(self, values: FrameValues) -> None:
        """A step's first batch is handed out."""
        now, before = values.plain(), self._before
        if before is not None:
            self._changing |= {name for name, value in now.items() if name in before and before[name] != value}
        self.earlier = {
            name: value for name, value in (before or {}).items() if name in self._changing and type(value) is int
        }
        self._before = now

    def told(self, names: Mapping[str, Plain]) -> None:
        """A member has seen these change."""
        self._changing |= names.keys()


def _is_number(value: object) -> TypeGuard[float]:
    return type(value) in (int, float)


def _differs(here: object, value: Plain) -> bool:
    return here is not _ABSENT and (type(here) is not type(value) or here != value)


def frames(outside: Collection[int]) -> list[FrameType]:
    """Those of the script's own files, outermost first."""
    found: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and id(frame) not in outside:
        if not frame.f_code.co_filename.startswith((OURS, *LIBRARIES, "<")):
            found.append(frame)
        frame = frame.f_back
    return found[::-1]


def _values(number: int, frame: FrameType) -> Iterator[tuple[ValuePlace, Any]]:
    objects = 0
    for name, value in list(frame.f_locals.items()):
        place = ValuePlace(number, frame.f_code.co_qualname, name)
        if name.startswith("__"):
            continue
        if _looked_at(value):
            yield place, value
        elif objects < OBJECTS_MAX and _is_scripts_own(value):
            objects += 1
            inside = value if isinstance(value, dict) else vars(value)
            for attribute, inner in list(inside.items()):
                if type(attribute) is str and _looked_at(inner):
                    yield ValuePlace(number, place.function, name, attribute), inner


def _looked_at(value: object) -> bool:
    if type(value) in _KINDS:
        return not isinstance(value, str) or len(value) <= TEXT_MAX
    if type(value) is torch.Tensor:
        return value.numel() <= TENSOR_MAX and not value.requires_grad and value.layout == torch.strided
    return type(value) is list


def _is_scripts_own(value: object) -> bool:
    """Whether its class is defined in a file of the script, and it has attributes; or it is a namespace, or a short
    dict. No module of a network: its state is registered, or is none."""
    if type(value) is dict:
        return len(value) <= OBJECTS_MAX
    if isinstance(value, SimpleNamespace | argparse.Namespace):
        return True
    if isinstance(value, type | torch.nn.Module | torch.Tensor) or not hasattr(value, "__dict__"):
        return False
    module = sys.modules.get(type(value).__module__)
    file = getattr(module, "__file__", None)
    return file is not None and not file.startswith((OURS, *LIBRARIES))


def _write(frame: FrameType, values: Mapping[ValuePlace, object]) -> None:
    names = frame.f_locals
    for place, value in values.items():
        if place.attribute and isinstance(owner := names[place.name], dict):
            owner[place.attribute] = value
        elif place.attribute:
            with contextlib.suppress(AttributeError):  # another object has come there, which cannot be changed
                setattr(names[place.name], place.attribute, value)
        else:
            names[place.name] = value
    if sys.version_info < (3, 13) and names is not frame.f_globals:
        # Until then f_locals is a copy, and this is what debuggers call to write it back.
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
