"""What the script's optimizers, schedulers, scalers and averages do not do in a silent turn, and who sees them made.

All is done on classes: what hangs on an instance of a scheduler would land in its state_dict().
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler, swa_utils

from runtime.ddp import mistakes
from runtime.ddp.rank_script import RankScript
from runtime.ddp.seams import Seams

_SHARDED = "ZeroRedundancyOptimizer"


def install(seams: Seams) -> None:
    """For what is made from now on."""
    seams.wrap(Optimizer, "__init__", functools.partial(_seen, seams, "optimizer", ("step",)))
    for scheduler in (
        lr_scheduler.LRScheduler,
        lr_scheduler.ReduceLROnPlateau,
        lr_scheduler.SequentialLR,
        lr_scheduler.ChainedScheduler,
    ):
        seams.wrap(scheduler, "__init__", functools.partial(_seen, seams, "scheduler", ("step",)))
    scaler = functools.partial(_seen, seams, "scaler", ("step", "update", "unscale_"))
    seams.wrap(torch.amp.GradScaler, "__init__", scaler)
    average = functools.partial(_seen, seams, "average", ("update_parameters",))
    seams.wrap(swa_utils.AveragedModel, "__init__", average)
    seams.wrap(torch, "save", _saved)


def _seen(seams: Seams, kind: str, methods: tuple[str, ...], original: Any) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        script = RankScript.current()
        if script is None or any(thing is self for thing in script.seen.get(kind, ())):
            return
        if any(base.__name__ == _SHARDED for base in type(self).__mro__):
            raise mistakes.not_in_place(_SHARDED, "Use the optimizer that it wraps.")
        if kind == "average":
            self.requires_grad_(False)
        script.made(kind, self)
        for method in methods:
            _hold_back(seams, type(self), method)

    return __init__


def _hold_back(seams: Seams, cls: type, name: str) -> None:
    """The method of a class, where that class or a base has it."""
    owner = next(base for base in cls.__mro__ if name in vars(base))
    if not hasattr(vars(owner)[name], "held_back"):
        seams.wrap(owner, name, _unless_silent)


def _unless_silent(original: Any) -> Any:
    @functools.wraps(original)
    def held(self: Any, *args: Any, **kwargs: Any) -> Any:
        script = RankScript.current()
        if script is None:
            return original(self, *args, **kwargs)
        if isinstance(self, Optimizer) and (args or kwargs.get("closure") is not None):
            raise mistakes.not_in_place("optimizer.step(closure)", "Call backward() in the loop, and step() behind it.")
        if script.holds_back(self, original.__name__):
            return None
        result = original(self, *args, **kwargs)
        if isinstance(self, Optimizer | torch.amp.GradScaler):
            script.stepped()
        return result

    held.held_back = True  # type: ignore[attr-defined]
    return held


def _saved(original: Any) -> Any:
    """A newcomer that passes by old epochs would overwrite good files with weights that it has not got yet."""

    @functools.wraps(original)
    def save(*args: Any, **kwargs: Any) -> None:
        script = RankScript.current()
        if script is None or not (script.silent or script.passing):
            original(*args, **kwargs)

    return save
