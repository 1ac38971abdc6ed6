"""In which order DistributedDataParallel sums gradients, kept for the scripts of later rounds.

DDP sums gradients in buckets. The place of a gradient in its bucket decides in which order the ranks add it, so the
last bits depend on it. In the first backward of a process the buckets follow the order in which parameters were made;
then DDP makes new ones, in the order in which their gradients came. A script that is started again would take its first
step with the first buckets, where the one before it had the second ones. So that order is kept, and a process that goes
on from a later step shows it to DDP, with gradients of zero, before its first forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from runtime import torch_names


class GradientOrder:
    """An object with a state, which is kept. It sees each DDP model at its first forward of the round, and until
    `close`."""

    def __init__(self) -> None:
        torch_names.check(torch_names.OF_KEPT_RANKS)
        self._orders: list[list[int]] = []
        """Of each model, in the order of their first forwards: numbers of parameters, as their gradients came."""
        self._met: list[DistributedDataParallel] = []
        self._hook = register_module_forward_pre_hook(self._before_forward)

    def state_dict(self) -> dict[str, Any]:
        return {"orders": [list(order) for order in self._orders]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._orders = [list(order) for order in state["orders"]]

    def close(self) -> None:
        """The first step of the round is done: a hook of all modules costs time."""
        self._hook.remove()

    def _before_forward(self, module: nn.Module, _: object) -> None:
        if not isinstance(module, DistributedDataParallel) or not torch.is_grad_enabled():
            return
        if not module.require_backward_grad_sync or any(module is met for met in self._met):
            return
        number = len(self._met)
        self._met.append(module)
        if number < len(self._orders):
            rehearse(module, self._orders[number])
        else:
            self._orders.append([])
            _record(module, self._orders[number])


def _record(model: DistributedDataParallel, order: list[int]) -> None:
    """Append the numbers of the parameters to `order` as their gradients come for the first time."""

    def came(number: int) -> None:
        order.append(number)
        hooks[number].remove()

    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda _, number=number: came(number))
        for number, parameter in enumerate(model._build_params_for_reducer()[0])
    ]


class _Gradients(torch.autograd.Function):
    """Its backward tells DDP that gradients have come."""

    @staticmethod
    def forward(ctx: Any, one: torch.Tensor, reducer: Any, order: Sequence[int]) -> torch.Tensor:
        ctx.reducer, ctx.order = reducer, order
        return one.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        for number in ctx.order:
            ctx.reducer._autograd_hook(number)
        return gradient, None, None


def rehearse(model: DistributedDataParallel, order: Sequence[int]) -> None:
    """Show DDP in which order gradients come, in all processes alike. Nothing is done where DDP makes no second
    buckets, or makes them in another way: with find_unused_parameters, static_graph, sparse gradients and
    mixed_precision. Nor with a communication hook: it would be called, and may change a state of its own."""
    parameters, sparse = model._build_params_for_reducer()
    if model.find_unused_parameters or model.static_graph or any(sparse) or model.mixed_precision is not None:
        return
    if model._get_ddp_logging_data().get("comm_hook"):
        return
    if sorted(order) != list(range(len(parameters))):
        return
    if model.reducer._rebuild_buckets():  # gradients have come in this process already
        return
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    model.reducer.prepare_for_backward([])
    with torch.enable_grad():
        one = torch.zeros(1, requires_grad=True)
        _Gradients.apply(one, model.reducer, order).backward()  # type: ignore[no-untyped-call]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
