"""A round on one worker: each replica that it computes starts from its own state, and leaves its difference.

The registered model and the inner optimizer are used by one replica after the other. Between rounds the model has the
outer parameters. While a round runs, copies of the state are those of its beginning.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from elastic.errors import NotCarried
from runtime.allreduce.reduction.partial_sum import Json
from runtime.outer.diloco import DiLoCo
from runtime.recovery.state import encoding
from runtime.recovery.state.training_state import Carrier


class Round:
    """Used by the user's thread only. A round is `begin`; for each replica `begin_replica`, then `take` once, then
    `end_replica` or `drop`; then `outer_step`."""

    def __init__(self, outer: DiLoCo, carrier: Carrier) -> None:
        """carrier: frozen, with all of `outer` registered."""
        self.outer = outer
        self._carrier = carrier
        self._start: list[Tensor] = []
        """The outer parameters when the round began; []: no round is in progress."""
        self._plain: dict[str, Any] = {}
        """What is the same for all replicas, when the round began: see `_plain_now`."""
        self._taken: list[Tensor] = []
        self._moments: dict[Tensor, Any] = {}
        """The inner optimizer's state after the last round here, if each worker keeps its own."""
        self._fragment = 0
        self.inner_steps = 0
        """Steps of the inner optimizer since the replica began."""
        outer.inner_optimizer.register_step_post_hook(self._count)

    def _count(self, *_: object) -> None:
        self.inner_steps += 1

    def begin(self, step: int) -> None:
        """step: of the job. The state of this moment is that of the round's beginning. Raises NotCarried for a
        parameter that is not trained any more."""
        self.abandon()
        if not all(parameter.requires_grad for parameter in self.outer.parameters):
            raise NotCarried(
                "a parameter of the model has requires_grad=False now, and was trained when DiLoCo was made; freeze it "
                "before, or leave it trained"
            )
        self._fragment = self.outer.schedule.fragment(step)
        self._start = [parameter.detach().clone() for parameter in self.outer.parameters]
        self._plain = self._plain_now()
        live = (parameter.data_ptr() for parameter in self.outer.parameters)
        self._carrier.hold({place: start for place, start in zip(live, self._start, strict=True) if place})

    def abandon(self) -> None:
        """Back to the state of the round's beginning, if one has begun: nothing of it counts."""
        self.drop()
        self._start = []
        self._carrier.release()

    def changes(self) -> set[str]:
        """What a replica changes for itself, named as by Carrier.changed."""
        inner, trained = self.outer.inner_optimizer, set(map(id, self.outer.parameters))
        name = next(name for name, one in self._carrier.optimizers().items() if one is inner)
        return {
            *(f"parameter {name}" for name, parameter in self._carrier.parameters() if id(parameter) in trained),
            *(f"learning rate of {name}, group {i}" for i in range(len(inner.param_groups))),
            *(f"scheduler {name}" for name in self._carrier.schedulers()),
        }

    @property
    def trained(self) -> bool:
        """Whether the replica has made an inner step, or a GradScaler may have left all of them out."""
        return self.inner_steps > 0 or any(
            isinstance(thing, torch.amp.GradScaler) and thing.is_enabled() for thing in self._others().values()
        )

    def begin_replica(self, replica: int) -> None:
        """Become this replica, as it was when the round began."""
        self.outer.rows.restore(replica)
        self.outer.inner_optimizer.state.update(self._moments)

    def take(self) -> None:
        """Take the difference that is to be sent, from the fragment that is due."""
        places = {id(parameter): place for place, parameter in enumerate(self.outer.parameters)}
        with torch.no_grad():
            self._taken = [self._start[places[id(one)]] - one.detach() for one in self._due]

    @contextmanager
    def differences_as_gradients(self) -> Iterator[None]:
        """For a while the differences that were taken are the gradients of the fragment that is due. The script may
        have gradients that it accumulates; they come back."""
        before = [parameter.grad for parameter in self._due]
        self._install(self._taken)
        try:
            yield
        finally:
            self._install(before)

    def _install(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self._due, gradients, strict=True):
            parameter.grad = gradient

    def due(self, step: int) -> list[torch.nn.Parameter]:
        """The parameters that are synchronised at the end of this step of the job."""
        return self.outer.fragments[self.outer.schedule.fragment(step)]

    @property
    def _due(self) -> list[torch.nn.Parameter]:
        return self.outer.fragments[self._fragment]

    def end_replica(self, replica: int) -> float:
        """Write the replica's row, and leave the difference as the gradient of the fragment's parameters. Returns the
        square of its norm. If parameters are not finite, the difference is not either, even if it was taken before or
        is that of others: else the round would count, and the row with it, from which no later round gets away."""
        rows = self.outer.rows
        lasts = bool(rows.elements) or self.outer.keeps_moments
        finite = not lasts or all(bool(one.detach().isfinite().all()) for one in self.outer.parameters)
        rows.keep(replica)
        if self.outer.keeps_moments:
            self._moments = dict(self.outer.inner_optimizer.state) if finite else {}
        self._clear_gradients()
        if not finite:
            self._taken[0].fill_(torch.nan)
        self._install(self._taken)
        return _square(self._taken)

    def drop(self) -> None:
        """Back to the outer parameters, without a state of the inner optimizer: nobody computes here now. Outside a
        round nothing happens."""
        if not self._start:
            return
        with torch.no_grad():
            for parameter, start in zip(self.outer.parameters, self._start, strict=True):
                parameter.copy_(start)
        self.outer.inner_optimizer.state.clear()
        self._restore(copy.deepcopy(self._plain))
        self._clear_gradients()
        self.inner_steps, self._taken = 0, []

    def outer_step(self, install: Callable[[], None], plain: Json) -> float:
        """The round's result is here. install: writes the mean of the differences as gradients, or leaves none if the
        round does not count, and writes the rows. plain: `plain` of the first replica that has made all inner steps;
        None: none has, and what is the same for all stays as it was. Returns the square of the norm of the mean."""
        self.drop()
        install()
        installed = [parameter.grad for parameter in self._due if parameter.grad is not None]
        square = _square(installed)
        if installed:
            self.outer.outer_optimizer.step()
            if self.outer.diverges:
                self._mix()
        self._clear_gradients()
        if plain is not None:
            self._restore(encoding.decode(plain, _no_tensor))
        self._start = []
        self._carrier.release()
        return square

    def _mix(self) -> None:
        """theta_replica = alpha theta_replica + (1 - alpha) theta_outer, for the fragment that was due (Streaming
        DiLoCo, section 2.3)."""
        due, alpha = set(map(id, self._due)), self.outer.alpha
        with torch.no_grad():
            for replica in range(self.outer.replicas):
                for place, own in self.outer.rows.own_parameters(replica).items():
                    parameter = self.outer.parameters[place]
                    if id(parameter) in due:
                        wide = parameter.detach().to(own.dtype)
                        own.copy_(torch.lerp(wide, own, alpha) if alpha else wide)

    def plain(self) -> Json:
        """What is the same for all replicas and changes in the inner loop, as JSON: the options of the inner
        optimizer's groups, schedulers, and other registered objects; those with tensors are left out. Raises
        NotCarried for one of these that has changed."""
        now = self._plain_now()
        for name, state in list(now["others"].items()):
            tensors, before = _bytes_in(name, state), _bytes_in(name, self._plain["others"][name])
            if not tensors and not before:
                continue
            if tensors.keys() != before.keys() or not all(map(torch.equal, tensors.values(), before.values())):
                raise NotCarried(
                    f"{name} has tensors that change in the inner loop; only schedulers and objects whose state is "
                    "plain values may change there. Change it after the loop"
                )
            del now["others"][name]
        found: list[encoding.NamedTensor] = []
        encoded = encoding.encode(now, "inner", found)
        if found:
            raise NotCarried(f"{found[0][0]} is a tensor; give the inner optimizer a number")
        return encoded

    def _plain_now(self) -> dict[str, Any]:
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.outer.inner_optimizer.param_groups
        ]
        others = {name: thing.state_dict() for name, thing in self._others().items()}
        return copy.deepcopy({"groups": groups, "others": others})

    def _restore(self, plain: dict[str, Any]) -> None:
        for name, thing in self._others().items():
            if name in plain.get("others", {}):
                thing.load_state_dict(plain["others"][name])
        for group, options in zip(self.outer.inner_optimizer.param_groups, plain.get("groups", []), strict=False):
            group.update(options)

    def _others(self) -> dict[str, Any]:
        """Registered objects that are no modules and no optimizers, and belong to the script."""
        kinds = (torch.nn.Module, torch.optim.Optimizer)
        return {
            name: thing
            for name, thing in self._carrier.objects.items()
            if not isinstance(thing, kinds) and " " not in name
        }

    def _clear_gradients(self) -> None:
        for parameter in self.outer.parameters:
            parameter.grad = None


def _bytes_in(name: str, state: object) -> dict[str, Tensor]:
    """Path -> the bytes of each tensor in the state of an object."""
    found: list[encoding.NamedTensor] = []
    encoding.encode(state, name, found)
    return {path: encoding.to_blob(tensor) for path, tensor in found}


def _no_tensor(number: int) -> Tensor:
    raise ValueError(f"the plain values of a replica name tensor {number}, and have none")


def _square(tensors: list[Tensor]) -> float:
    """The sum of the squares of all elements, in float64."""
    return float(sum(tensor.double().square().sum().item() for tensor in tensors))
