"""What belongs to one replica and lives longer than a round, as a row of numbers: its inner optimizer's state, and its
parameters where they differ from the outer ones.

Whoever computes a replica writes its row. The rows are a buffer that is merged by "rows" (see allreduce/reduction), so
every worker has the rows of all replicas after each round: any of them may compute any replica in the next one. Or all
replicas share one row, which is merged by "mean": each begins a round with the mean of what they ended the last with.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from elastic.errors import NotCarried
from runtime.allreduce.reduction.buffers import Merge

_WIDE = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes whose values float32 holds exactly. What else there is goes into float64."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A value's place in the row of its group: elements lo..hi-1. place: number of the parameter to which it belongs.
    key: of the optimizer's state; None: the parameter itself. restored: the value of a part of the row."""

    place: int
    key: str | None
    group: str
    lo: int
    hi: int
    shape: torch.Size
    restored: Callable[[Tensor], object]


class ReplicaRows(nn.Module):
    """A buffer "float32" and a buffer "float64", each of shape (rows, elements), if they have elements."""

    def __init__(
        self,
        replicas: int,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer | None,
        *,
        own_parameters: bool,
        shared: bool = False,
    ) -> None:
        """All rows are what this worker has now. optimizer: None: its state is not kept. own_parameters: whether each
        replica has parameters of its own. shared: one row for all replicas. Raises NotCarried for an optimizer whose
        state has no fixed size."""
        super().__init__()
        self._shared, self._trained, self._optimizer = shared, list(parameters), optimizer
        self._pieces: list[_Piece] = []
        self._constants: list[dict[str, object]] = [{} for _ in parameters]
        """What the state of each parameter has besides numbers: None, or a bool."""
        self._sizes: dict[str, int] = {}
        if optimizer is not None:
            self._sizes["float32"] = len(parameters)  # whether a parameter has a state: before its first gradient, none
            for place, state in enumerate(_state_after_a_step(optimizer, parameters)):
                self._add_state(place, state)
        if own_parameters:
            for place, parameter in enumerate(parameters):
                self._add(place, None, parameter.dtype, parameter.shape, lambda part: part)
        for name, size in self._sizes.items():
            self.register_buffer(
                name, torch.zeros(1 if shared else replicas, size, dtype=getattr(torch, name), device=self._device)
            )
        for replica in range(replicas):
            self.keep(replica)

    @property
    def _device(self) -> torch.device:
        return self._trained[0].device

    def _add_state(self, place: int, state: Mapping[str, Any]) -> None:
        parameter = self._trained[place]
        for key, value in state.items():
            if isinstance(value, Tensor) and value.layout == torch.strided:
                self._add(place, key, value.dtype, value.shape, _as_tensor(value, parameter))
            elif value is None or isinstance(value, bool):
                self._constants[place][key] = value
            elif isinstance(value, int | float):
                self._add(place, key, torch.float64, torch.Size(()), _as_number(type(value)))
            else:
                raise NotCarried(
                    f"the inner optimizer keeps a {type(value).__name__} as {key!r}; only tensors and numbers are "
                    'carried for each replica. Give DiLoCo moments="reset", which carries nothing of it'
                )

    def _add(
        self, place: int, key: str | None, dtype: torch.dtype, shape: torch.Size, restored: Callable[[Tensor], object]
    ) -> None:
        group = "float32" if dtype in _WIDE else "float64"
        lo = self._sizes.get(group, 0)
        self._sizes[group] = lo + shape.numel()
        self._pieces.append(_Piece(place, key, group, lo, self._sizes[group], shape, restored))

    @property
    def elements(self) -> dict[str, int]:
        """Elements of one row, by dtype."""
        return dict(self._sizes)

    @property
    def merge(self) -> Merge:
        """How the buffers are merged."""
        return "mean" if self._shared else "rows"

    def keep(self, replica: int) -> None:
        """Write this worker's state into the row. Raises NotCarried for a state of another shape than before."""
        with torch.no_grad():
            rows = self._rows(replica)
            states = [self._state(place) for place in range(len(self._trained))]
            if self._optimizer is not None:
                rows["float32"][: len(states)] = torch.tensor([float(bool(state)) for state in states])
            for piece in self._pieces:
                part = rows[piece.group][piece.lo : piece.hi]
                if piece.key is None:
                    part.copy_(self._trained[piece.place].reshape(-1))
                elif state := states[piece.place]:
                    self._keep_value(piece, state.get(piece.key), part)
                else:
                    part.zero_()

    def _keep_value(self, piece: _Piece, value: object, part: Tensor) -> None:
        if isinstance(value, Tensor) and value.shape == piece.shape:
            part.copy_(value.reshape(-1))
        elif isinstance(value, int | float) and not piece.shape:
            part.fill_(value)
        else:
            raise NotCarried(
                f"the inner optimizer's {piece.key!r} is {value!r:.40} now, and was a value of shape "
                f"{list(piece.shape)} after its first step; its state is carried for each replica as it was then"
            )

    def restore(self, replica: int) -> None:
        """Become the row's state: the inner optimizer's, and the parameters if replicas have their own."""
        if self._optimizer is not None:
            self._optimizer.state.clear()
        if not self._sizes:
            return
        with torch.no_grad():
            rows = self._rows(replica)
            there = rows["float32"][: len(self._trained)].tolist() if self._optimizer is not None else []
            for piece in self._pieces:
                part = rows[piece.group][piece.lo : piece.hi].reshape(piece.shape)
                parameter = self._trained[piece.place]
                if piece.key is None:
                    parameter.copy_(part)
                elif there[piece.place]:
                    state = self._state(piece.place, make=True)
                    if not state:
                        state.update(self._constants[piece.place])
                    state[piece.key] = piece.restored(part)
            for place, constants in enumerate(self._constants):
                if there and there[place] and constants:
                    self._state(place, make=True).update(constants)

    def own_parameters(self, replica: int) -> dict[int, Tensor]:
        """Number of the parameter -> view of it in the row, with its shape; {}: replicas have none of their own."""
        rows = self._rows(replica)
        return {
            piece.place: rows[piece.group][piece.lo : piece.hi].view(piece.shape)
            for piece in self._pieces
            if piece.key is None
        }

    def _rows(self, replica: int) -> dict[str, Tensor]:
        return {name: getattr(self, name)[0 if self._shared else replica] for name in self._sizes}

    def _state(self, place: int, *, make: bool = False) -> dict[str, Any]:
        """The optimizer's state of a parameter. make: also if there is none yet."""
        if self._optimizer is None:
            return {}
        states, parameter = self._optimizer.state, self._trained[place]
        found: dict[str, Any] = states[parameter] if make or parameter in states else {}
        return found


