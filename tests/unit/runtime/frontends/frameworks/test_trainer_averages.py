"""Averages of the weights that a Trainer changes while ranks are computed are refused, and nothing else beside them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from elastic.errors import ConfigError
from runtime.frontends.frameworks.trainer_attributes import ToldSums, recorded


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


class Shadow:
    """An average as libraries write it."""

    def __init__(self, of: nn.Module) -> None:
        self.tensors = [weight.detach().clone() for weight in of.parameters()]


def computed(trainer: Any, body: Callable[[], object]) -> None:
    """A rank is computed, and the body is in it."""
    with recorded(trainer, ToldSums()):
        trainer.model(torch.ones(3, 2))
        body()


def made(**attributes: Any) -> Any:
    trainer = SimpleNamespace(model=model())
    vars(trainer).update(attributes)
    return trainer


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}


def in_place(trainer: Any) -> None:
    with torch.no_grad():
        trainer.kept[0].weight.lerp_(torch.ones(2, 2), 0.1)


def by_data(trainer: Any) -> None:
    for weight in trainer.kept.parameters():
        weight.data.mul_(0.9).add_(1.0)


def in_a_dictionary(trainer: Any) -> None:
    trainer.kept["0.weight"].mul_(0.9)


def item_by_item(trainer: Any) -> None:
    trainer.kept["0.weight"] = trainer.kept["0.weight"] * 0.9


def as_another_dictionary(trainer: Any) -> None:
    trainer.kept = {name: value * 0.9 for name, value in trainer.kept.items()}


@pytest.mark.parametrize(
    ("kept", "change"),
    [
        (lambda of: copy.deepcopy(of), in_place),
        (lambda of: torch.optim.swa_utils.AveragedModel(of).module, in_place),
        (lambda of: copy.deepcopy(of), by_data),
        (lambda of: copy.deepcopy(of).train(), lambda trainer: trainer.kept(torch.ones(3, 2))),
        (lambda of: dict(copy.deepcopy(of).state_dict()), in_a_dictionary),
        (lambda of: dict(copy.deepcopy(of).state_dict()), item_by_item),
        (lambda of: dict(copy.deepcopy(of).state_dict()), as_another_dictionary),
        (Shadow, lambda trainer: trainer.kept.tensors[0].mul_(0.9)),
    ],
)
def test_an_average_that_a_rank_changes_is_refused(
    kept: Callable[[nn.Module], Any], change: Callable[[Any], object]
) -> None:
    trainer = made()
    trainer.kept = kept(trainer.model)
    with pytest.raises(
        ConfigError, match=r"self\.kept(\.tensors)? of SimpleNamespace .* on_step_end\(\) of a callback"
    ):
        computed(trainer, lambda: change(trainer))


def test_what_a_rank_leaves_as_it_is_may_be_there() -> None:
    """A teacher, the model under other names and in a wrapper, its own tensors, notes of the last batch, and lists to
    which numbers are appended."""
    trainer = made(teacher=model().eval(), last={}, losses=[])
    trainer.wrapped = torch.compile(trainer.model, backend="eager")
    trainer.student, trainer.started = trainer.model, trainer.model.state_dict()
    trainer.by_name, trainer.shadow = weights(trainer), Shadow(trainer.model)

    def body() -> None:
        trainer.teacher.to(torch.float64)(torch.ones(3, 2).double())
        trainer.last["logits"] = torch.rand(3)
        trainer.losses.append(torch.ones(()))

    for _ in range(2):
        computed(trainer, body)
