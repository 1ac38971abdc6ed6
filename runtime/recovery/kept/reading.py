"""The state of a script's objects, read behind each step.

Most models and optimizers have the same tensors as behind the step before, in the same places, with other values. That
is seen in less than a microsecond for each tensor, where a state_dict() and what is made of it take ten and more. So
what is the same is not made anew. All other objects are asked for their state_dict() each time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import nn

from runtime import torch_names
from runtime.recovery.kept.content import (
    CurrentState,
    StateOfObject,
    is_distributed,
    object_state,
    parameters_of,
    text_of,
)
from runtime.recovery.state.encoding import NamedTensor, encode

Facts: TypeAlias = "tuple[list[object], list[object]]"
"""What has to be the same objects, and what has to be equal, as long as a state_dict() has the same tensors."""
_CONSTANT = (int, float, bool, str, type(None))
_FSDP2 = "torch.distributed.fsdp._fully_shard."


class StateReader:
    """Reads the state of the same objects again and again."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        torch_names.check(torch_names.OF_KEPT)
        self._objects = objects
        self._watched: dict[str, _Watched] = {}

    def read(self) -> CurrentState:
        """As state_of(). An object with the same tensors as before has the same tuple of pieces. Raises NotCarried."""
        parts: list[StateOfObject] = []
        first = 0
        for name, one in self._objects.items():
            watched = self._watched.pop(name, None)
            part = watched.again(first) if watched is not None else None
            if part is None:
                part = object_state(name, one, first)
                watched = _watched(one, part)
            if watched is not None:
                self._watched[name] = watched
            parts.append(part)
            first += len(part.pieces)
        return CurrentState(tuple(parts))


class _Watched:
    """An object whose state was read."""

    def __init__(
        self,
        part: StateOfObject,
        holders: Sequence[torch.Tensor],
        facts: Callable[[], Facts],
        groups: _Groups | None = None,
    ) -> None:
        """holders: the tensors of the object, in the order of the pieces. groups: of an optimizer."""
        self._part, self._groups = part, groups
        self._facts, self._then = facts, facts()
        self._holders = holders
        sharded = [is_distributed(one) for one in holders]
        self._sharded = sharded if any(sharded) else None
        self._places = _Places([piece.tensor for piece in part.pieces])

    def again(self, first: int) -> StateOfObject | None:
        """The state now; None: it has to be made anew. first: the number of its first tensor."""
        if first != self._part.first or not self.is_same():
            return None
        if self._groups is not None:
            now = self._groups.now(self._part)
            if now is None:
                return None
            self._part = now
        return self._part

    def is_same(self) -> bool:
        """Whether the object has the tensors that the pieces are made of, in the same places."""
        same, equal = self._facts()
        then, were = self._then
        if equal != were or len(same) != len(then) or not all(map(operator.is_, same, then)):
            return False
        mine = self._holders
        if self._sharded is not None:
            mine = [one._local_tensor if sharded else one for one, sharded in zip(mine, self._sharded, strict=True)]  # type: ignore[attr-defined]
        return self._places.are_those_of(mine)


class _Groups:
    """The parameter groups of an optimizer, with options such as the learning rate, which change."""

    def __init__(self, one: torch.optim.Optimizer, plain: Any) -> None:
        self._one = one
        self._state, self._state_text = plain["state"], text_of(plain["state"])
        self._numbers = [group["params"] for group in plain["param_groups"]]
        self._options = ""
        """As they were last, without the numbers of parameters."""

    def now(self, part: StateOfObject) -> StateOfObject | None:
        """None: a tensor is among the options, or their names are no words."""
        every = self._one.param_groups
        options = [{key: value for key, value in group.items() if key != "params"} for group in every]
        tensors: list[NamedTensor] = []
        groups: Any = encode(options, f"{part.name}.param_groups", tensors)
        if tensors or any(name.startswith("__") for group in groups for name in group):
            return None
        if (text := text_of(groups)) == self._options:
            return part
        self._options = text
        for group, numbers in zip(groups, self._numbers, strict=True):
            group["params"] = numbers
        whole = f'{{"state":{self._state_text},"param_groups":{text_of(groups)}}}'
        return replace(part, plain={"state": self._state, "param_groups": groups}, text=whole)


