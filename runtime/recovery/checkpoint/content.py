"""The content of a checkpoint: everything registered, divided into the parts that the members write."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Self

from elastic.checkpoints.description import unique_names
from elastic.checkpoints.partition import share
from runtime.allreduce.reduction.partial_sum import Json
from runtime.recovery.checkpoint.stager import Copied, Staged, Stager
from runtime.recovery.state.encoding import NamedTensor

if TYPE_CHECKING:
    from runtime.recovery.state.training_state import Carrier


@dataclass(frozen=True, slots=True)
class Content:
    """The state of this moment. tensors: the registered tensors themselves, in the order of the header."""

    header: dict[str, Json]
    tensors: list[NamedTensor]

    @classmethod
    def of(cls, carrier: Carrier) -> Self:
        """The content of everything registered. Raises NotCarried."""
        header, tensors = carrier.describe()
        names = unique_names([name for name, _ in tensors])
        return cls(header, list(zip(names, (tensor for _, tensor in tensors), strict=True)))

    @property
    def sizes(self) -> list[int]:
        """Bytes of each tensor."""
        return [tensor.numel() * tensor.element_size() for _, tensor in self.tensors]

    def stage(self, stager: Stager, ranks: list[int], world: int) -> tuple[dict[int, list[Staged]], Copied]:
        """Copies of the parts of these ranks, by rank."""
        shapes, sizes = [tuple(tensor.shape) for _, tensor in self.tensors], self.sizes
        shares = [share(shapes, sizes, rank, world) for rank in ranks]
        staged, copied = stager.stage(self.tensors, [rows for rows_of_one in shares for rows in rows_of_one])
        pieces = iter(staged)
        return {rank: list(islice(pieces, len(rows))) for rank, rows in zip(ranks, shares, strict=True)}, copied


def now() -> str:
    """The time of day for manifests, ISO 8601 in UTC, for people."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
