"""DistributedDataParallel without its reducer: the module itself, whose gradients are reduced at the end of a turn.

C10D's reducer divides early, adds in the order of arrival, and cannot give a rank back, so it is never made. The class
stays the same, for `isinstance` and for who has imported it already; its methods are replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from runtime.data.loader import to_device
from runtime.ddp import mistakes
from runtime.ddp.rank_script import RankScript
from runtime.ddp.seams import Seams


def install(seams: Seams) -> None:
    """For models that are wrapped from now on, in threads that have a script."""
    for name, replacement in _METHODS.items():
        seams.wrap(DistributedDataParallel, name, replacement)


def _init(
    script: RankScript,
    original: Any,
    self: Any,
    /,
    module: nn.Module,
    device_ids: Any = None,
    output_device: Any = None,
    dim: int = 0,
    broadcast_buffers: bool | None = None,
    init_sync: bool = True,
    process_group: Any = None,
    **kwargs: Any,
) -> None:
    if not dist.is_initialized():
        raise ValueError("Default process group has not been initialized, please make sure to call init_process_group.")
    nn.Module.__init__(self)
    self.module = module
    self.device_ids = device_ids
    self.output_device = output_device
    self.process_group = process_group or torch.distributed.group.WORLD
    self.broadcast_buffers = broadcast_buffers if broadcast_buffers is not None else True
    self.find_unused_parameters = bool(kwargs.get("find_unused_parameters", False))
    self.static_graph = bool(kwargs.get("static_graph", False))
    self.require_backward_grad_sync = True
    self.device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    script.made("model", module)
    script.objects.wrapped.append(self)
    script.frames.add_model(module)


def _forward(script: RankScript, original: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    _note_forward(self.require_backward_grad_sync)
    if self.device_ids:
        args, kwargs = to_device(args, self.device), to_device(kwargs, self.device)
    return self.module(*args, **kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _note_forward(reduces: bool) -> None:
    script = RankScript.current()
    if script is not None and torch.is_grad_enabled():
        script.forward(reduces=reduces)


@contextmanager
def _no_sync(script: RankScript, original: Any, self: Any) -> Iterator[None]:
    before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
    try:
        yield
    finally:
        self.require_backward_grad_sync = before


@contextmanager
def _join(script: RankScript, original: Any, self: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
    """Ranks have equally many batches here."""
    yield


def _train(script: RankScript, original: Any, self: Any, mode: bool = True) -> Any:
    return nn.Module.train(self, mode)


def _ignored(*args: Any, **kwargs: Any) -> None:
    """It speaks of the reducer."""


def _logging_data(*args: Any) -> dict[str, Any]:
    """Lightning asks for it when it ends, also behind an exception, which another one would hide."""
    return {}


def _comm_hook(*args: Any, **kwargs: Any) -> None:
    advice = "Gradients are reduced along a fixed tree; for fewer bytes use --compression of elastic run."
    raise mistakes.not_in_place("register_comm_hook()", advice)


_METHODS: dict[str, Callable[..., Any]] = {
    "__init__": _init,
    "forward": _forward,
    "no_sync": _no_sync,
    "join": _join,
    "train": _train,
    "register_comm_hook": _comm_hook,
    "_set_static_graph": _ignored,
    "_get_ddp_logging_data": _logging_data,
    "__getstate__": lambda script, original, self: dict(self.__dict__),
    "__setstate__": lambda script, original, self, state: self.__dict__.update(state),
}
