"""hvd.DistributedOptimizer: an optimizer whose step() uses the gradients of all ranks.

The optimizer that is given becomes it: an object of a class derived from its own, with the same state, so that
schedulers made before or behind hold the same one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from runtime.frontends.horovod.arithmetic import ReduceOp, chosen_op, scaled
from runtime.frontends.horovod.collectives import reduce_into, sparse_allreduce_async
from runtime.frontends.horovod.compression import Compression, Compressor
from runtime.frontends.horovod.current import global_process_set, here
from runtime.frontends.horovod.interrupts import BadArgument
from runtime.frontends.horovod.process_sets import ProcessSet


@dataclass(slots=True)
class GradientReduction:
    """How an optimizer reduces."""

    compression: type[Compressor]
    op: ReduceOp
    predivide: float
    sparse_as_dense: bool
    among: ProcessSet
    backwards: int
    """backward() calls of each parameter before a step, at most."""
    seen: dict[torch.Tensor, int]
    """Parameter -> its backward() calls since the last reduction."""
    reduced: bool = False
    """The gradients are those of all ranks, and no step has used them."""
    automatic: bool = True
    """Whether step() reduces."""
    inner: Any = None
    """The step() that a scheduler has put in the place of the class's, to see it called; None: no scheduler has."""


class Options(NamedTuple):
    """Arguments of DistributedOptimizer behind the first two, in Horovod's order."""

    compression: type[Compressor] = Compression.none
    backward_passes_per_step: int = 1
    op: int = ReduceOp.AVERAGE
    gradient_predivide_factor: float = 1.0
    num_groups: int = 0
    groups: object = None
    sparse_as_dense: bool = False
    process_set: ProcessSet = global_process_set


def DistributedOptimizer(  # as Horovod's
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    *more: Any,
    **options: Any,
) -> Any:
    """The optimizer, whose synchronize() and step() reduce the gradients over all ranks. With op=hvd.Adasum each rank
    steps by its own gradients, and step() reduces the changes.

    named_parameters: model.named_parameters(); names are used for messages only. more, options: as Options.
    backward_passes_per_step: how many backward() calls add to a gradient before a step, at most.
    gradient_predivide_factor: a mean is the sum of gradients divided by it, times it, divided by the ranks. num_groups,
    groups: checked and not used, as all gradients travel together. Raises BadArgument for arguments that do not go
    together, and for an optimizer of parameters without a name.
    """
    given = Options(*more, **options)
    how = GradientReduction(
        given.compression,
        chosen_op(None, given.op),
        float(given.gradient_predivide_factor),
        given.sparse_as_dense,
        given.process_set,
        given.backward_passes_per_step,
        {},
    )
    named = None if named_parameters is None else list(named_parameters)
    return _wrapped(optimizer, named, how, given.groups if given.groups is not None else given.num_groups)


def _wrapped(optimizer: Any, named: list[Any] | None, how: GradientReduction, groups: object) -> Any:
    world = here("DistributedOptimizer")
    if isinstance(getattr(optimizer, "horovod_reduction", None), GradientReduction):
        raise BadArgument("hvd.DistributedOptimizer() of an optimizer that is one already; wrap it once")
    if how.backwards < 1:
        raise BadArgument(f"backward_passes_per_step={how.backwards} must be at least 1")
    if how.predivide != 1.0 and how.op is not ReduceOp.AVERAGE:
        raise BadArgument("gradient_predivide_factor= goes with op=hvd.Average only")
    _check_groups(groups)
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    if named is not None:
        _check_names(named, weights)
    if world.reduces_itself() and how.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise BadArgument(
            f"hvd.DistributedOptimizer(op=hvd.{how.op.name.capitalize()}) needs the gradient of each rank by itself, "
            "and logical ranks have their sum: use hvd.Average, or start the script without --ranks"
        )
    cls = type(optimizer)
    optimizer.__class__ = type(cls.__name__, (_Distributed, cls), {"__module__": cls.__module__})
    optimizer.horovod_reduction = how
    if (before := vars(optimizer).pop("step", None)) is not None:
        how.inner = before
        step = optimizer.step
        optimizer.step = functools.wraps(before)(lambda *args, **kwargs: step(*args, **kwargs))
    for weight in weights:
        if weight.requires_grad and not world.reduces_itself():
            weight.register_post_accumulate_grad_hook(optimizer._count_backward)
    world.optimizer_wrapped(optimizer)
    return optimizer


def _check_groups(groups: object) -> None:
    if isinstance(groups, list):
        members = [tensor for group in groups for tensor in group]
        if not all(isinstance(tensor, torch.Tensor) for tensor in members):
            raise BadArgument("DistributedOptimizer(groups=[...]): each group is a list of parameters")
        if len({id(tensor) for tensor in members}) < len(members):
            raise BadArgument("DistributedOptimizer(groups=[...]): a parameter is in one group only")
    elif not isinstance(groups, int) or groups < 0:
        raise BadArgument(f"DistributedOptimizer(groups={groups!r}): a number of groups, or lists of parameters")


def _check_names(named: list[Any], weights: list[torch.Tensor]) -> None:
    if not all(isinstance(entry, tuple) and len(entry) == 2 for entry in named):
        raise BadArgument("DistributedOptimizer(named_parameters=): pairs of name and parameter, as named_parameters()")
    names = [name for name, _ in named]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise BadArgument(f"DistributedOptimizer(named_parameters=): {', '.join(twice)} twice; names must be different")
    known = {id(weight) for _, weight in named}
    if missing := [tuple(weight.shape) for weight in weights if id(weight) not in known]:
        raise BadArgument(
            f"DistributedOptimizer(named_parameters=): the optimizer has parameters of the shapes {missing} that have "
            "no name there; give it those of all modules, or leave named_parameters= out"
        )


