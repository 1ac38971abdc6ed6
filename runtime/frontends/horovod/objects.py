"""What is broadcast and gathered besides tensors of the script: parameters, optimizers, Python objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from runtime.frontends.horovod.collectives import broadcast_
from runtime.frontends.horovod.current import global_process_set, here
from runtime.frontends.horovod.interrupts import BadArgument
from runtime.frontends.horovod.process_sets import ProcessSet
from runtime.frontends.horovod.world import Call


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """The values of rank root_rank in these: model.state_dict(), or a list of tensors or of (name, tensor).

    With logical ranks and in an elastic job, models are made alike when training begins, as rank 0's: another root_rank
    is refused there. Raises BadArgument for other params.
    """
    if isinstance(params, Mapping):
        pairs = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, torch.Tensor | str):
        pairs = [entry if isinstance(entry, tuple) else ("", entry) for entry in params]
    else:
        raise BadArgument(f"hvd.broadcast_parameters() of a {type(params).__name__}: give it model.state_dict()")
    tensors = [tensor for _, tensor in pairs if isinstance(tensor, torch.Tensor)]
    left = here("broadcast_parameters").will_be_alike(tensors)
    if len(left) < len(tensors) and root_rank != 0:
        raise BadArgument(f"hvd.broadcast_parameters(root_rank={root_rank}): the model is rank 0's here; write 0")
    now = {id(tensor) for tensor in left}
    for name, tensor in pairs:
        if id(tensor) in now:
            broadcast_(tensor, root_rank, name or None)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: object = None) -> None:
    """The state and the settings of rank root_rank in this optimizer. model: not looked at.

    With logical ranks and in an elastic job, optimizers are made alike when training begins. Raises BadArgument for
    LBFGS, as Horovod does.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise BadArgument("hvd.broadcast_optimizer_state() of LBFGS: its state cannot be sent; use another optimizer")
    if here("broadcast_optimizer_state").alike_at_start:
        return
    of_root = here("broadcast_optimizer_state").standing.rank == root_rank
    state = optimizer.state_dict()
    found = broadcast_object(_on_cpu(state) if of_root else state, root_rank, "optimizer")
    if not of_root:
        optimizer.load_state_dict(found)


def _on_cpu(state: Any) -> Any:
    """Each rank would load a tensor of a GPU on the GPU of the root's number, besides its own."""
    if isinstance(state, torch.Tensor):
        return state.cpu()
    if isinstance(state, dict):
        return {key: _on_cpu(value) for key, value in state.items()}
    return [_on_cpu(value) for value in state] if isinstance(state, list) else state


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The object of rank root_rank, on all ranks. In an elastic job: numbers, strings, lists, tuples, dicts, tensors;
    raises NotCarried there for others."""
    call = Call("broadcast_object", name, root=root_rank, group=process_set.group)
    world = here("broadcast_object")
    if root_rank not in process_set.ranks:
        raise BadArgument(f"hvd.broadcast_object(root_rank={root_rank}): the ranks are {process_set.ranks}")
    return world.broadcast_object(call, obj, root_rank)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """The object of each rank. Objects as of broadcast_object."""
    world = here("allgather_object")
    return world.gather_objects(Call("allgather_object", name, group=process_set.group), obj)
