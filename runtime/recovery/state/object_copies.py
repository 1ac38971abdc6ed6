"""The state of one registered object, of a module or another: encoded, loaded, and compared with that of a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from runtime.allreduce.reduction.buffers import described
from runtime.allreduce.reduction.partial_sum import Json
from runtime.recovery.state import encoding

_COMPILED = "_orig_mod."


def plain_name(path: str) -> str:
    """Without what torch.compile adds to it."""
    return path.replace(_COMPILED, "").removesuffix(_COMPILED[:-1]).rstrip(".")


def encoded(
    name: str,
    thing: Any,
    numbered: list[encoding.NamedTensor],
    bases: Mapping[int, torch.Tensor],
    is_training: Callable[[nn.Module], bool],
) -> Json:
    """The entry of an object in the header of a copy; its tensors are added to numbered. bases: by the address of a
    buffer, what it was when the pass began. is_training: of a module's part, whether it was in training mode then."""
    state = thing.state_dict()
    if not isinstance(thing, nn.Module):
        return {"state": encoding.encode(state, name, numbered)}

    def at_start(value: object) -> object:
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            return value
        base = bases.get(value.data_ptr())
        return base if base is not None and _kind(base) == _kind(value) else value

    tensors: dict[str, object] = {plain_name(path): at_start(value) for path, value in state.items()}
    left_out: dict[str, object] = {path: at_start(value) for path, _, _, value in nonpersistent(thing)}
    evaluating: list[Json] = [plain_name(path) for path, part in thing.named_modules() if not is_training(part)]
    fixed: list[Json] = [plain_name(path) for path, value in thing.named_parameters() if not value.requires_grad]
    return {
        "state": encoding.encode(tensors, name, numbered, sharing=False),
        "evaluating": evaluating,
        "fixed": fixed,
        "nonpersistent": encoding.encode(left_out, name, numbered, sharing=False),
    }


def load_module(module: nn.Module, state: dict[str, Any], entry: dict[str, Json]) -> None:
    own = {path: state[plain_name(path)] for path in module.state_dict()}
    module.load_state_dict(own, strict=True)
    evaluating = set(cast(list[str], entry["evaluating"]))
    for path, part in module.named_modules():
        part.training = plain_name(path) not in evaluating
    fixed = set(cast(list[str], entry["fixed"]))
    for path, parameter in module.named_parameters():
        parameter.requires_grad_(plain_name(path) not in fixed)


def load_nonpersistent(module: nn.Module, values: dict[str, Any]) -> None:
    """Load buffers that state_dict() leaves out, in place if possible. values: by the path of each; others stay."""
    for path, owner, key, live in nonpersistent(module):
        if path not in values:
            continue
        value = values[path]
        if value is None or live is None or _kind(live) != _kind(value) or torch._debug_has_internal_overlap(live) == 1:
            near = live if live is not None else next(module.parameters(), value)
            owner._buffers[key] = None if value is None else value.to(near.device)
            continue
        with torch.no_grad():
            live.copy_(value)


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load an optimizer. `load_state_dict` casts state to its parameter's dtype, so the donor's is restored."""
    optimizer.load_state_dict(state)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, saved in state.get("state", {}).items():
        # Under other keys torch leaves all as it is; one with a load_state_dict of its own may have it elsewhere
        if isinstance(number, int) and number < len(parameters) and parameters[number] in optimizer.state:
            optimizer.state[parameters[number]] = _as_saved(saved, optimizer.state[parameters[number]])


def _as_saved(saved: Any, loaded: Any) -> Any:
    """What was loaded, with the dtypes of what was saved, also in dicts, lists and tuples."""
    if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return saved.to(loaded.device) if loaded.dtype != saved.dtype else loaded
    if isinstance(saved, dict) and isinstance(loaded, dict):
        loaded.update({key: _as_saved(value, loaded[key]) for key, value in saved.items() if key in loaded})
    elif type(saved) in (list, tuple) and type(saved) is type(loaded):
        return type(saved)(map(_as_saved, saved, loaded))
    return loaded


def check_module(name: str, module: nn.Module, entry: dict[str, Json], there: dict[str, Any]) -> None:
    """Raise ValueError unless the module can load this entry of a copy's header. there: its decoded state."""
    if "evaluating" not in entry:
        raise ValueError(f"{name} is no module in it")
    here = {plain_name(path): value for path, value in module.state_dict().items()}
    if there.keys() != here.keys():
        raise ValueError(f"{name} differs in {', '.join(sorted(there.keys() ^ here.keys()))}")
    left_out = {path for path, *_ in nonpersistent(module)}
    left_out_there = cast(dict[str, Json], entry["nonpersistent"]).keys()
    if left_out_there != left_out:
        raise ValueError(f"{name} differs in {', '.join(sorted(left_out_there ^ left_out))}")
    for path, value in here.items():
        if _kind(value) != _kind(there[path]):
            raise ValueError(f"{name}.{path} is {_kind(value)} here and {_kind(there[path])} in the copy")


def check_optimizer(name: str, optimizer: torch.optim.Optimizer, there: dict[str, Any]) -> None:
    """The same for an optimizer."""
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    sizes_there = [len(group["params"]) for group in there["param_groups"]]
    if sizes != sizes_there:
        raise ValueError(f"{name} has groups of {sizes} parameters here and {sizes_there} in the copy")


def nonpersistent(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor | None]]:
    """(path, owner, key, value) of the buffers that state_dict() leaves out."""
    for path, owner in module.named_modules():
        for key in [key for key in owner._buffers if key in owner._non_persistent_buffers_set]:
            yield plain_name(f"{path}.{key}".lstrip(".")), owner, key, owner._buffers[key]


def _kind(value: object) -> str:
    return described(value.dtype, value.shape) if isinstance(value, torch.Tensor) else "a plain value"
