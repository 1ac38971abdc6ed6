"""`elastic run --outer`: the DiLoCo of a script that does not make one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from elastic.config import OuterKind, OuterOption
from elastic.errors import ConfigError
from runtime.outer.diloco import DiLoCo, LocalSGD
from runtime.outer.fragments import trained

NAME = "outer"
"""Under which it is registered, as by the line that a script would have."""


def make(
    said: OuterOption, modules: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]
) -> DiLoCo:
    """The same as `elastic.DiLoCo(model, optimizer, every=H)` in the script, of what is registered. modules,
    optimizers: by their names.

    Raises ConfigError unless there is one optimizer, whose parameters are those of one module.
    """
    if len(optimizers) != 1:
        raise ConfigError(
            f"--outer takes the one optimizer that is registered as that of the inner steps, and "
            f"{_counted(optimizers)}. Write job.register(model=model, optimizer=optimizer), or leave --outer out and "
            "make the elastic.DiLoCo in the script"
        )
    (optimizer,) = optimizers.values()
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    holding = {name: module for name, module in modules.items() if not stepped.isdisjoint(map(id, module.parameters()))}
    if len(holding) != 1:
        raise ConfigError(
            f"--outer takes the one registered module that has the optimizer's parameters, and {_counted(holding)}. "
            "Register one module that holds the others, and not its parts beside it; or leave --outer out and make the "
            "elastic.DiLoCo in the script"
        )
    (model,) = holding.values()
    if not stepped <= set(map(id, trained(model))):
        raise ConfigError(
            "--outer takes an optimizer of trained parameters of the registered module, and this one also has frozen "
            "ones or others. Write AdamW(p for p in model.parameters() if p.requires_grad)"
        )
    if said.kind is OuterKind.LOCAL_SGD:
        return LocalSGD(model, optimizer, every=said.every, moments=said.moments)
    outer = torch.optim.SGD(trained(model), lr=said.lr, momentum=said.momentum, nesterov=said.momentum > 0)
    return DiLoCo(model, optimizer, outer, every=said.every, moments=said.moments)


def twice(name: str) -> ConfigError:
    """The error for a script that makes one itself. name: of the call that was given it."""
    return ConfigError(
        f"{name} was given a DiLoCo, and --outer makes that of this job: leave --outer out, or make none in the "
        "script: job.register(model=model, optimizer=optimizer) and job.steps(train)"
    )


def no_loop() -> ConfigError:
    """The error for a script without a loop of replicas."""
    return ConfigError(
        "--outer makes the replicas of a script whose loop is job.steps(), and this script has another loop; leave "
        "--outer out"
    )


def _counted(named: Mapping[str, object]) -> str:
    return f"there are {len(named)}: {', '.join(named)}" if named else "there is none"
