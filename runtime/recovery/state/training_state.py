"""A copy of the training state: everything registered, and job.state.

A newcomer that loads a copy computes the same bits as its donor from there on. The copy is a JSON header and raw bytes
(see encoding.py). Loading writes into the objects that the script holds; no object is replaced.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast, get_args

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from elastic.checkpoints.description import STATE_FORMAT, described_tensors, is_dense
from elastic.errors import ConfigError, NotCarried, Unregistered
from runtime.allreduce.reduction.buffers import Buffer, Kind, Merge, Modes, described
from runtime.allreduce.reduction.flat_pool import CPU
from runtime.allreduce.reduction.host_copies import host_copies
from runtime.allreduce.reduction.partial_sum import Json
from runtime.recovery.state import encoding
from runtime.recovery.state.change_detection import StateMarks, differences, tensor_mark, value_sum, version_of
from runtime.recovery.state.host_bytes import StreamMark
from runtime.recovery.state.registrable import check_registrable, sharded, unwrapped
from runtime.recovery.state.script_state import Values, encode_value

__all__ = ["Carrier", "Values"]

INT_BUFFER_ELEMENTS_MAX = 4096
FINGERPRINT_PARAMETERS = 4
FINGERPRINT_ELEMENTS = 1024
_COMPILED = "_orig_mod."

NamedParameter = tuple[str, nn.Parameter]


class Carrier:
    """Registered objects by name; their state is named, copied, compared and watched here.

    Use: `register` as often as needed, `freeze` before the first step, then the rest.
    """

    def __init__(self, values: Values, device: torch.device = CPU) -> None:
        """device: this worker's."""
        self.values = values
        self._device = device
        self._objects: dict[str, Any] = {}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._schedulers: dict[str, Any] = {}
        self._declared: dict[str, str] = {}
        self._undigested: set[str] = set()
        self._frozen = False
        self._parameters: list[NamedParameter] = []
        self._kinds: list[Kind] = []
        self._watched: list[NamedParameter] = []
        """The parameters that must not change inside a pass, under the names of their marks."""
        self._owned: set[int] = set()
        self._floats: list[Buffer] = []
        self._integers: list[Buffer] = []
        self._buffers: list[tuple[nn.Module, str]] = []
        self._parts: list[tuple[str, nn.Module]] = []
        self._children: list[dict[str, nn.Module | None]] = []
        """The children that each of the parts had when it was found."""
        self.gpus: list[torch.device] = []
        """The GPUs on which it was when registration ended, this worker's or none in most jobs."""
        self._settled = threading.Event()
        self._settled.set()
        self._unsettled = 0
        self.modes = Modes(lambda: (part for _, part in self._named_modules()))
        """The modes of the registered modules, and during a pass those with which it began."""

    # Registered objects

    def register(self, buffers: Mapping[str, str] | None = None, **objects: object) -> None:
        """Add objects that have state_dict() and load_state_dict(), and rules for buffers that change in a pass.

        buffers: qualified name ("model.queue") -> "mean" or "first". Raises ConfigError or NotCarried, and then
        nothing of this call is registered.
        """
        if self._frozen:
            raise ConfigError(f"register({', '.join(objects)}) came after the first step; register before the loop")
        known = {id(thing): name for name, thing in self._objects.items()}
        things = {name: unwrapped(thing) for name, thing in objects.items()}
        for name, thing in things.items():
            if name in self._objects:
                raise ConfigError(f"register({name}=...) was called twice; every name is registered once")
            if id(thing) in known:
                raise ConfigError(f"{name} and {known[id(thing)]} are the same object; register it under one name")
            known[id(thing)] = name
            check_registrable(name, thing)
        self._objects |= things
        for name, thing in things.items():
            if isinstance(thing, torch.optim.Optimizer):
                self._optimizers[name] = thing
            if hasattr(thing, "last_epoch"):
                self._schedulers[name] = thing
        self._parts = []
        self._declared |= dict(buffers or {})

    def leave_undigested(self, name: str) -> None:
        """Leave this object, which is copied, out of digests: it has no tensors, and differs between workers."""
        self._undigested.add(name)

    def freeze(self) -> None:
        """End registration: find parameters and buffers. A second call does nothing.

        Raises ConfigError (nothing to train, a lazy parameter, a wrong buffer rule), Unregistered (an optimizer
        holds a parameter of no registered module) or NotCarried.
        """
        if self._frozen:
            return
        unique: dict[int, NamedParameter] = {}
        for named in self._named_parameters():
            unique.setdefault(id(named[1]), named)
        parameters = list(unique.values())
        modules = self.modules()
        if modules and not any(parameter.requires_grad for _, parameter in parameters):
            raise ConfigError(f"{', '.join(modules)}: no parameter has requires_grad=True, so nothing can be trained")
        for name, parameter in parameters:
            if is_lazy(parameter):
                raise ConfigError(f"{name} has no shape yet; run one batch through the model before the first step")
            if type(parameter.data).__name__ == "DTensor":
                raise sharded(f"{name} is a DTensor")
            if parameter.is_complex():
                raise NotCarried(f"{name} is of {parameter.dtype}: use a real tensor")
        self._owned = set(unique)
        self._check_groups()
        self._floats, self._integers = self._find_buffers()
        self._buffers = [(owner, key) for _, owner, key, _ in self._named_buffers()]
        self._parameters = parameters
        self._kinds = self._kinds_now()
        merged = self._merged()
        self._watched = [(f"parameter {name}", parameter) for name, parameter in parameters if name not in merged]
        self._frozen = True
        _, tensors = self.describe()
        self.gpus = list(dict.fromkeys(tensor.device for _, tensor in tensors if tensor.is_cuda))

    def check_kinds(self) -> None:
        """Raise NotCarried if a parameter, or a buffer that a pass changes, has another dtype or shape than in the
        first step, and Unregistered if an optimizer has got a new parameter."""
        if (kinds := self._kinds_now()) != self._kinds:
            pairs = zip(self._parameters, kinds, self._kinds, strict=True)
            name, now, then = next((name, now, then) for (name, _), now, then in pairs if now != then)
            raise NotCarried(
                f"{name} is {described(*now)}, and was {described(*then)} when the loop began; gradients are summed, "
                "and newcomers copy, as it was then. Change dtypes and shapes before the loop; for mixed precision use "
                "torch.autocast"
            )
        for buffer in (*self._floats, *self._integers):
            buffer.check_kind()
        self._check_groups()

    def _kinds_now(self) -> list[Kind]:
        return [(parameter.dtype, parameter.shape) for _, parameter in self._parameters]

    def _merged(self) -> set[str]:
        """Names of what a pass may change."""
        return {buffer.name for buffer in (*self._floats, *self._integers)}

    def _check_groups(self) -> None:
        for name, optimizer in self.optimizers().items():
            for i, group in enumerate(optimizer.param_groups):
                if not self._owned.issuperset(map(id, group["params"])):
                    raise Unregistered(
                        f"parameter group {i} of {name} holds a parameter of no registered module, or one that its "
                        "module got after the first step; make it before the loop, and register the module it belongs "
                        "to, or put it into a torch.nn.ParameterList and register that"
                    )

    @property
    def objects(self) -> Mapping[str, Any]:
        """All registered objects by name, unwrapped."""
        return self._objects

    def modules(self) -> dict[str, nn.Module]:
        """Registered modules by name, without torch.compile's wrapper."""
        return {name: thing for name, thing in self._objects.items() if isinstance(thing, nn.Module)}

    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Registered optimizers by name."""
        return self._optimizers

    def schedulers(self) -> dict[str, Any]:
        """Registered learning rate schedulers by name: objects that count epochs in `last_epoch`."""
        return self._schedulers

    def parameters(self) -> list[NamedParameter]:
        """The trainable parameters, each once, in the order of registration.

        The script may switch requires_grad between steps; ask again at each step.
        """
        return [(name, parameter) for name, parameter in self._parameters if parameter.requires_grad]

    def fixed(self) -> list[str]:
        """Names of the parameters that are not trained now."""
        return [name for name, parameter in self._parameters if not parameter.requires_grad]

    def float_buffers(self) -> list[Buffer]:
        """Floating point buffers that a pass changes: BatchNorm's statistics and declared ones."""
        return list(self._floats)

    def int_buffers(self) -> list[Buffer]:
        """Integer and bool buffers that a pass changes: BatchNorm's counters and declared ones."""
        return list(self._integers)

    def learning_rates(self) -> tuple[float, ...]:
        """The learning rate of every parameter group of every optimizer, in the order of registration."""
        return tuple(
            float(group["lr"])
            for optimizer in self.optimizers().values()
            for group in optimizer.param_groups
            if "lr" in group
        )

    def _named_parameters(self) -> Iterator[NamedParameter]:
        for name, module in self.modules().items():
            for path, parameter in module.named_parameters():
                yield f"{name}.{_plain_name(path)}", parameter

    def _find_buffers(self) -> tuple[list[Buffer], list[Buffer]]:
        floats: list[Buffer] = []
        integers: list[Buffer] = []
        seen: set[int] = set()
        undeclared = dict(self._declared)
        for name, owner, key, tensor in (*self._named_buffers(), *self._frozen_parameters()):
            rule = undeclared.pop(name, None)
            if rule is None and isinstance(owner, _NormBase):
                rule = "mean" if tensor.is_floating_point() else "first"
            if rule is None or id(tensor) in seen:
                continue
            if rule not in get_args(Merge):
                raise ConfigError(f'register(buffers={{"{name}": {rule!r}}}): the rule must be "mean" or "first"')
            seen.add(id(tensor))
            buffer = Buffer(name, owner, key, cast(Merge, rule), (tensor.dtype, tensor.shape))
            if tensor.is_floating_point():
                floats.append(buffer)
                continue
            if rule == "mean" or tensor.is_complex() or tensor.numel() > INT_BUFFER_ELEMENTS_MAX:
                raise ConfigError(
                    f'buffer {name} ({tensor.dtype}, {tensor.numel()} elements) cannot be merged by "{rule}"; integer '
                    f'buffers of up to {INT_BUFFER_ELEMENTS_MAX} elements take "first", larger ones have to be floats'
                )
            integers.append(buffer)
        if undeclared:
            raise ConfigError(
                f"register(buffers=...) names {', '.join(undeclared)}, but no registered module has such a buffer, or "
                "such a parameter that is not trained"
            )
        return floats, integers

    def place(self, kind: str) -> torch.device:
        """The device of a tensor here that was on a device of this type at its donor."""
        return encoding.device_for(kind, self._device)

    def _named_modules(self) -> list[tuple[str, nn.Module]]:
        """(name, module) of the registered modules and all their parts. The search, which takes torch a microsecond a
        module, is repeated if a module has got other children since the last one."""
        if not self._parts or self._children != [part._modules for _, part in self._parts]:
            self._parts = [
                (_plain_name(path), part)
                for name, module in self.modules().items()
                for path, part in module.named_modules(prefix=name)
            ]
            self._children = [dict(part._modules) for _, part in self._parts]
        return self._parts

    def _named_buffers(self) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
        for name, owner in self._named_modules():
            if owner._buffers:
                for key, tensor in owner.named_buffers(recurse=False):
                    yield f"{name}.{key}", owner, key, tensor

    def _frozen_parameters(self) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
        """As `_named_buffers`, for frozen parameters: some libraries keep running statistics in them."""
        for name, owner in self._named_modules():
            for key, parameter in owner.named_parameters(recurse=False):
                if not parameter.requires_grad:
                    yield f"{name}.{key}", owner, key, parameter

    # A copy

    def capture(self) -> tuple[dict[str, Json], list[torch.Tensor]]:
        """(header, blobs) of one moment; during a pass of that when the pass began.

        header: a typed description of every tensor, and every plain value, JSON only. blobs: the bytes of the tensors
        in the order of the header, uint8, shape (nbytes,), CPU. Those of contiguous CPU tensors are views, into which
        training writes: send or copy them before. Raises NotCarried naming a value that cannot be copied.
        """
        header, tensors = self.describe()
        return header, [encoding.to_blob(tensor) for _, tensor in tensors]

    def unsettle(self) -> None:
        """The script is about to set its learning rates once more, as it has in this pass before: until `settle`, other
        threads take no copy, which would have those of before."""
        self._unsettled += 1
        self._settled.clear()

    def settle(self) -> None:
        """The learning rates are those of the pass in progress."""
        self._settled.set()

    def mark(self) -> StreamMark:
        """On the script's thread: behind what the GPUs have to do now, the tensors are those of this moment."""
        return StreamMark(self.gpus)

    def describe_settled(self) -> tuple[dict[str, Json], list[encoding.NamedTensor]]:
        """As `describe`, for another thread than the script's: waits until the learning rates are settled."""
        while True:
            unsettled = self._unsettled
            self._settled.wait()
            found = self.describe()
            if self._unsettled == unsettled:
                return found

    def describe(self) -> tuple[dict[str, Json], list[encoding.NamedTensor]]:
        """(header, the tensors themselves, in its order). Raises NotCarried naming a value that cannot be copied."""
        tensors: list[encoding.NamedTensor] = []
        objects: dict[str, Json] = {name: self._encode(name, thing, tensors) for name, thing in self._objects.items()}
        state: dict[str, Json] = {
            key: encode_value(key, value, tensors) for key, value in self.values.as_dict().items()
        }
        entries: list[Json] = [_entry(path, tensor) for path, tensor in tensors]
        header: dict[str, Json] = {"format": STATE_FORMAT, "tensors": entries, "objects": objects, "state": state}
        return header, tensors

    def _encode(self, name: str, thing: Any, numbered: list[encoding.NamedTensor]) -> Json:
        state = thing.state_dict()
        if not isinstance(thing, nn.Module):
            return {"state": encoding.encode(state, name, numbered)}
        # By address: a tensor with two names in a module is in its state_dict() twice.
        bases = {
            buffer.live.data_ptr(): buffer.base
            for buffer in (*self._floats, *self._integers)
            if buffer.base is not None
        }

        def at_start(value: object) -> object:
            if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
                return value
            base = bases.get(value.data_ptr())
            return base if base is not None and _kind(base) == _kind(value) else value

        tensors: dict[str, object] = {_plain_name(path): at_start(value) for path, value in state.items()}
        left_out: dict[str, object] = {path: at_start(value) for path, _, _, value in _nonpersistent(thing)}
        evaluating: list[Json] = [
            _plain_name(path) for path, part in thing.named_modules() if not self.modes.training(part)
        ]
        fixed: list[Json] = [_plain_name(path) for path, value in thing.named_parameters() if not value.requires_grad]
        return {
            "state": encoding.encode(tensors, name, numbered),
            "evaluating": evaluating,
            "fixed": fixed,
            "nonpersistent": encoding.encode(left_out, name, numbered),
        }

    def load(self, header: dict[str, Json], blobs: Sequence[torch.Tensor]) -> None:
        """Become the copy that `header` and `blobs` describe, in place: parameters and modules keep their identity.

        During a pass, buffers become the base of that pass too, because that is what the donor's copy holds. Raises
        ConfigError if the copy does not fit the registered objects; before any change, unless only a load_state_dict
        can tell.
        """
        self.check(header)
        tensors = self._tensors(header, blobs)
        objects = cast(dict[str, dict[str, Json]], header["objects"])
        entries = cast(list[dict[str, Any]], header["tensors"])

        def tensor(i: int) -> torch.Tensor:
            return encoding.laid_out(tensors[i], entries[i]["strides"], devices[i])

        devices = [self.place(entry["device"]) for entry in entries]
        decoded = {name: encoding.decode(entry["state"], tensors.__getitem__) for name, entry in objects.items()}
        values = encoding.decode(header["state"], tensor)
        try:
            for name, thing in self._objects.items():
                if isinstance(thing, nn.Module):
                    _load_module(thing, decoded[name], objects[name])
                    _load_nonpersistent(thing, encoding.decode(objects[name]["nonpersistent"], tensor))
                elif isinstance(thing, torch.optim.Optimizer):
                    _load_optimizer(thing, encoding.decode(objects[name]["state"], tensor))
                else:
                    thing.load_state_dict(encoding.decode(objects[name]["state"], tensor))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"{name} refuses the state that is to be loaded: {error!r}") from error
        for buffer in (*self._floats, *self._integers):
            if buffer.base is not None:
                buffer.base = buffer.live.detach().clone()
        self.modes.loaded()
        self.values.replace(values)

    def check(self, header: dict[str, Json]) -> None:
        """Raise ConfigError if a copy with this header cannot fit the registered objects.

        No tensor of it need be here yet, and nothing is allocated.
        """
        try:
            described = described_tensors(header)
            objects = cast(dict[str, dict[str, Json]], header["objects"])
            if sorted(objects) != sorted(self._objects):
                raise ValueError(f"it has {sorted(objects)}, registered are {sorted(self._objects)}")
            tensors = [encoding.from_blob(_nothing(tensor.nbytes), tensor.dtype, tensor.shape) for tensor in described]
            encoding.decode(header["state"], tensors.__getitem__)
            decoded = {name: encoding.decode(entry["state"], tensors.__getitem__) for name, entry in objects.items()}
            self._check_fit(objects, decoded)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"a copy of the state does not fit this script: {error}") from error

    def _tensors(self, header: dict[str, Json], blobs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        try:
            pairs = zip(described_tensors(header), blobs, strict=True)
            return [encoding.from_blob(blob, tensor.dtype, tensor.shape) for tensor, blob in pairs]
        except ValueError as error:
            raise ConfigError(f"a copy of the state does not fit this script: {error}") from error

    def _check_fit(self, objects: dict[str, dict[str, Json]], decoded: dict[str, Any]) -> None:
        for name, module in self.modules().items():
            if "evaluating" not in objects[name]:
                raise ValueError(f"{name} is no module in it")
            there = decoded[name]
            here = {_plain_name(path): value for path, value in module.state_dict().items()}
            if there.keys() != here.keys():
                raise ValueError(f"{name} differs in {', '.join(sorted(there.keys() ^ here.keys()))}")
            left_out = {path for path, *_ in _nonpersistent(module)}
            left_out_there = cast(dict[str, Json], objects[name]["nonpersistent"]).keys()
            if left_out_there != left_out:
                raise ValueError(f"{name} differs in {', '.join(sorted(left_out_there ^ left_out))}")
            for path, value in here.items():
                if _kind(value) != _kind(there[path]):
                    raise ValueError(f"{name}.{path} is {_kind(value)} here and {_kind(there[path])} in the copy")
        for name, optimizer in self.optimizers().items():
            sizes = [len(group["params"]) for group in optimizer.param_groups]
            sizes_there = [len(group["params"]) for group in decoded[name]["param_groups"]]
            if sizes != sizes_there:
                raise ValueError(f"{name} has groups of {sizes} parameters here and {sizes_there} in the copy")

    # Comparing

    def digest(self, copy: tuple[dict[str, Json], Sequence[torch.Tensor]] | None = None) -> str:
        """SHA-256, in hex, over (name, dtype, shape, bytes) of all registered state and job.state in name order.

        Plain values count as (name, value) with floats in their shortest repr. Tensors count in row-major order. copy:
        what `capture` returned, of which it is then.
        """
        sha = hashlib.sha256()
        for path, description, payload in sorted(self._leaves(copy), key=lambda item: item[:2]):
            _update(sha, path, description, payload)
        return sha.hexdigest()

    def digests(self) -> dict[str, str]:
        """Name -> digest of each leaf, cut to 16 hex digits, in the order of registration."""
        found: dict[str, str] = {}
        for path, description, payload in self._leaves():
            sha = hashlib.sha256()
            _update(sha, path, description, payload)
            found[path] = sha.hexdigest()[:16]
        return found

    def _leaves(
        self, copy: tuple[dict[str, Json], Sequence[torch.Tensor]] | None = None
    ) -> list[tuple[str, str, torch.Tensor | None]]:
        """(name, dtype and shape, values) of each tensor, (name, value, None) of each plain value."""
        if copy is None:
            header, named = self.describe()
            copy = header, [tensor for _, tensor in named]
        header, tensors = copy
        found: list[tuple[str, str, torch.Tensor | None]] = []
        for entry, tensor in zip(cast(list[dict[str, Any]], header["tensors"]), tensors, strict=True):
            found.append((entry["name"], f"{entry['dtype']} {entry['shape']}", tensor))
        trees = {
            name: cast(dict[str, Json], entry)["state"]
            for name, entry in cast(dict[str, Json], header["objects"]).items()
        }
        digested = {name: tree for name, tree in trees.items() if name not in self._undigested}
        for name, tree in (*digested.items(), ("job.state", header["state"])):
            found += [(path, json.dumps(value), None) for path, value in encoding.plain_leaves(tree, name)]
        return found

    def fingerprint(self, step: int) -> str:
        """A short hash, in hex, of learning rates, job.state without tensors, and a part of the parameters and of
        job.state's tensors; the part rotates with the step.

        Workers that have drifted apart soon differ in it; it reads some kilobytes, however large the model.
        """
        hashed = hashlib.blake2b(digest_size=8)
        _hash_some(hashed, [parameter for _, parameter in self._parameters], step)
        tensors: list[encoding.NamedTensor] = []
        state = {key: encode_value(key, value, tensors) for key, value in self.values.as_dict().items()}
        hashed.update(json.dumps([self.learning_rates(), state], sort_keys=True).encode())
        _hash_some(hashed, [tensor for _, tensor in tensors], step, rows=True)
        return hashed.hexdigest()

    def buffer_fingerprint(self, step: int) -> str:
        """The same for the buffers of the registered modules, also those that state_dict() leaves out."""
        hashed = hashlib.blake2b(digest_size=8)
        live = [owner._buffers.get(key) for owner, key in self._buffers]
        _hash_some(hashed, [tensor for tensor in live if tensor is not None], step, rows=True)
        return hashed.hexdigest()

    def watch(self, *, full: bool = False) -> StateMarks:
        """Marks of all that must not change inside a pass. full: with a checksum of all values, which reads them."""
        merged = self._merged()
        marks: dict[str, object] = {
            name: (
                parameter.requires_grad,
                version_of(parameter),
                parameter.data_ptr(),
                value_sum(parameter) if full else 0,
            )
            for name, parameter in self._watched
        }
        for name, _, _, tensor in self._named_buffers():
            if name not in merged:
                marks[f"buffer {name}"] = tensor_mark(tensor, full)
        marks |= self.watch_rates()
        for name, scheduler in self.schedulers().items():
            marks[f"scheduler {name}"] = scheduler.last_epoch
        for key, value in self.values.as_dict().items():
            tensors: list[encoding.NamedTensor] = []
            plain = encode_value(key, value, tensors)
            marks[f"job.state.{key}"] = (json.dumps(plain), [tensor_mark(tensor, full) for _, tensor in tensors])
        return StateMarks(marks, full)

    def watch_rates(self) -> dict[str, object]:
        """The marks of the learning rates."""
        return {
            f"learning rate of {name}, group {i}": float(group.get("lr", math.nan))
            for name, optimizer in self.optimizers().items()
            for i, group in enumerate(optimizer.param_groups)
        }

    def changed(self, before: StateMarks) -> list[str]:
        """What differs from the marks, in words: "parameter model.fc.weight", "buffer model.queue", "learning rate of
        optimizer, group 0", "scheduler scheduler", "job.state.best"."""
        return differences(before, self.watch(full=before.full))


def _update(sha: hashlib._Hash, path: str, description: str, payload: torch.Tensor | None) -> None:
    sha.update(f"{path}\0{description}\0".encode())
    if payload is not None:
        sha.update(encoding.to_blob(payload).numpy().data)


def _nothing(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="meta")


def _plain_name(path: str) -> str:
    return path.replace(_COMPILED, "").removesuffix(_COMPILED[:-1]).rstrip(".")


def _kind(value: object) -> str:
    return described(value.dtype, value.shape) if isinstance(value, torch.Tensor) else "a plain value"


def _entry(path: str, tensor: torch.Tensor) -> dict[str, Json]:
    return {
        "name": path,
        "dtype": encoding.dtype_name(tensor),
        "shape": list[Json](tensor.shape),
        "strides": encoding.strides_of(tensor),
        "nbytes": tensor.nbytes,
        "device": tensor.device.type,
    }


def _load_module(module: nn.Module, state: dict[str, Any], entry: dict[str, Json]) -> None:
    own = {path: state[_plain_name(path)] for path in module.state_dict()}
    module.load_state_dict(own, strict=True)
    evaluating = set(cast(list[str], entry["evaluating"]))
    for path, part in module.named_modules():
        part.training = _plain_name(path) not in evaluating
    fixed = set(cast(list[str], entry["fixed"]))
    for path, parameter in module.named_parameters():
        parameter.requires_grad_(_plain_name(path) not in fixed)


def _nonpersistent(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor | None]]:
    """(path, owner, key, value) of the buffers that state_dict() leaves out."""
    for path, owner in module.named_modules():
        for key in [key for key in owner._buffers if key in owner._non_persistent_buffers_set]:
            yield _plain_name(f"{path}.{key}".lstrip(".")), owner, key, owner._buffers[key]


