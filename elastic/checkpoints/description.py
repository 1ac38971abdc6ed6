"""The description of a copy of the state: which tensors it has, and where each belongs.

Checkpoints, snapshots, and members for a newcomer use it. It is checked here before anything is allocated for it.

    {"format": 1,
     "tensors": [{"name": "model.weight", "dtype": "float32", "shape": [2, 3], "strides": [3, 1], "nbytes": 24,
                  "device": "cpu"}, ...],
     "objects": {"model": {"state": a value, "evaluating": [names of modules], "fixed": [names of parameters],
                           "nonpersistent": {"queue": {"__tensor__": 7}, ...}}, ...},
     "state": {"best": a value, ...}}

A value is JSON; {"__tensor__": i} replaces tensor i, and other markers replace values that JSON lacks
(runtime/recovery/state/encoding.py). The bytes of a tensor come in row-major order; "strides", in elements, are its
layout in memory, without gaps: a fused optimizer pairs elements in memory order, and a kernel may sum in that order.
Two places of a value with one number are one tensor, such as a counter of steps that an optimizer's parameters share.
Only modules have more than "state"; "nonpersistent" has their buffers that are not in their state_dict().
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

STATE_FORMAT = 1
STATE = "job.state"
"""Prefix of the names of tensors in "state"."""
PACKED = "__packed__"
"""The key of a value whose tensors are packed with it."""
DEPTH_MAX = 400
"""The most lists and objects within each other; 64 levels of tuples, or of dicts with number keys, take up to 194."""
DIMENSIONS_MAX = 64
BYTES_MAX = 1 << 62

_FLOATS = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
_INTEGERS = {f"{sign}int{bits}": bits // 8 for sign in ("", "u") for bits in (8, 16, 32, 64)}
ITEM_BYTES = {**_FLOATS, **_INTEGERS, "bool": 1, "complex64": 8, "complex128": 16}
"""Bytes of an element, by dtype."""
FACTORIES = ("bool", "int", "float", "str", "list", "tuple", "dict", "OrderedDict", "Counter")
"""Factories of a defaultdict."""

_KEYS = {"name", "dtype", "shape", "strides", "nbytes", "device"}
_PACKED_KEYS = {"dtype", "shape", "strides", "device"}


@dataclass(frozen=True, slots=True)
class Described:
    """A tensor. nbytes follows from its shape and dtype."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def described_tensors(header: Any) -> list[Described]:
    """The tensors of a description, in its order. Raises ValueError for anything else, saying what is wrong."""
    header = _object(header, "it", {"format", "tensors", "objects", "state"})
    if type(header["format"]) is not int or header["format"] != STATE_FORMAT:
        raise ValueError(f"format {str(header['format'])[:40]!r} instead of {STATE_FORMAT}")
    tensors = [_tensor(entry) for entry in _list(header["tensors"], "tensors")]
    if sum(tensor.nbytes for tensor in tensors) > BYTES_MAX:
        raise ValueError("its tensors are larger than any memory")
    objects = _object(header["objects"], "objects")
    referred: list[int] = []
    for name, entry in objects.items():
        _text(name, "the name of an object")
        is_module = "evaluating" in _object(entry, name)
        _object(entry, name, {"state", "evaluating", "fixed", "nonpersistent"} if is_module else {"state"})
        for key in ("evaluating", "fixed") if is_module else ():
            for path in _list(entry[key], key):
                _text(path, key)
        _walk(entry["state"], name, referred, DEPTH_MAX)
        for value in _object(entry["nonpersistent"], name).values() if is_module else ():
            if value is not None and (not isinstance(value, dict) or value.keys() != {"__tensor__"}):
                raise ValueError(f"{name[:100]} has a buffer that is no tensor")
            _walk(value, name, referred, DEPTH_MAX)
    for key, value in _object(header["state"], "state").items():
        _text(key, "the name of a value")
        _walk(value, f"{STATE}.{key}", referred, DEPTH_MAX)
    if set(referred) != set(range(len(tensors))):
        raise ValueError("its tensors are not each in a place")
    for tensor in tensors:
        if not any(f"{tensor.name}.".startswith(f"{owner}.") for owner in (*objects, STATE)):
            raise ValueError(f"{tensor.name[:100]!r} belongs to nothing that it names")
    return tensors


def check_values(values: Any) -> None:
    """Check values of job.state without a copy of the state: name -> a value as above without tensors, or, with small
    ones, {PACKED: {"value": a value, "tensors": [{"dtype", "shape", "strides", "device", "bytes": base64}]}}.

    Raises ValueError.
    """
    for key, value in _object(values, STATE).items():
        path, referred, tensors = f"{STATE}.{_text(key, 'the name of a value')}", list[int](), list[Any]()
        if isinstance(value, dict) and value.keys() == {PACKED}:
            body = _object(value[PACKED], path, {"value", "tensors"})
            value, tensors = body["value"], _list(body["tensors"], path)
        _walk(value, path, referred, DEPTH_MAX)
        if set(referred) != set(range(len(tensors))):
            raise ValueError(f"the tensors of {path[:100]} are not each in a place")
        for entry in tensors:
            _object(entry, path, _PACKED_KEYS | {"bytes"})
            blob = base64.b64decode(_text(entry["bytes"], "the bytes of a tensor"), validate=True)
            _tensor({**{name: entry[name] for name in _PACKED_KEYS}, "name": path, "nbytes": len(blob)})


