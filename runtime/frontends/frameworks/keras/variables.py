"""The variables of a model of Keras, of its metrics and of its optimizer, as the job carries them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

SUMS = "sums of metrics"
"""Name of the buffer by which metrics are merged."""
SEED_MAX = 2**31 - 1


class ModelVariables(nn.Module):
    """A model's variables under their paths: parameters are those that are trained, the others are buffers.

    A rank begins with the values of the beginning of the step. Behind it, floating point variables that are not
    trained, such as the moving statistics of BatchNormalization, are the mean over ranks, weighted by samples; integers
    are those of the first rank. Layers that are frozen are sent to nobody. Variables of metrics are summed over ranks,
    which is what Keras declares for them (`aggregation="sum"`), in float64. Seeds are drawn from (seed of the job,
    step, rank).
    """

    def __init__(self, model: Any, random_state: Any) -> None:
        """model: built and compiled. random_state: the state of the generator of layers without a seed of their own, a
        variable of Keras."""
        super().__init__()
        self.rules: dict[str, str] = {}
        """Buffer -> how it is merged."""
        weights = list(model.weights)
        self._metrics = list(model.metrics_variables)
        known = {id(variable) for variable in (*weights, *self._metrics)}
        self._seeds = [variable for variable in model.variables if id(variable) not in known]
        if all(variable is not random_state for variable in self._seeds):
            self._seeds.append(random_state)
        frozen = {
            id(variable) for layer in model._flatten_layers() if not layer.trainable for variable in layer.weights
        }  # nothing changes them: a BatchNormalization that is frozen only reads its statistics
        for number, variable in enumerate(weights):
            name = variable.path.replace(".", "_")
            if name in self._parameters or name in self._buffers:
                name = f"{name} {number}"
            if variable.trainable:
                self.register_parameter(name, variable.value)
            else:
                self.register_buffer(name, variable.value.data)
                if id(variable) not in frozen:
                    self.rules[name] = "mean" if variable.value.is_floating_point() else "first"
        sizes = [variable.value.numel() for variable in self._metrics]
        device = next(self.parameters()).device
        self.register_buffer(SUMS, torch.zeros(sum(sizes), dtype=torch.float64, device=device))
        self.rules[SUMS] = "mean"
        self._sizes = sizes
        self._before: list[torch.Tensor] = []

    @property
    def _sums(self) -> torch.Tensor:
        return self.get_buffer(SUMS)

    def metrics_now(self) -> list[torch.Tensor]:
        """Copies of the variables of the metrics."""
        return [variable.value.detach().clone() for variable in self._metrics]

    def set_metrics(self, values: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for variable, value in zip(self._metrics, values, strict=True):
                variable.value.copy_(value)

    def seeds_now(self) -> list[torch.Tensor]:
        """Copies of the states of the generators."""
        return [variable.value.detach().clone() for variable in self._seeds]

    def set_seeds(self, values: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for variable, value in zip(self._seeds, values, strict=True):
                variable.value.copy_(value)

    def begin_step(self) -> None:
        self._before = self.metrics_now()

    def begin_rank(self, generator: torch.Generator) -> None:
        """Metrics count this rank only, and its random numbers are its own."""
        with torch.no_grad():
            for variable in self._metrics:
                variable.value.zero_()
            for variable in self._seeds:
                first = int(torch.randint(SEED_MAX, (), generator=generator))
                variable.value.copy_(torch.tensor([first, 0]))

    def end_rank(self, samples: int) -> None:
        """Note what the metrics have counted. samples: of this rank, by which the mean over ranks is weighted."""
        if self._metrics:
            with torch.no_grad():
                counted = [variable.value.detach().double().reshape(-1) for variable in self._metrics]
                self._sums.copy_(torch.cat(counted) / samples)

    def end_step(self, samples: int, index: int) -> None:
        """All ranks are computed. samples: of all ranks. index: number of the step in the job."""
        counted = (self._sums * samples).split(self._sizes)
        with torch.no_grad():
            for variable, before, more in zip(self._metrics, self._before, counted, strict=True):
                now = before.double() + more.reshape(before.shape)
                # A count of whole numbers that was divided by the samples has an error, and copy_() cuts off.
                variable.value.copy_(now if variable.value.is_floating_point() else now.round())
            self._sums.zero_()
            for number, variable in enumerate(self._seeds):
                variable.value.copy_(torch.tensor([index % SEED_MAX, number]))


class OptimizerVariables:
    """The variables of an optimizer of Keras, which is none of torch's: moments, counters, learning rate."""

    def __init__(self, optimizer: Any) -> None:
        self._variables: dict[str, Any] = {}
        for number, variable in enumerate(optimizer.variables):
            self._variables[f"{number} {variable.path}"] = variable

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: variable.value.detach() for name, variable in self._variables.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, variable in self._variables.items():
                variable.value.copy_(state[name])
