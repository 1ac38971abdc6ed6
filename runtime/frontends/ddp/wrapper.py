"""DistributedDataParallel without its reducer: the module itself, whose gradients are reduced at the end of a turn.

C10D's reducer divides early, adds in the order of arrival, and cannot give a rank back, so it is never made. The class
stays the same, for `isinstance` and for who has imported it already; its methods are replaced.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from runtime.data.loader import to_device
from runtime.frontends.ddp import mistakes
from runtime.frontends.ddp.rank_script import RankScript
from runtime.frontends.ddp.seams import Seams

_SWITCHES = (
    "batched_grad_copy",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "lazy_bucket_allocation",
    "skip_all_reduce_unused_params",
    "static_graph",
)
"""Arguments about the memory and the work of the reducer. No value of a gradient depends on them."""

ARGUMENTS = {
    *_SWITCHES,
    *("module", "device_ids", "output_device", "dim", "process_group", "broadcast_buffers", "forward_sync_buffers"),
    # When and in how many messages the reducer sends. All ranks begin alike, and a mesh of a part of them is refused.
    *("init_sync", "bucket_cap_mb", "bucket_cap_mb_list", "check_reduction", "device_mesh"),
    *("delay_all_reduce_named_params", "param_to_hook_all_reduce"),
}
"""Arguments of the constructor that mean here what they mean in torch."""

INSTEAD = {"mixed_precision": "Use torch.autocast."}
"""Others -> what to do. One that is in neither is refused if it is not at its default."""


def install(seams: Seams) -> None:
    """For models that are wrapped from now on, in threads that have a script."""
    seams.wrap(torch.autograd, "backward", _backward)
    for name, replacement in METHODS.items():
        if hasattr(DistributedDataParallel, name):  # what is newer than 2.11 is not in every torch
            seams.wrap(DistributedDataParallel, name, replacement)


def _init(script: RankScript, original: Any, self: Any, /, *args: Any, **kwargs: Any) -> None:
    if not dist.is_initialized():
        raise ValueError("Default process group has not been initialized, please make sure to call init_process_group.")
    signature = inspect.signature(original)
    given = signature.bind(self, *args, **kwargs).arguments
    for name in given.keys() - {"self"} - ARGUMENTS:
        if given[name] != signature.parameters[name].default:
            instead = INSTEAD.get(name, "Leave it out: it is newer than this version of elastic-ring.")
            raise mistakes.not_in_place(f"DistributedDataParallel({name}=)", instead)
    nn.Module.__init__(self)
    self.module = module = given["module"]
    self.device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    self.device_type = self.device.type
    self.device_ids = given.get("device_ids")
    self.output_device = given.get("output_device")
    self.process_group = given.get("process_group") or torch.distributed.group.WORLD
    buffers = given.get("forward_sync_buffers")
    buffers = given.get("broadcast_buffers") if buffers is None else buffers
    self.broadcast_buffers = buffers if buffers is not None else True
    self.dim = given.get("dim", 0)
    for name in _SWITCHES:
        setattr(self, name, bool(given.get(name)))
    self.require_backward_grad_sync = self.require_forward_param_sync = True
    self.use_side_stream_for_tensor_copies = False
    self.modules_buffers = []  # that forward() sends to other ranks
    # As torch says that it has made no reducer, which its properties ask for.
    self._delay_all_reduce_all_params, self._require_manual_backward_finalization = True, False
    script.made("model", module)
    script.objects.wrapped.append(self)
    script.frames.add_model(module)


def _forward(script: RankScript, original: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    note_forward(self.require_backward_grad_sync)
    if self.device_ids:
        args, kwargs = to_device(args, self.device), to_device(kwargs, self.device)
    return self.module(*args, **kwargs)


def note_forward(reduces: bool) -> None:
    """A forward of a model begins. reduces: its backward ends in a reduction."""
    # Only where the compiler is there is it to be kept out: to tell it so imports it, which takes seconds.
    (_note_uncompiled if "torch._dynamo" in sys.modules else _note)(reduces)


def _note(reduces: bool) -> None:
    script = RankScript.current()
    if script is not None:
        script.evaluations.forwards += 1
        if torch.is_grad_enabled():
            script.forward(reduces=reduces)
        else:
            script.evaluations.without_gradients = True


_note_uncompiled = torch._disable_dynamo(_note)  # type: ignore[attr-defined]


def _backward(script: RankScript, original: Any, /, *args: Any, **kwargs: Any) -> None:
    """torch.autograd.backward, to which every spelling comes; also the nested ones of reentrant checkpointing, which
    end no turn."""
    if script.in_backward:
        original(*args, **kwargs)
        return
    script.before_backward()
    script.in_backward = True
    try:
        original(*args, **kwargs)
    finally:
        script.in_backward = False
    script.after_backward()


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


def _join_hook(*args: Any, **kwargs: Any) -> None:
    raise mistakes.not_in_place("Join([model])", "Leave it out: ranks have equally many batches here.")


def _manual_finalization(*args: Any) -> None:
    """Before `require_manual_backward_finalization = True` and in `finalize_backward()`, which torch has since 2.15."""
    advice = "Leave it and finalize_backward() out: gradients are whole at the end of the backward() of a step."
    raise mistakes.not_in_place("require_manual_backward_finalization", advice)


METHODS: dict[str, Callable[..., Any]] = {
    "__init__": _init,
    "forward": _forward,
    "no_sync": _no_sync,
    "join": _join,
    "train": _train,
    "register_comm_hook": _comm_hook,
    "join_hook": _join_hook,
    "_check_manual_backward_finalization_supported": _manual_finalization,
    "_set_static_graph": _ignored,
    "_get_ddp_logging_data": _logging_data,
    "__getstate__": lambda script, original, self: dict(self.__dict__),
    "__setstate__": lambda script, original, self, state: self.__dict__.update(state),
}