def _load_nonpersistent(module: nn.Module, values: dict[str, Any]) -> None:
    """Load buffers that state_dict() leaves out, in place if possible."""
    for path, owner, key, live in _nonpersistent(module):
        value = values[path]
        if value is None or live is None or _kind(live) != _kind(value) or torch._debug_has_internal_overlap(live) == 1:
            near = live if live is not None else next(module.parameters(), value)
            owner._buffers[key] = None if value is None else value.to(near.device)
            continue
        with torch.no_grad():
            live.copy_(value)


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load an optimizer. `load_state_dict` casts state to its parameter's dtype, so the donor's is restored."""
    optimizer.load_state_dict(state)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, saved in state["state"].items():
        if not isinstance(saved, dict):
            continue
        loaded = optimizer.state[parameters[number]]
        for key, value in saved.items():
            if isinstance(value, torch.Tensor) and loaded[key].dtype != value.dtype:
                loaded[key] = value.to(loaded[key].device)


def _hash_some(hashed: hashlib.blake2b, tensors: Sequence[torch.Tensor], step: int, *, rows: bool = False) -> None:
    """Hash elements of a few tensors, of others in each step. rows: in row-major order; else in memory order, except of
    a tensor with gaps: what is between its elements is not copied to a newcomer."""
    count = len(tensors)
    share = min(FINGERPRINT_PARAMETERS, count)
    windows = []
    for place in range(step * share, (step + 1) * share):
        turn, at = divmod(place, count)
        tensor = tensors[at]
        if rows or not is_dense(tensor.shape, tensor.stride()):
            tensor = tensor.detach().contiguous()
        windows.append(_window(tensor, turn))
    for window in host_copies(windows):
        hashed.update(window.view(torch.uint8).numpy().data)


def _window(parameter: torch.Tensor, turn: int) -> torch.Tensor:
    """Some elements, others at each turn, in memory order: reshaping a channels_last parameter would copy all of it."""
    windows = max(1, math.ceil(parameter.numel() / FINGERPRINT_ELEMENTS))
    first = turn % windows * FINGERPRINT_ELEMENTS
    count = min(FINGERPRINT_ELEMENTS, parameter.numel() - first)
    return parameter.detach().as_strided((count,), (1,), parameter.storage_offset() + first)