class _Distributed(torch.optim.Optimizer):
    """What the class of the optimizer gets in front."""

    horovod_reduction: GradientReduction

    def _count_backward(self, weight: torch.Tensor) -> None:
        how = self.horovod_reduction
        how.seen[weight] = how.seen.get(weight, 0) + 1
        if how.seen[weight] > how.backwards:
            raise BadArgument(
                f"a parameter of shape {tuple(weight.shape)} got {how.seen[weight]} gradients before step(), and the "
                f"optimizer was made with backward_passes_per_step={how.backwards}: raise it, or call step()"
            )
        how.reduced = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """See DistributedOptimizer."""
        self.horovod_reduction.backwards = passes

    def synchronize(self) -> None:
        """Reduce the gradients now, so that they can be clipped before `with optimizer.skip_synchronize(): step()`."""
        how, world = self.horovod_reduction, here("DistributedOptimizer.synchronize")
        world.check_steps()
        if self._steps_alone():
            return
        weights = [weight for group in self.param_groups for weight in group["params"] if weight.requires_grad]
        if world.reduces_itself():
            self._narrow(weights)
            if world.end_of_gradients(weights) and how.op is ReduceOp.SUM:
                for weight in weights:
                    if weight.grad is not None:
                        weight.grad.mul_(world.standing.size)
        elif how.among is global_process_set or how.among.included():
            self._reduce(weights)
        how.seen.clear()
        how.reduced = True

    def _narrow(self, weights: list[torch.Tensor]) -> None:
        """A compression rounds the gradients of each rank; their sum is a wide one."""
        compression = self.horovod_reduction.compression
        if compression is not Compression.none:
            for weight in weights:
                if weight.grad is not None:
                    weight.grad.copy_(compression.decompress(*compression.compress(weight.grad)))

    def _reduce(self, weights: list[torch.Tensor]) -> None:
        """In one call. A parameter without a gradient brings zeros, as another rank may have one."""
        how = self.horovod_reduction
        for weight in weights:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        sparse = [weight for weight in weights if weight.grad is not None and weight.grad.is_sparse]
        for number, weight in enumerate(sparse):
            assert weight.grad is not None
            if how.sparse_as_dense:
                weight.grad = weight.grad.to_dense()
            else:
                weight.grad = sparse_allreduce_async(weight.grad, f"sparse gradient {number}", how.op, how.among)()
        dense = [weight for weight in weights if weight.grad is not None and not weight.grad.is_sparse]
        self._reduce_dense([weight.grad for weight in dense if weight.grad is not None])
        if how.sparse_as_dense:  # on the way only
            for weight in sparse:
                assert weight.grad is not None
                weight.grad = weight.grad.to_sparse()

    @torch.no_grad()
    def _reduce_dense(self, gradients: list[torch.Tensor], name: str = "gradients") -> None:
        how = self.horovod_reduction
        narrow = [how.compression.compress(gradient) for gradient in gradients]
        sent = [scaled(tensor, 1.0 / how.predivide) for tensor, _ in narrow]
        reduce_into(name, sent, how.op, how.among)
        for gradient, found, (_, ctx) in zip(gradients, sent, narrow, strict=True):
            if found is not gradient:
                gradient.copy_(how.compression.decompress(scaled(found, how.predivide), ctx))

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """`with optimizer.skip_synchronize(): optimizer.step()` behind synchronize(). Raises BadArgument for Adasum."""
        if self._steps_alone():
            raise BadArgument(
                "optimizer.skip_synchronize() with op=hvd.Adasum: synchronize() reduces nothing there, and step() has "
                "to. Change gradients before step(), and leave both calls out"
            )
        self.horovod_reduction.automatic = False
        try:
            yield
        finally:
            self.horovod_reduction.automatic = True

    def step(self, closure: Any = None) -> Any:
        """Reduce, unless synchronize() has done so for the gradients that are there, and step."""
        how = self.horovod_reduction
        if self._steps_alone():
            return self._step_alone(closure)
        if how.automatic and not (how.reduced and not how.seen):
            self.synchronize()
        how.reduced = False
        inner = how.inner or super().step
        return inner(closure) if closure is not None else inner()

    def _steps_alone(self) -> bool:
        """Whether each rank steps by its own gradients."""
        how = self.horovod_reduction
        return how.op is ReduceOp.ADASUM and how.among.included() and how.among.size() > 1

    def _step_alone(self, closure: Any) -> Any:
        """Reduce what the step of each rank changes, as Horovod does: Adasum of gradients gives another result where a
        step is no multiple of them, as with moments."""
        how = self.horovod_reduction
        here("DistributedOptimizer.step").check_steps()
        loss = closure() if closure is not None else None
        weights = [weight for group in self.param_groups for weight in group["params"] if weight.requires_grad]
        before = [weight.detach().clone() for weight in weights]
        (how.inner or super().step)()
        with torch.no_grad():
            changes = [weight - begin for weight, begin in zip(weights, before, strict=True)]
            for weight, begin in zip(weights, before, strict=True):
                weight.copy_(begin)  # an elastic job compares the weights of its workers in each collective
            self._reduce_dense(changes, "changes")
            for weight, change in zip(weights, changes, strict=True):
                weight.add_(change)
        how.seen.clear()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Raises BadArgument between backward() and step(), where it would take away what is to be reduced."""
        if self.horovod_reduction.seen:
            raise BadArgument(
                "optimizer.zero_grad() was called after backward() and before step() or synchronize(): call it before "
                "the first backward() of a step"
            )
        super().zero_grad(set_to_none)


_Distributed.step.hooked = True  # type: ignore[attr-defined]  # torch would wrap it besides the one that it calls
