"""The objects that may be registered: state that every worker holds whole, changed by one dense gradient per step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import SyncBatchNorm
from torch.optim.lr_scheduler import LRScheduler

from elastic.errors import ConfigError, NotCarried

_WRAPPERS = {"DistributedDataParallel"}
_SHARDED = {"FullyShardedDataParallel", "FSDPModule"}


def unwrapped(thing: Any) -> Any:
    """The object without torch.compile's wrapper, and without a library's wrapper around an optimizer or a scheduler,
    such as accelerate's, if that adds no state."""
    thing = getattr(thing, "_orig_mod", thing)
    optimizer, scheduler = getattr(thing, "optimizer", None), getattr(thing, "scheduler", None)
    if isinstance(optimizer, torch.optim.Optimizer) and getattr(thing, "state", None) is optimizer.state:
        return unwrapped(optimizer)
    if isinstance(scheduler, LRScheduler) and hasattr(thing, "state_dict"):
        return unwrapped(scheduler) if thing.state_dict() == scheduler.state_dict() else thing
    return thing


def check_registrable(name: str, thing: object) -> None:
    """Raise ConfigError for an object without state, NotCarried for a kind that is not supported."""
    if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
        raise ConfigError(
            f"register({name}=...): a {type(thing).__name__} has no state_dict() and load_state_dict(); register "
            "models, optimizers and schedulers one by one, and put plain values into job.state"
        )
    if isinstance(thing, torch.optim.LBFGS | torch.optim.SparseAdam):
        raise NotCarried(
            f"{name} is {type(thing).__name__}, which needs more than one dense gradient a step; use another optimizer"
        )
    if isinstance(thing, nn.Module):
        for path, module in thing.named_modules():
            kinds = {base.__name__ for base in type(module).__mro__}
            where = ".".join(part for part in (name, path) if part)
            if kind := kinds & _SHARDED:
                raise sharded(f"{where} is sharded by {kind.pop()}")
            if kind := kinds & _WRAPPERS:
                raise NotCarried(
                    f"{where} is wrapped in {kind.pop()}; register the plain module, the job reduces gradients"
                )
            if isinstance(module, SyncBatchNorm):
                raise NotCarried(
                    f"{where} is a SyncBatchNorm, whose statistics depend on the world; use BatchNorm, each shard "
                    "normalises by itself and the running statistics are merged"
                )


def sharded(what: str) -> NotCarried:
    """The error for a tensor or a module of which each worker has a part only."""
    return NotCarried(
        f"{what}, and state that is sharded over workers is not carried yet: every worker of a job holds the whole "
        "model and the whole optimizer. Leave fully_shard(), FullyShardedDataParallel and distribute_module() out"
    )