def unique_names(names: Sequence[str]) -> list[str]:
    """Names for the files: two entries with one name, such as keys 1 and "1" of one dict, get different names."""
    taken = set(names)
    seen: dict[str, int] = {}
    found = []
    for name in names:
        count = seen.get(name, -1) + 1
        while count and f"{name}#{count}" in taken:
            count += 1
        seen[name] = count
        found.append(f"{name}#{count}" if count else name)
    return found


def _tensor(entry: Any) -> Described:
    _object(entry, "a tensor", _KEYS)
    name = _text(entry["name"], "the name of a tensor")
    _text(entry["device"], "a device")
    item_bytes = ITEM_BYTES.get(_text(entry["dtype"], "a dtype"))
    if item_bytes is None:
        raise ValueError(f"{name} has the unknown dtype {entry['dtype'][:40]!r}")
    shape = sizes(entry["shape"], f"the shape of {name}")
    strides = _list(entry["strides"], "strides")
    if not all(type(stride) is int and 0 <= stride <= BYTES_MAX for stride in strides) or not is_dense(shape, strides):
        raise ValueError(f"{name} cannot lie in memory with strides {str(strides)[:80]}")
    nbytes = math.prod(shape) * item_bytes
    if type(entry["nbytes"]) is not int or entry["nbytes"] != nbytes:
        raise ValueError(f"{name} has {nbytes} bytes by its shape, but nbytes={str(entry['nbytes'])[:40]}")
    return Described(name, entry["dtype"], shape, nbytes)


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements of such a tensor have no gaps or overlaps, in any order of its dimensions."""
    if len(shape) != len(strides):
        return False
    span = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1):
        if stride != span:
            return False
        span *= size
    return True


def sizes(value: Any, what: str) -> tuple[int, ...]:
    """The dimensions of a tensor, or a position in it. Raises ValueError."""
    found = tuple(_list(value, what))
    if len(found) > DIMENSIONS_MAX or not all(type(size) is int and 0 <= size <= BYTES_MAX for size in found):
        raise ValueError(f"{what} cannot be {str(found)[:80]}")
    if math.prod(max(size, 1) for size in found) > BYTES_MAX:
        raise ValueError(f"{what} is larger than any memory")
    return found


def _walk(value: Any, path: str, referred: list[int], depth: int) -> None:
    """Check a value, and collect the numbers of its tensors."""
    if depth == 0:
        raise ValueError(f"{path[:100]} is nested too deeply")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{path[:100]} has a bare {value}")
    if isinstance(value, list):
        for item in value:
            _walk(item, path, referred, depth - 1)
    if not isinstance(value, dict):
        return
    marker, body = next(iter(value.items()), ("", None))
    if not marker.startswith("__"):
        if any(key.startswith("__") for key in value):
            raise ValueError(f"{path[:100]} has a marker among other keys")
        for item in value.values():
            _walk(item, path, referred, depth - 1)
        return
    match marker, body:
        case "__tensor__", int() if type(body) is int:
            referred.append(body)
        case "__float__", "inf" | "-inf" | "nan" | "-nan":
            pass
        case "__bytes__", str():
            base64.b64decode(body, validate=True)
        case "__tuple__", list():
            _walk(body, path, referred, depth - 1)
        case "__dict__" | "__counter__" | "__ordered__", list() if all(map(_is_pair, body)):
            _walk([item for _, item in body], path, referred, depth - 1)
        case "__default__", [factory, list() as pairs] if all(map(_is_pair, pairs)):
            if factory is not None and factory not in FACTORIES:
                raise ValueError(f"{path[:100]} has a default that nobody can make")
            _walk([item for _, item in pairs], path, referred, depth - 1)
        case _:
            raise ValueError(f"{path[:100]} has the marker {marker[:40]!r} with what cannot be marked so")
    if len(value) != 1:
        raise ValueError(f"{path[:100]} has a marker among other keys")


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and type(value[0]) in (str, int)


def _object(value: Any, what: str, keys: set[str] | None = None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what[:100]} is no object")
    if keys is not None and value.keys() != keys:
        raise ValueError(f"{what[:100]} lacks, or has in excess: {', '.join(sorted(value.keys() ^ keys))[:200]}")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{what[:100]} is no list")
    return value


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} is no text")
    value.encode()  # a lone surrogate raises a ValueError
    return value
