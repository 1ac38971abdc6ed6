"""What the script's optimizers, schedulers, scalers and averages do not do in a silent turn, and who sees them made.

All is done on classes: what hangs on an instance of a scheduler would land in its state_dict().
"""

from __future__ import annotations

import builtins
import logging
import os
import shutil
import sys
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler, swa_utils

from runtime.frontends.ddp import mistakes
from runtime.frontends.ddp.rank_script import RankScript, Turn
from runtime.frontends.ddp.seams import Seams

_SHARDED = "ZeroRedundancyOptimizer"
_OF_FILES = (
    (os, ("link", "remove", "rename", "replace", "symlink", "unlink")),
    (shutil, ("copy", "copy2", "copyfile", "move")),
)
"""Functions whose first argument is a file that was saved before."""

_ENDING = {"move", "remove", "rename", "replace", "unlink"}
"""Those of them behind which there is no file of that name."""


def install(seams: Seams) -> None:
    """For what is made from now on."""
    seams.wrap(Optimizer, "__init__", _seen(seams, "optimizer", "step"))
    for scheduler in (
        lr_scheduler.LRScheduler,
        lr_scheduler.ReduceLROnPlateau,
        lr_scheduler.SequentialLR,
        lr_scheduler.ChainedScheduler,
    ):
        seams.wrap(scheduler, "__init__", _seen(seams, "scheduler", "step"))
    seams.wrap(torch.amp.GradScaler, "__init__", _seen(seams, "scaler", "step", "update", "unscale_"))
    seams.wrap(swa_utils.AveragedModel, "__init__", _seen(seams, "average", "update_parameters"))
    seams.wrap(nn.Module, "load_state_dict", _taken_back)
    seams.wrap(torch, "save", _saved)
    seams.wrap(torch, "load", _loaded)
    seams.wrap(builtins, "print", _unless_mute)
    seams.wrap(logging.Logger, "handle", _logged)
    for module, names in _OF_FILES:
        for name in names:
            seams.wrap(module, name, _handled)


def _seen(seams: Seams, kind: str, *methods: str) -> Any:
    def made(script: RankScript, original: Any, self: Any, /, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if script.objects.has(kind, self):
            return
        if any(base.__name__ == _SHARDED for base in type(self).__mro__):
            raise mistakes.not_in_place(_SHARDED, "Use the optimizer that it wraps.")
        if kind == "average":
            self.requires_grad_(False)
        script.made(kind, self)
        for method in methods:
            _hold_back(seams, type(self), method)

    return made


def _hold_back(seams: Seams, cls: type, name: str) -> None:
    """The method of a class, where that class or a base has it."""
    owner = next(base for base in cls.__mro__ if name in vars(base))
    if not hasattr(vars(owner)[name], "held_back"):
        seams.wrap(owner, name, _unless_silent)
        vars(owner)[name].held_back = True


def _unless_silent(script: RankScript, original: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    closure = isinstance(self, Optimizer) and any(given is not None for given in (*args, *kwargs.values()))
    if closure and script.turn is not Turn.ELSEWHERE:
        raise mistakes.not_in_place("optimizer.step(closure)", "Call backward() in the loop, and step() behind it.")
    if script.holds_back(self, original.__name__):
        return None
    result = original(self, *args, **kwargs)
    if isinstance(self, Optimizer | torch.amp.GradScaler):
        script.stepped()
    return result


def _unless_mute(script: RankScript, original: Any, /, *args: Any, **kwargs: Any) -> None:
    """A line comes once for each step, and not once for each rank of this worker. But an exception that the script
    handles may be why it ends, and then no other turn says so."""
    if not script.mute or sys.exception() is not None:
        original(*args, **kwargs)


def _logged(script: RankScript, original: Any, self: logging.Logger, record: logging.LogRecord) -> None:
    """An error may be of one rank's batch only, and be logged when its exception is over."""
    if record.levelno >= logging.ERROR:
        original(self, record)
    else:
        _unless_mute(script, original, self, record)


def _taken_back(script: RankScript, original: Any, self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Raises ConfigError for weights that a newcomer has copied before it had those of the others."""
    script.objects.check_not_missed(args[0] if args else kwargs.get("state_dict"))
    return original(self, *args, **kwargs)


def _saved(script: RankScript, original: Any, /, *args: Any, **kwargs: Any) -> None:
    """An examination writes no file: the next run would take a snapshot of a few steps for a real one.

    A newcomer that passes by old epochs would overwrite good files with weights that it has not got yet. A script that
    finds a snapshot of its own begins behind it, so a file that is saved between two epochs asks for a checkpoint of
    the next epoch's beginning: the newest one must not be older than the snapshot.
    """
    file = args[1] if len(args) > 1 else kwargs.get("f")
    path = _path_of(file)
    if script.silent or script.passing or (path is not None and script.training.examiner is not None):
        script.objects.unsaved.add(path)
        return
    script.objects.unsaved.discard(path)
    script.objects.check_not_missed(args[0] if args else kwargs.get("obj"))
    original(*args, **kwargs)
    script.training.checkpoints.wish()


def _handled(script: RankScript, original: Any, /, *args: Any, **kwargs: Any) -> Any:
    """What a script does next with a file that it has saved: it makes a copy of the best one, or gives it its name. It
    is not there if it was not saved, and neither is the copy."""
    unsaved = script.objects.unsaved
    file = args[0] if args else kwargs.get("src", kwargs.get("path"))
    copy = args[1] if len(args) > 1 else kwargs.get("dst")
    source, made = _path_of(file), _path_of(copy)
    if source is not None and made is not None and os.path.isdir(made) and original.__module__ == shutil.__name__:
        made = os.path.join(made, os.path.basename(source))
    if source is None or source not in unsaved:
        result = original(*args, **kwargs)
        unsaved.discard(made)
        return result
    if original.__name__ in _ENDING:
        unsaved.discard(source)
    if made is not None:
        unsaved.add(made)
    return copy


def _path_of(file: object) -> str | None:
    return os.path.abspath(file) if isinstance(file, str | os.PathLike) else None


def _loaded(script: RankScript, original: Any, /, *args: Any, **kwargs: Any) -> Any:
    """A snapshot that the script still has in a variable is no average of the weights."""
    found = original(*args, **kwargs)
    if isinstance(found, dict) and not script.begun:
        script.loaded.append(found)
    return found
