"""What a callback keeps that plain_state.plain_attributes leaves out: modules, such as an average of the weights or a
reference model that follows them; lists and dictionaries with long tensors; and objects of a user's own with such.

A callback changes them between steps. So they are told as they are, without a copy: who copies the weights while ranks
are computed copies them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from elastic.errors import ConfigError
from runtime.frontends.frameworks.plain_state import is_plain, plain_attributes

LIBRARIES = frozenset(
    (
        *("builtins", "functools", "torch", "transformers", "accelerate", "datasets", "tokenizers", "peft", "trl"),
        *("lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics", "runtime"),
    )
)
"""Packages of objects whose attributes are not looked at."""
ANY_LENGTH = 1 << 62

Told = dict[str, dict[str, Any]]
"""{"values": {name: value}, "modules": {name: {name of a tensor: tensor}}, "objects": {name: Told}}, of attributes."""
NOTHING: Told = {"values": {}, "modules": {}, "objects": {}}


def addresses(model: nn.Module) -> set[int]:
    """Where its tensors lie."""
    return {tensor.data_ptr() for tensor in chain(model.parameters(), model.buffers()) if is_strided(tensor)}


def is_strided(thing: Any) -> bool:
    """Whether it is a tensor of torch's own class that has memory."""
    return (
        type(thing) in (torch.Tensor, nn.Parameter)
        and thing.layout is torch.strided
        and thing.device.type != "meta"
        and thing.numel() > 0
    )


def told(owner: object, model: nn.Module | None, *, without: Collection[object] = ()) -> Told:
    """What an object keeps besides tensors of the model, also in objects in its attributes. without: modules that are
    carried in another way."""
    apart = [model, *without]
    own: set[int] | None = None

    def of_model(tensor: torch.Tensor) -> bool:
        nonlocal own
        if own is None:  # most callbacks keep nothing that has to be compared
            own = set() if model is None else addresses(model)
        return tensor.data_ptr() in own

    found = _own(owner, apart, of_model)
    for name, value in list(vars(owner).items()):
        if hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] not in LIBRARIES:
            if isinstance(value, nn.Module):
                continue
            below = _own(value, apart, of_model)
            if any(below.values()):
                below["values"].update(plain_attributes(value))
                found["objects"][name] = below
    return found


def _own(owner: object, apart: Sequence[object], of_model: Callable[[torch.Tensor], bool]) -> Told:
    """What it keeps itself."""
    found: Told = {"values": {}, "modules": {}, "objects": {}}
    for name, value in list(vars(owner).items()):
        if any(value is other for other in apart) or is_plain(value):
            continue
        if isinstance(value, nn.Module):
            tensors = {key: t.detach() for key, t in _named(value) if is_strided(t) and not of_model(t)}
            if tensors:
                found["modules"][name] = tensors
        elif is_plain(value, ANY_LENGTH) and not any(map(of_model, _tensors(value))):
            found["values"][name] = _by_reference(value)
    return found


class CallbackTensors:
    """Long tensors when a step was handed out. A newcomer goes through the whole step, so it must not have what
    callbacks do before the gradients: on_step_begin(), or what stands behind the first of several batches of a step.
    """

    def __init__(self) -> None:
        self._noted: list[tuple[str, Told, list[int]]] = []
        self._quiet: set[str] = set()
        """Callbacks that were seen to do nothing there: their tensors are told without a copy."""
        self._copied: set[str] = set()
        """Callbacks that were seen to change tensors there."""

    def note(self, callbacks: Iterable[tuple[str, Told]]) -> list[Told]:
        """A step is handed out. callbacks: the name of each, and what `told` has told. Returns what others get."""
        callbacks = list(callbacks)
        self._noted = [(name, long, _versions(long)) for name, long in callbacks if any(long.values())]
        return [long if name in self._quiet else deepcopy(long) for name, long in callbacks]

    def look(self) -> None:
        """The gradients are about to be computed. Raises ConfigError for a callback that changes tensors before them in
        this step, and has not in others."""
        for name, long, versions in self._noted:
            if _versions(long) == versions:
                self._quiet |= {name} - self._copied
            elif name not in self._quiet:
                self._copied.add(name)
            else:
                raise ConfigError(
                    f"callback {name} changes tensors between the beginning of this step and its gradients, and has "
                    "not in steps before: a worker that joins would change them twice. Change them behind the step, as "
                    "in on_step_end() or on_train_batch_end()"
                )


def put_back(owner: object, found: Told, where: str, *, strict: bool) -> None:
    """Give an object what `told` has told of another. where: how an error calls the object. strict: raise ConfigError
    for what is not there yet, or has other tensors; if not, it is left as it is."""
    put: list[Callable[[], None]] = []
    for name, value in found["values"].items():
        put.append(partial(setattr, owner, name, deepcopy(value)))
    for name, tensors in found["modules"].items():
        module = getattr(owner, name, None)
        here = dict(_named(module)) if isinstance(module, nn.Module) else {}
        if all(key in here and here[key].shape == tensor.shape for key, tensor in tensors.items()):
            put.append(partial(_fill, here, tensors))
        elif strict:
            raise _refusal(where, name)
    for fill in put:
        fill()
    for name, below in found["objects"].items():
        if hasattr(thing := getattr(owner, name, None), "__dict__"):
            put_back(thing, below, f"{name} of {where}", strict=strict)
        elif strict:
            raise _refusal(where, name)


def _versions(found: Told) -> list[int]:
    """Numbers that grow when a tensor is changed in place."""
    tensors = [*_tensors(found["values"]), *_tensors(found["modules"])]
    below = [number for inner in found["objects"].values() for number in _versions(inner)]
    return [*(0 if tensor.is_inference() else tensor._version for tensor in tensors), *below]


def _named(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from chain(module.named_parameters(), module.named_buffers())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _by_reference(value: Any) -> Any:
    """A copy of the lists and dictionaries, with the tensors themselves."""
    return deepcopy(value, {id(tensor): tensor.detach() for tensor in _tensors(value)})


def _fill(here: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for key, tensor in tensors.items():
            here[key].copy_(tensor)


def _refusal(where: str, name: str) -> ConfigError:
    return ConfigError(
        f"{name} of {where} has tensors in the other workers, or in the checkpoint, and is another, or not there, in "
        "this worker: make it in __init__(), or when training begins, in all workers, from the same model"
    )