def _as_number(kind: type[int | float]) -> Callable[[Tensor], int | float]:
    return lambda part: kind(part.item())


def _as_tensor(like: Tensor, parameter: nn.Parameter) -> Callable[[Tensor], Tensor]:
    """Makes tensors of the dtype and on the device of this one; strided as its parameter, if it has its shape."""
    dtype, device = like.dtype, like.device

    def restored(part: Tensor) -> Tensor:
        if part.shape == parameter.shape and device == parameter.device:
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False).copy_(part)
        return torch.empty(part.shape, dtype=dtype, device=device).copy_(part)

    return restored


def _state_after_a_step(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """What the optimizer keeps for each of these parameters, as a twin of it has it after a step on zeros."""
    twin = copy.deepcopy(optimizer)
    twin.state.clear()
    twins = dict(zip(_ids_in(optimizer), _parameters_in(twin), strict=True))
    for parameter in twins.values():
        parameter.grad = torch.zeros_like(parameter)
    try:
        twin.step()
    except (TypeError, AttributeError, RuntimeError, KeyError) as error:
        raise NotCarried(
            f"the inner optimizer, {type(optimizer).__name__}, cannot make a step on a copy of itself ({error}), so it "
            'is not known what it keeps for each parameter. Give DiLoCo moments="reset", which carries nothing of it'
        ) from error
    return [dict(twin.state.get(twins[id(one)], {})) if id(one) in twins else {} for one in parameters]


def _parameters_in(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _ids_in(optimizer: torch.optim.Optimizer) -> list[int]:
    return [id(parameter) for parameter in _parameters_in(optimizer)]
