"""What the ways to train without waiting have in common: the state that all workers share between two phases."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from elastic.errors import ConfigError, NotCarried
from runtime.asynchronous.member_calls import MemberCalls
from runtime.asynchronous.phase_notes import PhaseSummary
from runtime.asynchronous.units_left import UnitsLeft
from runtime.data.loader import check_count
from runtime.outer.fragments import trained
from runtime.recovery.transfer.connection import CopyConnection
from runtime.session import Session

Sums = dict[str, torch.Tensor]


class FlatParameters:
    """The trained parameters of a model as one vector: float32, CPU, shape (elements,)."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        """Raises NotCarried for parameters that lose bits in float32."""
        for parameter in parameters:
            if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise NotCarried(
                    f"a parameter is of {parameter.dtype}; asynchronous training sends float32, which bfloat16 and "
                    "float16 fit into"
                )
        self._parameters = list(parameters)
        self.elements = sum(parameter.numel() for parameter in parameters)

    @torch.no_grad()
    def read(self) -> torch.Tensor:
        """A copy of the parameters."""
        return torch.cat([parameter.detach().reshape(-1).to("cpu", torch.float32) for parameter in self._parameters])

    @torch.no_grad()
    def write(self, vector: torch.Tensor) -> None:
        """Set the parameters, which keep their identity."""
        first = 0
        for parameter in self._parameters:
            parameter.copy_(vector[first : first + parameter.numel()].view(parameter.shape))
            first += parameter.numel()


class LocalTraining(ABC):
    """Workers that make H inner steps each at their own speed, and then exchange. To be registered, once.

    Training has *phases*. Within a phase no worker waits for another one. Between two phases all workers have the same
    state: then workers come and go, and checkpoints are taken.
    """

    def __init__(self, model: nn.Module, inner_optimizer: torch.optim.Optimizer, every: int) -> None:
        """Raises ConfigError, NotCarried."""
        self.model, self.inner_optimizer = model, inner_optimizer
        self.every = check_count("every", every)
        parameters = trained(model)
        known = set(map(id, parameters))
        if not known.issuperset(id(one) for group in inner_optimizer.param_groups for one in group["params"]):
            raise ConfigError("inner_optimizer holds a parameter that is no trained one of the model")
        self.flat = FlatParameters(parameters)
        self.start = torch.zeros(0)
        """The common parameters with which the phase has begun."""
        self.left = UnitsLeft.of(0)
        self.begun: dict[str, int] = {}
        """Worker -> the unit that it had begun when the last phase ended."""
        self._moments: dict[Any, Any] = {}
        """The inner optimizer's state on this worker, between two phases."""

    # The state between two phases, which newcomers copy

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors."""
        return {"total": self.left.total, "left": self.left.to_json(), "begun": dict(self.begun)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state that a checkpoint or another worker has, also that of a job with another total."""
        total = self.left.total
        self.left = UnitsLeft.from_json(state["total"], state["left"]).of_total(total)
        self.begun = {worker: unit for worker, unit in state["begun"].items() if unit < total}

    def take_moments(self) -> None:
        """The phase is over. Each worker has another state of the inner optimizer, and workers write and copy the state
        of the job in parts: so it is not part of it, and a newcomer or a resumed job begins without one."""
        self._moments = dict(self.inner_optimizer.state)
        self.inner_optimizer.state.clear()

    def put_moments(self) -> None:
        """A phase begins: go on with what this worker had."""
        self.inner_optimizer.state.update(self._moments)

    # A phase on this worker

    def begin_anew(self) -> None:
        """The parameters are not finite, so the inner optimizer's state may not be either, and every later unit of this
        worker would be dropped, too: go on with one of zeros. It keeps its tensors, of which all workers have alike."""
        for state in self.inner_optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()

    @abstractmethod
    def prepare(self, session: Session, calls: MemberCalls | None, shards: int) -> None:
        """The loop begins. calls: None: a job of one. shards: replicas of a round."""

    @abstractmethod
    def begin_phase(self, phase: int, roster: Sequence[str], *, in_step: bool) -> None:
        """`start` is set. roster: the workers of the phase, by rank. in_step: whether nobody can have exchanged
        anything in this phase without this worker."""

    @abstractmethod
    def put_back(self, own: torch.Tensor | None) -> None:
        """Go on with the parameters that this worker had at the end of the phase before; None: with the common ones."""

    @abstractmethod
    def between_steps(self) -> None:
        """An inner step is over."""

    @abstractmethod
    def exchange(self, number: int) -> None:
        """H inner steps are over: give them to the others. number: of these in the phase, from 1."""

    @abstractmethod
    def end_phase(self, *, in_unit: bool) -> torch.Tensor | None:
        """Take part in no exchange any more. in_unit: whether H inner steps are under way. Returns the parameters with
        which this worker goes on; None: it will begin with the common ones."""

    @abstractmethod
    def contribution(self) -> dict[str, list[torch.Tensor]]:
        """dtype group -> tensors that are summed over all workers; of the same shapes on all of them."""

    @abstractmethod
    def take_sums(self, sums: Sums, workers: int) -> bool:
        """Set the common parameters by the sums of the contributions of so many workers. Returns False if they have to
        be summed once more, alike on all workers."""

    @abstractmethod
    def counts(self) -> dict[str, Any]:
        """What this worker has to say of the phase, beside its units: JSON. "applied": worker -> how many of its
        exchanges in the phase this worker knows of; "sums", "most": name -> number, for the metrics."""

    def losses(self) -> dict[str, Any]:
        """What this worker knows of updates that the common parameters have lost, once they are summed: JSON. See
        phase_notes."""
        return {}

    @abstractmethod
    def answer(self, connection: CopyConnection, request: Mapping[str, Any]) -> bool:
        """Answer another worker. False: the request is another one. Threads of the listener. Raises CopyFailed."""

    @abstractmethod
    def close(self) -> None:
        """The job is over for this worker."""

    def settle(self, summary: PhaseSummary) -> dict[str, float]:
        """All workers know what became of the phase. Returns its metrics."""
        self.left, self.begun = summary.left, summary.begun
        return summary.metrics
