"""A copy of the training state: everything registered, and job.state.

A newcomer that loads a copy computes the same bits as its donor from there on. The copy is a JSON header and raw bytes
(see encoding.py). Loading writes into the objects that the script holds; no object is replaced.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from elastic.checkpoints.description import STATE_FORMAT, described_tensors
from elastic.errors import ConfigError
from runtime.allreduce.reduction.buffers import Modes
from runtime.allreduce.reduction.flat_pool import CPU
from runtime.allreduce.reduction.partial_sum import Json
from runtime.recovery.state import encoding, object_copies, state_digests
from runtime.recovery.state.change_detection import StateMarks, differences, tensor_mark, value_sum, version_of
from runtime.recovery.state.host_bytes import StreamMark
from runtime.recovery.state.registered import NamedParameter, RegisteredObjects
from runtime.recovery.state.script_state import Values, encode_value

__all__ = ["Carrier", "Values"]


class Carrier(RegisteredObjects):
    """The registered objects and job.state, of which copies are made and loaded here; compared and watched, too."""

    def __init__(self, values: Values, device: torch.device = CPU) -> None:
        """device: this worker's."""
        super().__init__()
        self.values = values
        self._device = device
        self._undigested: set[str] = set()
        self._watched: list[NamedParameter] = []
        """The parameters that must not change inside a pass, under the names of their marks."""
        self.gpus: list[torch.device] = []
        """The GPUs on which it was when registration ended, this worker's or none in most jobs."""
        self._settled = threading.Event()
        self._settled.set()
        self._unsettled = 0
        self._held: tuple[dict[str, Json], list[encoding.NamedTensor]] | None = None
        self.modes = Modes(lambda: (part for _, part in self.named_modules()))
        """The modes of the registered modules, and during a pass those with which it began."""

    def leave_undigested(self, *names: str) -> None:
        """Leave objects or tensors with these names, which are copied, out of digests: they may differ between workers,
        and between runs."""
        self._undigested.update(names)

    def renew(self) -> None:
        """Forget what is registered: another training loop begins, which trains other objects."""
        RegisteredObjects.__init__(self)

    def freeze(self) -> None:
        if self._frozen:
            return
        super().freeze()
        merged = self.merged()
        self._watched = [(f"parameter {name}", parameter) for name, parameter in self._parameters if name not in merged]
        _, tensors = self.describe()
        self.gpus = list(dict.fromkeys(tensor.device for _, tensor in tensors if tensor.is_cuda))

    def place(self, kind: str) -> torch.device:
        """The device of a tensor here that was on a device of this type at its donor."""
        return encoding.device_for(kind, self._device)

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

    def hold(self, bases: Mapping[int, torch.Tensor]) -> None:
        """Until `release`, copies are of this moment. bases: by the address of each tensor that will change meanwhile
        and is no buffer of the pass, a copy of it."""
        header, tensors = self.describe()
        self._held = header, [(path, bases.get(tensor.data_ptr(), tensor)) for path, tensor in tensors]

    def release(self) -> None:
        """Copies are of the state as it is."""
        self._held = None

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
        if self._held is not None:
            return self._held
        tensors: list[encoding.NamedTensor] = []
        # By address: a tensor with two names in a module is in its state_dict() twice.
        bases = {
            buffer.live.data_ptr(): buffer.base
            for buffer in (*self._floats, *self._integers)
            if buffer.base is not None
        }
        objects: dict[str, Json] = {
            name: object_copies.encoded(name, thing, tensors, bases, self.modes.training)
            for name, thing in self._objects.items()
        }
        state: dict[str, Json] = {
            key: encode_value(key, value, tensors) for key, value in self.values.as_dict().items()
        }
        entries: list[Json] = [_entry(path, tensor) for path, tensor in tensors]
        header: dict[str, Json] = {"format": STATE_FORMAT, "tensors": entries, "objects": objects, "state": state}
        return header, tensors

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

        @functools.cache  # what several parameters share, such as a counter of steps, stays shared
        def tensor(i: int) -> torch.Tensor:
            return encoding.laid_out(tensors[i], entries[i]["strides"], devices[i])

        devices = [self.place(entry["device"]) for entry in entries]
        decoded = {name: encoding.decode(entry["state"], tensors.__getitem__) for name, entry in objects.items()}
        values = encoding.decode(header["state"], tensor)
        try:
            for name, thing in self._objects.items():
                if isinstance(thing, nn.Module):
                    object_copies.load_module(thing, decoded[name], objects[name])
                    object_copies.load_nonpersistent(thing, encoding.decode(objects[name]["nonpersistent"], tensor))
                elif isinstance(thing, torch.optim.Optimizer):
                    object_copies.load_optimizer(thing, encoding.decode(objects[name]["state"], tensor))
                else:
                    thing.load_state_dict(encoding.decode(objects[name]["state"], tensor))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"{name} refuses the state that is to be loaded: {error!r}") from error
        for buffer in (*self._floats, *self._integers):
            if buffer.base is not None:
                buffer.base = buffer.live.detach().clone()
        self.modes.loaded()
        self.values.replace(values)

    def state_of(self, name: str, header: dict[str, Json], blobs: Sequence[torch.Tensor]) -> dict[str, Any]:
        """The state of one object in a copy, on the CPU; nothing is loaded. Raises ConfigError if it is not there."""
        tensors = self._tensors(header, blobs)
        try:
            entry = cast(dict[str, dict[str, Json]], header["objects"])[name]
            return cast(dict[str, Any], encoding.decode(entry["state"], tensors.__getitem__))
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"a copy of the state has no {name}, or a malformed one: {error!r}") from error

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
            for name, module in self.modules().items():
                object_copies.check_module(name, module, objects[name], decoded[name])
            for name, optimizer in self.optimizers().items():
                object_copies.check_optimizer(name, optimizer, decoded[name])
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"a copy of the state does not fit this script: {error}") from error

    def _tensors(self, header: dict[str, Json], blobs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        try:
            pairs = zip(described_tensors(header), blobs, strict=True)
            return [encoding.from_blob(blob, tensor.dtype, tensor.shape) for tensor, blob in pairs]
        except ValueError as error:
            raise ConfigError(f"a copy of the state does not fit this script: {error}") from error

    # Comparing

    def digest(self, copy: tuple[dict[str, Json], Sequence[torch.Tensor]] | None = None) -> str:
        """SHA-256, in hex, over (name, dtype, shape, bytes) of all registered state and job.state in name order.

        Plain values count as (name, value) with floats in their shortest repr. Tensors count in row-major order. copy:
        what `capture` returned, of which it is then.
        """
        return state_digests.digest(self._leaves(copy))

    def digests(self) -> dict[str, str]:
        """Name -> digest of each leaf, cut to 16 hex digits, in the order of registration."""
        return state_digests.digests(self._leaves())

    def checksums(self) -> dict[str, str]:
        """Registered object -> checksum of its state at the moment, during a pass of that when the pass began."""
        return state_digests.checksums(self._leaves())

    def _leaves(self, copy: tuple[dict[str, Json], Sequence[torch.Tensor]] | None = None) -> list[state_digests.Leaf]:
        if copy is None:
            header, named = self.describe()
            copy = header, [tensor for _, tensor in named]
        return state_digests.leaves(*copy, self._undigested)

    def fingerprint(self, step: int) -> str:
        """A short hash, in hex, of learning rates, job.state without tensors, and a part of the parameters and of
        job.state's tensors; the part rotates with the step.

        Workers that have drifted apart soon differ in it; it reads some kilobytes, however large the model.
        """
        hashed = hashlib.blake2b(digest_size=8)
        state_digests.hash_some(hashed, [parameter for _, parameter in self._parameters], step)
        tensors: list[encoding.NamedTensor] = []
        state = {key: encode_value(key, value, tensors) for key, value in self.values.as_dict().items()}
        hashed.update(json.dumps([self.learning_rates(), state], sort_keys=True).encode())
        state_digests.hash_some(hashed, [tensor for _, tensor in tensors], step, rows=True)
        return hashed.hexdigest()

    def buffer_fingerprint(self, step: int) -> str:
        """The same for the buffers of the registered modules, also those that state_dict() leaves out."""
        hashed = hashlib.blake2b(digest_size=8)
        live = [owner._buffers.get(key) for owner, key in self._buffers]
        state_digests.hash_some(hashed, [tensor for tensor in live if tensor is not None], step, rows=True)
        return hashed.hexdigest()

    def watch(self, *, full: bool = False) -> StateMarks:
        """Marks of all that must not change inside a pass. full: with a checksum of all values, which reads them."""
        merged = self.merged()
        marks: dict[str, object] = {
            name: (
                parameter.requires_grad,
                version_of(parameter),
                parameter.data_ptr(),
                value_sum(parameter) if full else 0,
            )
            for name, parameter in self._watched
        }
        for name, _, _, tensor in self.named_buffers():
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


def _nothing(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="meta")


def _entry(path: str, tensor: torch.Tensor) -> dict[str, Json]:
    return {
        "name": path,
        "dtype": encoding.dtype_name(tensor),
        "shape": list[Json](tensor.shape),
        "strides": encoding.strides_of(tensor),
        "nbytes": tensor.nbytes,
        "device": tensor.device.type,
    }
