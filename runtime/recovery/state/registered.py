"""The registered objects by name, and what is found in them when the loop begins: parameters, buffers, parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast, get_args

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from elastic.errors import ConfigError, NotCarried, Unregistered
from runtime.allreduce.reduction.buffers import Buffer, Kind, Merge, described
from runtime.recovery.state.object_copies import plain_name
from runtime.recovery.state.registrable import check_registrable, sharded, unwrapped

INT_BUFFER_ELEMENTS_MAX = 4096

NamedParameter = tuple[str, nn.Parameter]


class RegisteredObjects:
    """Use: `register` as often as needed, `freeze` before the first step, then the rest."""

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._schedulers: dict[str, Any] = {}
        self._declared: dict[str, str] = {}
        self._frozen = False
        self._parameters: list[NamedParameter] = []
        self._kinds: list[Kind] = []
        self._owned: set[int] = set()
        self._floats: list[Buffer] = []
        self._integers: list[Buffer] = []
        self._buffers: list[tuple[nn.Module, str]] = []
        self._parts: list[tuple[str, nn.Module]] = []
        self._children: list[dict[str, nn.Module | None]] = []
        """The children that each of the parts had when it was found."""

    def register(self, buffers: Mapping[str, str] | None = None, **objects: object) -> None:
        """Add objects that have state_dict() and load_state_dict(), and rules for buffers that change in a pass.

        buffers: qualified name ("model.queue") -> "mean" or "first". Raises ConfigError or NotCarried, and then
        nothing of this call is registered.
        """
        if self._frozen:
            raise ConfigError(f"register({', '.join(objects)}) came after the first step; register before the loop")
        known = {id(thing): name for name, thing in self._objects.items()}
        things = {name: unwrapped(thing) for name, thing in objects.items()}
        for name, thing in things.items():
            if name in self._objects:
                raise ConfigError(f"register({name}=...) was called twice; every name is registered once")
            if id(thing) in known:
                raise ConfigError(f"{name} and {known[id(thing)]} are the same object; register it under one name")
            known[id(thing)] = name
            check_registrable(name, thing)
        self._objects |= things
        for name, thing in things.items():
            if isinstance(thing, torch.optim.Optimizer):
                self._optimizers[name] = thing
            if hasattr(thing, "last_epoch"):
                self._schedulers[name] = thing
        self._parts = []
        self._declared |= dict(buffers or {})

    @property
    def frozen(self) -> bool:
        """Whether registration has ended."""
        return self._frozen

    def freeze(self) -> None:
        """End registration: find parameters and buffers. A second call does nothing.

        Raises ConfigError (nothing to train, a lazy parameter, a wrong buffer rule), Unregistered (an optimizer
        holds a parameter of no registered module) or NotCarried.
        """
        if self._frozen:
            return
        unique: dict[int, NamedParameter] = {}
        for named in self._named_parameters():
            unique.setdefault(id(named[1]), named)
        parameters = list(unique.values())
        modules = self.modules()
        if modules and not any(parameter.requires_grad for _, parameter in parameters):
            raise ConfigError(f"{', '.join(modules)}: no parameter has requires_grad=True, so nothing can be trained")
        for name, parameter in parameters:
            if is_lazy(parameter):
                raise ConfigError(f"{name} has no shape yet; run one batch through the model before the first step")
            if type(parameter.data).__name__ == "DTensor":
                raise sharded(f"{name} is a DTensor")
            if parameter.is_complex():
                raise NotCarried(f"{name} is of {parameter.dtype}: use a real tensor")
        self._owned = set(unique)
        self._check_groups()
        self._floats, self._integers = self._find_buffers()
        self._buffers = [(owner, key) for _, owner, key, _ in self.named_buffers()]
        self._parameters = parameters
        self._kinds = self._kinds_now()
        self._frozen = True

    def check_kinds(self) -> None:
        """Raise NotCarried if a parameter, or a buffer that a pass changes, has another dtype or shape than in the
        first step, and Unregistered if an optimizer has got a new parameter."""
        if (kinds := self._kinds_now()) != self._kinds:
            pairs = zip(self._parameters, kinds, self._kinds, strict=True)
            name, now, then = next((name, now, then) for (name, _), now, then in pairs if now != then)
            raise NotCarried(
                f"{name} is {described(*now)}, and was {described(*then)} when the loop began; gradients are summed, "
                "and newcomers copy, as it was then. Change dtypes and shapes before the loop; for mixed precision use "
                "torch.autocast"
            )
        for buffer in (*self._floats, *self._integers):
            buffer.check_kind()
        self._check_groups()

    def _kinds_now(self) -> list[Kind]:
        return [(parameter.dtype, parameter.shape) for _, parameter in self._parameters]

    def merged(self) -> set[str]:
        """Names of what a pass may change."""
        return {buffer.name for buffer in (*self._floats, *self._integers)}

    def _check_groups(self) -> None:
        for name, optimizer in self.optimizers().items():
            for i, group in enumerate(optimizer.param_groups):
                if not self._owned.issuperset(map(id, group["params"])):
                    raise Unregistered(
                        f"parameter group {i} of {name} holds a parameter of no registered module, or one that its "
                        "module got after the first step; make it before the loop, and register the module it belongs "
                        "to, or put it into a torch.nn.ParameterList and register that"
                    )

    @property
    def objects(self) -> Mapping[str, Any]:
        """All registered objects by name, unwrapped."""
        return self._objects

    def modules(self) -> dict[str, nn.Module]:
        """Registered modules by name, without torch.compile's wrapper."""
        return {name: thing for name, thing in self._objects.items() if isinstance(thing, nn.Module)}

    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Registered optimizers by name."""
        return self._optimizers

    def schedulers(self) -> dict[str, Any]:
        """Registered learning rate schedulers by name: objects that count epochs in `last_epoch`."""
        return self._schedulers

    def parameters(self) -> list[NamedParameter]:
        """The trainable parameters, each once, in the order of registration.

        The script may switch requires_grad between steps; ask again at each step.
        """
        return [(name, parameter) for name, parameter in self._parameters if parameter.requires_grad]

    def drop_fixed_gradients(self) -> None:
        """A parameter that is not trained has no gradient, as in a newcomer: copies of the state have none, and an
        optimizer would go on with its momentum for one of zeros."""
        for _, parameter in self._parameters:
            if not parameter.requires_grad:
                parameter.grad = None

    def fixed(self) -> list[str]:
        """Names of the parameters that are not trained now."""
        return [name for name, parameter in self._parameters if not parameter.requires_grad]

    def float_buffers(self) -> list[Buffer]:
        """Floating point buffers that a pass changes: BatchNorm's statistics and declared ones."""
        return list(self._floats)

    def int_buffers(self) -> list[Buffer]:
        """Integer and bool buffers that a pass changes: BatchNorm's counters and declared ones."""
        return list(self._integers)

    def learning_rates(self) -> tuple[float, ...]:
        """The learning rate of every parameter group of every optimizer, in the order of registration."""
        return tuple(
            float(group["lr"])
            for optimizer in self.optimizers().values()
            for group in optimizer.param_groups
            if "lr" in group
        )

    def _named_parameters(self) -> Iterator[NamedParameter]:
        for name, module in self.modules().items():
            for path, parameter in module.named_parameters():
                yield f"{name}.{plain_name(path)}", parameter

    def _find_buffers(self) -> tuple[list[Buffer], list[Buffer]]:
        floats: list[Buffer] = []
        integers: list[Buffer] = []
        seen: set[int] = set()
        undeclared = dict(self._declared)
        for name, owner, key, tensor in (*self.named_buffers(), *self._frozen_parameters()):
            rule = undeclared.pop(name, None)
            if rule is None and isinstance(owner, _NormBase):
                rule = "mean" if tensor.is_floating_point() else "first"
            if rule is None or id(tensor) in seen:
                continue
            if rule not in get_args(Merge):
                raise ConfigError(f'register(buffers={{"{name}": {rule!r}}}): the rule must be "mean" or "first"')
            seen.add(id(tensor))
            buffer = Buffer(name, owner, key, cast(Merge, rule), (tensor.dtype, tensor.shape))
            if tensor.is_floating_point():
                floats.append(buffer)
                continue
            if rule == "mean" or tensor.is_complex() or tensor.numel() > INT_BUFFER_ELEMENTS_MAX:
                raise ConfigError(
                    f'buffer {name} ({tensor.dtype}, {tensor.numel()} elements) cannot be merged by "{rule}"; integer '
                    f'buffers of up to {INT_BUFFER_ELEMENTS_MAX} elements take "first", larger ones have to be floats'
                )
            integers.append(buffer)
        if undeclared:
            raise ConfigError(
                f"register(buffers=...) names {', '.join(undeclared)}, but no registered module has such a buffer, or "
                "such a parameter that is not trained"
            )
        return floats, integers

    def named_modules(self) -> list[tuple[str, nn.Module]]:
        """(name, module) of the registered modules and all their parts. The search, which takes torch a microsecond a
        module, is repeated if a module has got other children since the last one."""
        if not self._parts or self._children != [part._modules for _, part in self._parts]:
            self._parts = [
                (plain_name(path), part)
                for name, module in self.modules().items()
                for path, part in module.named_modules(prefix=name)
            ]
            self._children = [dict(part._modules) for _, part in self._parts]
        return self._parts

    def named_buffers(self) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
        for name, owner in self.named_modules():
            if owner._buffers:
                for key, tensor in owner.named_buffers(recurse=False):
                    yield f"{name}.{key}", owner, key, tensor

    def _frozen_parameters(self) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
        """As `named_buffers`, for frozen parameters: some libraries keep running statistics in them."""
        for name, owner in self.named_modules():
            for key, parameter in owner.named_parameters(recurse=False):
                if not parameter.requires_grad:
                    yield f"{name}.{key}", owner, key, parameter
