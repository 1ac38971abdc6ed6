"""State as typed JSON and raw bytes: without pickle, a peer or a file can only deliver data.

A tensor in a nested value becomes {"__tensor__": i}, and its bytes are blob i. Other values that JSON lacks have
markers too: bytes, tuples, counters, ordered and default dicts, dicts with keys other than strings, infinities and NaN.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
import torch

from elastic.checkpoints.description import is_dense
from elastic.errors import NotCarried
from runtime.allreduce.reduction.flat_pool import CPU
from runtime.allreduce.reduction.partial_sum import Json

Plain: TypeAlias = "bool | int | float | str | None"
NamedTensor: TypeAlias = tuple[str, torch.Tensor]

DEPTH_MAX = 64
_DICTS = (dict, OrderedDict, defaultdict, Counter)
_FACTORIES = {kind.__name__: kind for kind in (bool, int, float, str, list, tuple, dict, OrderedDict, Counter)}
"""The factories of a defaultdict whose values can be carried, by name."""
_INSTEAD = {"set": "sorted(x)", "frozenset": "sorted(x)", "ndarray": "torch.from_numpy(x)", "deque": "list(x)"}
_FIX = "only numbers, strings, bytes, bools, None, lists, tuples, dicts and dense tensors can be copied to a newcomer"
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
        *(torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2),
    )
}


_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def dtype_name(tensor: torch.Tensor) -> str:
    """The name of a tensor's dtype, such as "float32"."""
    return _NAMES.get(tensor.dtype) or str(tensor.dtype).removeprefix("torch.")


