"""Logical ranks: `elastic run --ranks N`, where size() is N for ever and the result has the bits of the quiet run.

What DistributedDataParallel is for frontends/ddp, the optimizer of a Horovod script is here. Its modules are found by
the parameters that it was given. Each backward() of a turn adds to the gradients of a rank, and the turn ends where
Horovod reduces at the latest: in synchronize(), or in step().
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from elastic.errors import ConfigError
from runtime.frontends.ddp import mistakes
from runtime.frontends.ddp.rank_script import RankScript, Turn
from runtime.frontends.ddp.wrapper import note_forward
from runtime.frontends.horovod.arithmetic import ReduceOp, reduce_rows
from runtime.frontends.horovod.torch_world import standing_of
from runtime.frontends.horovod.trained_modules import modules_of, of_none
from runtime.frontends.horovod.world import Call, RankStanding, World

_OF_TORCH = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.AVERAGE: dist.ReduceOp.AVG,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
}


class RankWorld(World):
    """Collectives are those of frontends/ddp, whose rules hold."""

    def __init__(self, script: RankScript) -> None:
        self._script = script
        if not dist.is_initialized():
            dist.init_process_group("gloo")

    @property
    def standing(self) -> RankStanding:
        return standing_of(os.environ, dist.get_rank(), self._script.ranks)

    def reduce(self, call: Call, tensors: Sequence[torch.Tensor], op: ReduceOp) -> list[torch.Tensor]:
        _check_whole(call)
        found = []
        for tensor in tensors:
            if op is ReduceOp.ADASUM:
                found.append(reduce_rows([row for (row,) in self.gather(call, [tensor]).values()], op))
                continue
            out = tensor.detach().clone()
            dist.all_reduce(out, _OF_TORCH[op])
            found.append(out)
        return found

    def gather(self, call: Call, tensors: Sequence[torch.Tensor]) -> dict[int, list[torch.Tensor]]:
        _check_whole(call)
        of_each = []
        for tensor in tensors:
            rows: list[torch.Tensor] = [tensor] * self._script.ranks
            dist.all_gather_object(rows, tensor.detach().cpu())
            of_each.append([row.to(tensor.device) for row in rows])
        return {rank: [rows[rank] for rows in of_each] for rank in range(self._script.ranks)}

    def broadcast(self, call: Call, tensor: torch.Tensor, root: int) -> torch.Tensor:
        _check_whole(call)
        out = tensor.detach().clone()
        dist.broadcast(out, root)
        return out

    def gather_objects(self, call: Call, thing: object) -> list[Any]:
        _check_whole(call)
        found: list[Any] = [None] * self._script.ranks
        dist.all_gather_object(found, thing)
        return found

    def broadcast_object(self, call: Call, thing: object, root: int) -> Any:
        _check_whole(call)
        box = [thing]
        dist.broadcast_object_list(box, root)
        return box[0]

    # What is trained

    @property
    def alike_at_start(self) -> bool:
        return True

    def will_be_alike(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The tensors of modules are those of rank 0 when training begins, and newcomers copy them."""
        if self._script.begun:
            raise ConfigError(
                "hvd.broadcast_parameters() came behind the first training batch: all ranks have the same parameters "
                "then, and a change by hand is lost with its worker. Call it before the loop"
            )
        modules = modules_of(tensors)
        for module in modules:
            self._made(module)
        return of_none(tensors, modules)

    def optimizer_wrapped(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises ConfigError if its parameters belong to no module."""
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        modules = modules_of(weights)
        if missing := of_none(weights, modules):
            raise ConfigError(
                f"hvd.DistributedOptimizer: {len(missing)} of {len(weights)} parameters belong to no torch.nn.Module, "
                "so newcomers could not copy them: make them attributes of a module"
            )
        for module in modules:
            self._made(module)
            if not any(module is known for known in self._script.objects.wrapped):
                self._script.objects.wrapped.append(module)
                self._script.frames.add_model(module)
                module.register_forward_pre_hook(_note_forward)

    def _made(self, module: nn.Module) -> None:
        if not self._script.objects.has("model", module):
            self._script.made("model", module)

    # A turn

    def reduces_itself(self) -> bool:
        return True

    def end_of_gradients(self, weights: Sequence[torch.Tensor]) -> bool:
        """The gradients of the turn's rank are complete."""
        script = self._script
        if script.turn in (Turn.OUTSIDE, Turn.OFFERED, Turn.OPEN):
            raise mistakes.not_in_place(
                "A hvd.DistributedOptimizer that steps without a backward() of its model behind a batch",
                "Take a batch of a DataLoader with a DistributedSampler, call the model, backward(), and then step().",
            )
        if script.turn is not Turn.UNREDUCED:
            return False
        script.forward(reduces=True)
        script.after_backward()
        return not script.silent


def _check_whole(call: Call) -> None:
    if call.group is not None:
        raise mistakes.not_in_place("A process set of a part of the ranks", "Use the global one.")


def _note_forward(module: nn.Module, args: object) -> None:
    """A function of this module, so that a model with the hook can be copied and saved."""
    note_forward(reduces=False)