def _watched(one: Any, part: StateOfObject) -> _Watched | None:
    """None: its state_dict() may be whatever it likes to be."""
    if isinstance(one, nn.Module):
        modules = list(one.modules())
        if not all(map(_is_plain, modules)):
            return None
        holders, found = list(one.state_dict(keep_vars=True).values()), lambda: _of_modules(modules)
        watched = _Watched(part, holders, found) if _are_tensors(holders, part) else None
    elif isinstance(one, torch.optim.Optimizer) and _is_plain_optimizer(one):
        values = [value for state in one.state.values() for value in state.values()]
        holders = [value for value in values if isinstance(value, torch.Tensor)]
        plain: Any = part.plain
        if not _are_tensors(holders, part) or any("params" not in group for group in plain["param_groups"]):
            return None  # an option whose name is no word changes how groups are written
        watched = _Watched(part, holders, lambda: _of_optimizer(one), _Groups(one, plain))
    else:
        return None
    return watched if watched is not None and watched.is_same() else None


def _are_tensors(holders: Sequence[object], part: StateOfObject) -> bool:
    """Whether they are as many as the pieces, and of the kinds whose bytes are where they say."""
    kinds = (torch.Tensor, nn.Parameter)
    here = [one._local_tensor if is_distributed(one) else one for one in holders]  # type: ignore[attr-defined]
    return len(here) == len(part.pieces) and all(type(one) in kinds for one in here)


def _is_plain(one: nn.Module) -> bool:
    """Whether its state_dict() is that of nn.Module itself."""
    kind, own = type(one), vars(one)
    return (
        kind.state_dict is nn.Module.state_dict
        and kind._save_to_state_dict is nn.Module._save_to_state_dict
        and kind.get_extra_state is nn.Module.get_extra_state
        and not own.keys() & {"state_dict", "get_extra_state"}
        and all(isinstance(own.get(name), dict) for name in ("_parameters", "_buffers", "_modules"))
        and not one._state_dict_hooks
        # That of FSDP2 puts shards in the place of whole parameters: where it has something to do, these are there.
        and all(hook.__module__.startswith(_FSDP2) for hook in one._state_dict_pre_hooks.values())
    )


def _is_plain_optimizer(one: torch.optim.Optimizer) -> bool:
    """Whether its state_dict() is that of Optimizer itself, and the state of each parameter is tensors and numbers."""
    known = set(parameters_of(one))
    return (
        type(one).state_dict is torch.optim.Optimizer.state_dict
        and "state_dict" not in vars(one)
        and not one._optimizer_state_dict_pre_hooks
        and not one._optimizer_state_dict_post_hooks
        and all(key in known and type(state) is dict for key, state in one.state.items())
        and all(
            isinstance(value, torch.Tensor) or type(value) in _CONSTANT
            for state in one.state.values()
            for value in state.values()
        )
    )


def _of_modules(modules: Sequence[nn.Module]) -> Facts:
    same: list[object] = []
    equal: list[object] = []
    for one in modules:
        for held in (one._parameters, one._buffers, one._modules, one._state_dict_pre_hooks, one._state_dict_hooks):
            same.append(held)
            if held:
                same.extend(held.values())
                equal.extend(held)
        same.append(vars(one).get("state_dict"))
        if one._non_persistent_buffers_set:
            equal.extend(sorted(one._non_persistent_buffers_set))
    return same, equal


def _of_optimizer(one: torch.optim.Optimizer) -> Facts:
    same: list[object] = [one.state, one.param_groups, vars(one).get("state_dict")]
    equal: list[object] = []
    for parameter, state in one.state.items():
        same += (parameter, state)
        if type(state) is dict:
            same.extend(state.values())
            equal.extend(state)
    for group in one.param_groups:
        same.extend(group["params"])
        equal.append(len(group["params"]))
    same.extend(one._optimizer_state_dict_pre_hooks.values())
    same.extend(one._optimizer_state_dict_post_hooks.values())
    return same, equal


class _Places:
    """Where the elements of tensors are, and what they are."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._pointers = list(map(torch.Tensor.data_ptr, tensors))
        self._shapes = list(map(torch.Tensor.size, tensors))
        self._dtypes = [one.dtype for one in tensors]
        self._strides = None if all(map(torch.Tensor.is_contiguous, tensors)) else [one.stride() for one in tensors]
        """None: they follow from the shapes."""

    def are_those_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Shapes and strides are compared one by one: a list of a thousand new tuples takes longer to make."""
        return (
            list(map(torch.Tensor.data_ptr, tensors)) == self._pointers
            and all(map(operator.eq, map(torch.Tensor.size, tensors), self._shapes))
            and [one.dtype for one in tensors] == self._dtypes
            and (
                all(map(torch.Tensor.is_contiguous, tensors))
                if self._strides is None
                else all(map(operator.eq, map(torch.Tensor.stride, tensors), self._strides))
            )
        )