def to_blob(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, in row-major order: uint8, shape (nbytes,), CPU; a view if that needs no copy."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def from_blob(blob: torch.Tensor, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """The tensor of these bytes, sharing their memory if their alignment allows. Raises ValueError."""
    kind = _DTYPES.get(dtype)
    if kind is None:
        raise ValueError(f"unknown dtype {dtype!r}")
    if blob.dtype != torch.uint8 or blob.dim() != 1 or any(size < 0 for size in shape):
        raise ValueError(f"a blob of dtype {blob.dtype} and shape {tuple(blob.shape)} for shape {tuple(shape)}")
    if blob.numel() != math.prod(shape) * kind.itemsize:
        raise ValueError(f"{blob.numel()} bytes for {dtype} of shape {tuple(shape)}")
    if blob.data_ptr() % kind.itemsize or blob.storage_offset() % kind.itemsize:
        blob = blob.clone()
    return blob.view(kind).reshape(tuple(shape))


def strides_of(tensor: torch.Tensor) -> list[Json]:
    """The strides of a copy: the tensor's own, or row-major ones if it has gaps or overlaps, as in torch.empty_like."""
    strides = tensor.stride()
    return list(strides if is_dense(tensor.shape, strides) else torch.empty(tensor.shape, device="meta").stride())


def laid_out(tensor: torch.Tensor, strides: Sequence[int], device: torch.device) -> torch.Tensor:
    """A copy on that device with these strides, which `strides_of` gives for a tensor of this shape."""
    if tensor.stride() == tuple(strides):
        return tensor.to(device, copy=True)
    return torch.empty_strided(tensor.shape, tuple(strides), dtype=tensor.dtype, device=device).copy_(tensor)


def device_for(kind: str, own: torch.device) -> torch.device:
    """The device, in a worker with device `own`, of a tensor that was on a device of type `kind` where it was copied:
    device numbers mean nothing in another process. Tensors on the CPU stay there."""
    return CPU if kind == CPU.type else own


def _reject(path: str, value: object) -> NotCarried:
    kind = type(value)
    name = f"{path} is a {kind.__module__}.{kind.__qualname__}"
    if isinstance(value, np.generic | Enum):
        write = "x.item()" if isinstance(value, np.generic) else "x.value"
        return NotCarried(f"{name}: {_FIX}; write {write} in the place of x")
    base = next((base for base in kind.__mro__ if base in (*_DICTS, bool, int, float, str, list, tuple)), None)
    if base is not None:
        plain = base.__name__
        return NotCarried(f"{name}, and would come back as a plain {plain}; write {plain}(x) in the place of x")
    write = f"; write {_INSTEAD[kind.__name__]} in the place of x" if kind.__name__ in _INSTEAD else ""
    return NotCarried(f"{name}: {_FIX}{write}")


def _factory_name(value: defaultdict[Any, Any], path: str) -> str | None:
    factory = value.default_factory
    if factory is None or _FACTORIES.get(getattr(factory, "__name__", "")) is factory:
        return None if factory is None else factory.__name__
    called = getattr(factory, "__qualname__", repr(factory))
    raise NotCarried(
        f"{path} is a defaultdict whose default_factory is {called}, which cannot be carried; carried are "
        f"{', '.join(_FACTORIES)} and None. Write a plain dict, and x.setdefault(key, default) where x[key] was"
    )


def _plain(value: object) -> bool:
    # A subclass would come back as its base type; numpy's float64 is the one that behaves as its base.
    return value is None or type(value) in (bool, int, float, str, np.float64)


def _checked_tensor(value: torch.Tensor, path: str) -> torch.Tensor:
    dense = value.layout == torch.strided and not value.is_quantized and not value.is_meta
    if hasattr(type(value), "__tensor_flatten__"):  # its values are in other tensors, as those of a DTensor
        raise NotCarried(f"{path} is a {type(value).__module__}.{type(value).__qualname__}: {_FIX}")
    if not dense or dtype_name(value) not in _DTYPES:
        raise NotCarried(f"{path} is a tensor of {value.dtype}, {value.layout} on {value.device}: {_FIX}")
    if value.is_conj() or value.is_neg():  # its bytes are not its values
        raise NotCarried(f"{path} is a conjugate view; write x.resolve_conj().resolve_neg() in the place of x")
    return value


def _checked_key(key: object, path: str) -> str | int:
    if type(key) is int:
        return key
    if type(key) is str:
        if not key.isascii() and any("\ud800" <= letter <= "\udfff" for letter in key):
            # Names of tensors are made of keys, and go into files and digests.
            raise NotCarried(f"{path} has the key {key!r}, which UTF-8 cannot encode; write repr(x) in the place of x")
        return key
    raise NotCarried(f"{path} has a key of type {type(key).__name__}: only strings and integers are carried as keys")


def encode(value: object, path: str, tensors: list[NamedTensor], *, sharing: bool = True) -> Json:
    """The JSON of a nested value; its tensors are appended to `tensors` as (path, tensor), numbered by place there.

    sharing: a tensor that the value has at several places is appended once, under the first of them, and is one tensor
    in what `decode` returns. False for a module, which is loaded in place.
    Raises NotCarried naming the path of a value that cannot be carried.
    """
    return _encode(value, path, tensors, {} if sharing else None, DEPTH_MAX)


def _encode(value: Any, path: str, tensors: list[NamedTensor], numbers: dict[int, int] | None, depth: int) -> Json:
    """numbers: id of a tensor of this value -> its number; None: each place has a tensor of its own."""
    if depth == 0:
        raise NotCarried(f"{path} is nested deeper than {DEPTH_MAX} levels, or contains itself")
    if isinstance(value, torch.Tensor):
        number = len(tensors) if numbers is None else numbers.setdefault(id(value), len(tensors))
        if number == len(tensors):
            tensors.append((path, _checked_tensor(value, path)))
        return {"__tensor__": number}
    if _plain(value):
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"__float__": _named(float(value))}
        return value  # type: ignore[no-any-return]
    if type(value) is bytes:
        return {"__bytes__": base64.b64encode(value).decode()}
    if type(value) in (list, tuple):
        items: list[Json] = [_encode(item, f"{path}.{i}", tensors, numbers, depth - 1) for i, item in enumerate(value)]
        return items if type(value) is list else {"__tuple__": items}
    if type(value) not in _DICTS:
        raise _reject(path, value)
    pairs: list[tuple[str | int, Json]] = [
        (_checked_key(key, path), _encode(item, f"{path}.{key}", tensors, numbers, depth - 1))
        for key, item in value.items()
    ]
    listed: list[Json] = [[key, item] for key, item in pairs]
    if type(value) is Counter:
        return {"__counter__": listed}
    if type(value) is OrderedDict:
        return {"__ordered__": listed}
    if type(value) is defaultdict:
        return {"__default__": [_factory_name(value, path), listed]}
    if all(isinstance(key, str) and not key.startswith("__") for key, _ in pairs):
        return {str(key): item for key, item in pairs}
    return {"__dict__": listed}


