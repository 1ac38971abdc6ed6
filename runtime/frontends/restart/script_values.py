"""What a script counts, adds up and remembers while it trains: plain values in its frames, for its next process.

Numbers, strings, None, and lists, tuples, dictionaries and short tensors of them: in local names, in attributes of the
script's own objects, and in globals. Each is known by the text of its place.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from types import CodeType
from typing import Any, TypeAlias

import numpy as np
import torch

from elastic.errors import NotCarried
from runtime.frontends.ddp.frames.places import ScriptFrames, ValuePlace
from runtime.frontends.ddp.frames.plain_values import fill
from runtime.frontends.frameworks.plain_state import is_plain
from runtime.loop.training.gathering import from_bytes, to_bytes

Scalar: TypeAlias = bool | int | float | str | None
Told: TypeAlias = Scalar | list[str]
"""A value that is kept: a scalar, or another one as text, in a list of one."""

TENSOR_MAX = 64
"""Elements of a tensor; a larger one is a batch, or made of it."""


def read(frames: ScriptFrames) -> dict[str, Told]:
    """The plain values in the frames that stand around this call, by the text of their place."""
    found = ((place.text, _told(value)) for place, value in frames.values())
    return {text: told[0] for text, told in found if told is not None}


def changed(now: Mapping[str, Told], before: Mapping[str, Told]) -> dict[str, Told]:
    """What of `now` is new since `before`, or another value."""
    return {text: told for text, told in now.items() if text not in before or not _same(before[text], told)}


def write(frames: ScriptFrames, values: Mapping[str, Told]) -> None:
    """Put these values into the frames that stand around this call. Lists, dictionaries and tensors are filled, as
    others may have them, too. What is no plain value now stays."""
    wanted: dict[ValuePlace, object] = {}
    met = set()
    for place, here in list(frames.values()):
        met.add(place.text)
        if place.text not in values or (told := _told(here)) is None or _same(told[0], values[place.text]):
            continue
        there = _value(values[place.text])
        if isinstance(here, np.generic) and isinstance(there, bool | int | float):
            there = here.dtype.type(there)
        if not _filled(here, there):
            wanted[place] = there
    standing = frames.standing()
    for text in values.keys() - met:  # names that come up in the loop later
        number, function, name = text.split(" ", 2)
        code = standing[int(number)].f_code if 0 <= int(number) < len(standing) else None
        if code is not None and code.co_qualname == function and name in (*code.co_varnames, *_globals_of(code)):
            wanted[ValuePlace(int(number), function, name)] = _value(values[text])
    frames.write(wanted)


def _globals_of(code: CodeType) -> tuple[str, ...]:
    """The names of the frame of a module."""
    return code.co_names if code.co_name == "<module>" else ()


def _told(value: Any) -> tuple[Told] | None:
    """None: it is no plain value."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) in (bool, int, float, str):
        return (value,)
    if isinstance(value, torch.Tensor) and value.requires_grad:
        return None
    if not is_plain(value, TENSOR_MAX):
        return None
    try:
        return ([base64.b64encode(to_bytes(value, "a value of the script")).decode()],)
    except NotCarried:
        return None


def _value(told: Told) -> Any:
    return from_bytes(base64.b64decode(told[0])) if isinstance(told, list) else told


def _same(one: Told, other: Told) -> bool:
    return type(one) is type(other) and one == other


def _filled(here: Any, there: Any) -> bool:
    """Whether the object that is there has become equal to the other one."""
    if type(here) is not type(there):
        return False
    if isinstance(here, list):
        here[:] = there
    elif isinstance(here, dict):
        here.clear()
        here.update(there)
    elif isinstance(here, torch.Tensor) and (here.shape, here.dtype) == (there.shape, there.dtype):
        fill(here, there)
    else:
        return False
    return True
