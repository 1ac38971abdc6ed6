"""The plain values in the frames of a script: counters, running sums, the best accuracy so far.

A script counts turns where it means steps. So what a silent turn has done to plain values is undone before the next
turn of the same pass, and a newcomer gets those that change from a member. Looked at are the frames of the script's own
files that stand around the loop: their numbers, strings and short tensors, the length of their lists, and the same of
objects whose classes the script defines, one level deep.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
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
_KINDS = (int, float, bool, str, type(None))


@dataclass(frozen=True, slots=True)
class ValuePlace:
    """Where a value is: a local name of a frame, or an attribute of the object with that name."""

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
        """As it was then; what has come since, or is another object now, stays."""
        now = FrameValues.read(self._outside)
        self._write({place: value for place, value in self._plain.items() if _changed(now._plain, place, value)})
        for place, (values, length) in self._lists.items():
            if now._lists.get(place, (None, 0))[0] is values:
                del values[length:]
        with torch.no_grad():
            for place, (tensor, before) in self._tensors.items():
                if now._tensors.get(place, (None, None))[0] is tensor:
                    tensor.copy_(before)

    def added(self) -> dict[str, float]:
        """What has been added since to the numbers and to the elements of the tensors: place -> difference."""
        now = FrameValues.read(self._outside)
        found: dict[str, float] = {}
        for place, was in self._plain.items():
            here = now._plain.get(place)
            if _is_number(was) and _is_number(here) and here != was:
                found[place.text] = float(here - was)
        for place, (tensor, before) in self._tensors.items():
            if now._tensors.get(place, (None, None))[0] is tensor and not torch.equal(tensor, before):
                for number, value in enumerate((tensor - before).double().reshape(-1).tolist()):
                    found[f"{place.text} {number}"] = value
        return found

    def add(self, totals: Mapping[str, float], ranks: int) -> None:
        """To each number and tensor what all ranks have added to it, divided by their number. A whole number becomes a
        fraction if need be; a tensor of whole numbers is rounded."""
        now = FrameValues.read(self._outside)
        wanted: dict[ValuePlace, Plain] = {}
        for place, here in now._plain.items():
            if place.text in totals and isinstance(here, int | float):
                total = totals[place.text]
                share: float = int(total) // ranks if total % ranks == 0 and type(here) is int else total / ranks
                wanted[place] = here + share
        self._write(wanted)
        for place, (tensor, _) in now._tensors.items():
            if any(f"{place.text} {number}" in totals for number in range(tensor.numel())):
                values = [totals.get(f"{place.text} {number}", 0.0) / ranks for number in range(tensor.numel())]
                with torch.no_grad():
                    tensor += torch.tensor(values, dtype=torch.float64).reshape(tensor.shape).to(tensor)

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
        self._write({place: value for place, value in wanted.items() if _changed(now._plain, place, value)})

    def become_earlier(self, earlier: Mapping[str, int]) -> None:
        """Whole numbers become what they would be now in a step that had begun with these."""
        now = FrameValues.read(self._outside)
        wanted: dict[ValuePlace, Plain] = {}
        for place, before in self._plain.items():
            here = now._plain.get(place)
            if place.text in earlier and type(here) is int and type(before) is int:
                wanted[place] = earlier[place.text] + here - before
        self._write(wanted)

    def _write(self, values: Mapping[ValuePlace, Plain]) -> None:
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


def _changed(now: Mapping[ValuePlace, Plain], place: ValuePlace, value: Plain) -> bool:
    return place in now and (type(now[place]) is not type(value) or now[place] != value)


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
            for attribute, inner in list(vars(value).items()):
                if _looked_at(inner):
                    yield ValuePlace(number, place.function, name, attribute), inner


def _looked_at(value: object) -> bool:
    if type(value) in _KINDS:
        return not isinstance(value, str) or len(value) <= TEXT_MAX
    if type(value) is torch.Tensor:
        return value.numel() <= TENSOR_MAX and not value.requires_grad and value.layout == torch.strided
    return type(value) is list


def _is_scripts_own(value: object) -> bool:
    """Whether its class is defined in a file of the script, and it has attributes. No module of a network: its state is
    registered, or is none."""
    if isinstance(value, type | torch.nn.Module | torch.Tensor) or not hasattr(value, "__dict__"):
        return False
    module = sys.modules.get(type(value).__module__)
    file = getattr(module, "__file__", None)
    return file is not None and not file.startswith((OURS, *LIBRARIES))


def _write(frame: FrameType, values: Mapping[ValuePlace, Plain]) -> None:
    names = frame.f_locals
    for place, value in values.items():
        if place.attribute:
            setattr(names[place.name], place.attribute, value)
        else:
            names[place.name] = value
    if sys.version_info < (3, 13) and names is not frame.f_globals:
        # Until then f_locals is a copy, and this is what debuggers call to write it back.
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