def _named(value: float) -> str:
    """The name of an infinity or a NaN; the sign of a NaN is one of its bits, too."""
    return "-nan" if math.isnan(value) and math.copysign(1.0, value) < 0 else repr(value)


def decode(value: Json, tensor: Callable[[int], torch.Tensor]) -> Any:
    """The value that `encode` was given; `tensor(i)` returns tensor i, each time the same one. Raises ValueError if
    encode never writes it."""
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    marker, body = next(iter(value.items()), ("", None))
    if not marker.startswith("__"):
        return {key: decode(item, tensor) for key, item in value.items()}
    match marker, body:
        case "__tensor__", int():
            return tensor(body)
        case "__float__", ("inf" | "-inf" | "nan" | "-nan") as name:
            return float(str(name))
        case "__bytes__", str():
            return base64.b64decode(body, validate=True)
        case "__tuple__", list():
            return tuple(decode(item, tensor) for item in body)
        case "__dict__", list():
            return dict(_decoded_pair(pair, tensor) for pair in body)
        case "__counter__", list():
            return Counter(dict(_decoded_pair(pair, tensor) for pair in body))
        case "__ordered__", list():
            return OrderedDict(_decoded_pair(pair, tensor) for pair in body)
        case "__default__", [str() | None as name, list() as pairs] if name is None or name in _FACTORIES:
            factory = None if name is None else _FACTORIES[name]
            return defaultdict(factory, (_decoded_pair(pair, tensor) for pair in pairs))
    raise ValueError(f"unknown marker {marker!r}")


def _decoded_pair(pair: Json, tensor: Callable[[int], torch.Tensor]) -> tuple[str | int, Any]:
    match pair:
        case [str() | int() as key, item]:
            return key, decode(item, tensor)
    raise ValueError(f"not a key and a value: {pair!r}")


def plain_leaves(value: Json, path: str) -> Iterator[tuple[str, Plain]]:
    """(path, plain value) in the result of `encode`, without tensors. An empty container, and the kind of an ordered or
    default dict, is a string."""
    if isinstance(value, dict) and value:
        marker, body = next(iter(value.items()))
        if marker == "__tensor__":
            return
        if marker == "__float__":
            yield path, str(body)
            return
        if marker == "__bytes__":
            yield path, f"bytes {body}"
            return
        if marker == "__tuple__":
            yield from plain_leaves(body, path)
            return
        if marker == "__default__" and isinstance(body, list):
            yield path, f"defaultdict of {body[0]}"
            body = body[1]
        if marker == "__ordered__" and isinstance(body, list):
            yield path, f"in order: {', '.join(str(pair[0]) for pair in body if isinstance(pair, list))}"
        if marker in ("__dict__", "__counter__", "__ordered__", "__default__") and isinstance(body, list):
            value = {str(pair[0]): pair[1] for pair in body if isinstance(pair, list)}
    if isinstance(value, list):
        value = {str(i): item for i, item in enumerate(value)}
    if not isinstance(value, dict):
        yield path, value
        return
    if not value:
        yield path, "empty"
    for key, item in value.items():
        yield from plain_leaves(item, f"{path}.{key}")
