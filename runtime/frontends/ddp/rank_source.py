"""The batches of one epoch, for any logical rank, as the pass over a step's shards sees them: shard r is rank r."""

from __future__ import annotations

import contextlib
import enum
import operator
import sys
from abc import ABC, abstractmethod
from typing import Any, cast

import torch

from runtime.allreduce.reduction.partial_sum import Json
from runtime.data.prefetcher import Wanted
from runtime.frontends.ddp.frames.plain_values import Held
from runtime.recovery.state import small_values


class Position:
    """Where the script was when the step in progress began. It is registered, so that newcomers copy it and checkpoints
    have it."""

    def __init__(self) -> None:
        self.batch = 0
        """How many batches of this epoch each rank has had."""
        self.values: dict[str, Held] = {}
        """The values of the script's frames that change while it trains (see frames/plain_values.py)."""
        self.stale: list[int] = []
        """Numbers of the weights that are frozen and have a gradient, which an optimizer goes on with: it is zero, or
        the script has still to drop it."""
        self.copied = False
        """It was, and the script has not got these values yet."""

    def state_dict(self) -> dict[str, Any]:
        # A tensor is packed, as tensors are part of each digest, and these may differ between workers.
        values = {name: _packed(name, value) for name, value in self.values.items()}
        return {"batch": self.batch, "values": values, "stale": self.stale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batch, self.stale, self.copied = state["batch"], state.get("stale", []), True
        self.values = {}
        for name, value in state["values"].items():
            with contextlib.suppress(AttributeError):  # an Enum of a function is another class in each process
                self.values[name] = _unpacked(value)


def _packed(name: str, value: Held) -> Json:
    if isinstance(value, enum.Enum):
        return {"enum": [type(value).__module__, type(value).__qualname__], "member": value.name}
    return small_values.pack(value, name) if isinstance(value, torch.Tensor | list) else value


def _unpacked(value: Any) -> Held:
    """Raises AttributeError for a member of an Enum that has no name here, as in a function."""
    if isinstance(value, dict) and "enum" in value:
        module, name = value["enum"]
        found = operator.attrgetter(name)(sys.modules.get(module))
        if not (isinstance(found, type) and issubclass(found, enum.Enum)) or value["member"] not in found.__members__:
            raise AttributeError(f"{module}.{name} is no Enum with {value['member']}")
        return found[value["member"]]
    return cast(Held, small_values.unpack(value, torch.device)) if isinstance(value, dict) else value


class RankSource(ABC):
    """See Loader, whose methods a pass calls. A step has at least one batch of each rank. used: how many it has had so
    far; before: how many when the pass in progress began."""

    def __init__(self, ranks: int, position: Position) -> None:
        self.shards = ranks
        self.used = self.before = 0
        self._position = position
        self._offered: tuple[tuple[int, int], Any] | None = None

    @abstractmethod
    def __len__(self) -> int:
        """Batches of one rank."""

    @property
    @abstractmethod
    def epoch(self) -> int:
        """The epoch, as the script counts its epochs."""

    @abstractmethod
    def about(self) -> dict[str, Any] | None:
        """All that decides which samples a step has, as JSON; None where that is not known."""

    @abstractmethod
    def samples(self, epoch: int, step: int) -> list[Any]:
        """As Loader.samples, of all that the step in progress has had so far."""

    @abstractmethod
    def fetch(self, number: int, rank: int) -> Any:
        """A rank's batch of that number in the epoch."""

    def fetch_ahead(self, number: int, rank: int, own: tuple[int, ...] | None) -> Any:
        """As `fetch`. own: the ranks of this worker, from which it may be guessed what comes next."""
        return self.fetch(number, rank)

    def close(self) -> None:  # noqa: B027  # a source may have nothing to do
        """End the processes that fetch ahead, if there are any."""

    @property
    def first(self) -> int:
        """Number of the first batch of the step in progress."""
        return self._position.batch

    def end_step(self) -> None:
        """The batches that the step had are used up."""
        self._position.batch += self.used
        self.used = self.before = 0

    @property
    def left(self) -> int:
        """Batches that each rank has behind those which were used."""
        return len(self) - self.first - self.used

    def weight(self, shard: int) -> float:
        """DistributedDataParallel takes the mean over ranks, however many samples each has."""
        return 1.0

    def begin_step(self, epoch: int, step: int) -> None:  # noqa: B027  # a source may have nothing to do
        """Where a step begins is said by `first`."""

    def ends(self, shard: int) -> bool:
        """All know how many batches an epoch has."""
        return False

    def release(self) -> None:  # noqa: B027  # a source may have nothing to do
        """Nothing is open between two batches."""

    def batch(self, wanted: Wanted, own: tuple[int, ...] | None) -> Any:
        """The first batch of a rank in a pass of the step in progress."""
        wish, offered = (self.first + self.before, wanted.shard), self._offered
        self._offered = None
        return offered[1] if offered is not None and offered[0] == wish else self.fetch_ahead(*wish, own)

    def offer(self, number: int, rank: int, own: tuple[int, ...] | None) -> Any:
        """As `fetch_ahead`, of the batch that a pass will probably ask for next."""
        self._offered = ((number, rank), self.fetch_ahead(number, rank, own))
        return self._offered[1]
