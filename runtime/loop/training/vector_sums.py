"""Sums of tensors that each worker brings once, such as the gradients of a script that reduces them by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

from runtime.allreduce.reduction.flat_pool import Flats
from runtime.allreduce.reduction.leaves.unpacked_leaf import Loose
from runtime.allreduce.reduction.partial_sum import Partial
from runtime.loop.training.calls import Calls, empty_leaf
from runtime.session import OpKind

R = TypeVar("R")

KEPT_ELEMENTS_MIN = 1 << 18
"""Of larger sums memory is kept: a script that sums its gradients does so in each step."""


class VectorSums:
    """Used by the thread of the script only."""

    def __init__(self, calls: Calls, device: torch.device) -> None:
        """device: where sums are computed."""
        self._calls, self._device = calls, device
        self._rooms: dict[str, tuple[list[torch.Size], Flats]] = {}
        """dtype group -> shapes of the last large sum, and its memory."""

    def sum(
        self,
        label: str,
        workers: int,
        own: Mapping[str, Sequence[torch.Tensor]],
        reply: Callable[[dict[str, torch.Tensor], int], R],
    ) -> R:
        """own: dtype group -> tensors of that dtype that this worker brings, one behind the other; they must not change
        meanwhile. A lost worker's are missing. reply: makes of the sums, which are lent to it, and of how many workers
        have brought theirs, what is returned. Raises Disagree, LeaderOnly, LeftAlone."""
        counted = next(iter(own))
        brought = {
            group: [*parts, parts[0].new_ones(1)] if group == counted else list(parts) for group, parts in own.items()
        }
        sizes = {group: sum(part.numel() for part in parts) for group, parts in brought.items()}
        done: list[int] = []

        def leaf(unit: int) -> Partial:
            """The first unit that this worker is given carries its tensors. Others are those of lost workers."""
            first = not done or done[0] == unit
            done[:] = done or [unit]
            found = empty_leaf(unit)
            for group, parts in brought.items():
                if not first:
                    found.flats[group] = parts[0].new_zeros(sizes[group], device=self._device)
                elif self._stays_loose(parts, sizes[group]):
                    found.loose[group] = Loose(parts, self._room(group, parts, sizes[group]))
                else:
                    found.flats[group] = torch.cat([part.reshape(-1) for part in parts]).to(self._device)
            return found

        def replied(flats: dict[str, torch.Tensor]) -> R:
            return reply({**flats, counted: flats[counted][:-1]}, round(float(flats[counted][-1])))

        return self._calls.vectors(OpKind.ALLREDUCE, label, workers, leaf, sizes, replied)

    def _stays_loose(self, parts: Sequence[torch.Tensor], elements: int) -> bool:
        on_cpu = self._device.type == "cpu" and all(part.device.type == "cpu" for part in parts)
        return on_cpu and elements >= KEPT_ELEMENTS_MIN

    def _room(self, group: str, parts: Sequence[torch.Tensor], elements: int) -> Flats:
        shapes = [part.shape for part in parts]
        if group not in self._rooms or self._rooms[group][0] != shapes:
            like = [torch.empty(1).expand(shape) for shape in shapes]  # of shapes alone, without their memory
            self._rooms[group] = shapes, Flats(parts[0].dtype, elements, like=like)
        return self._rooms[group][1]
