"""The pieces of one operation over a ring, and from which member to which each of them goes."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.allreduce.reduction import lanes
from runtime.allreduce.reduction.schedule import Cut, Fold, pieces
from runtime.allreduce.reduction.topology import Division, divide, topology
from runtime.allreduce.ring.ring import Ring


class PieceRoutes:
    """cuts: of the tensors. piece_bytes: the most that a piece has. All members cut alike."""

    def __init__(self, ring: Ring, cuts: tuple[Cut, ...], piece_bytes: int) -> None:
        self._topology = topology(ring.hosts)
        self._members, self._rank = ring.members, ring.rank
        self._ranks = {member: rank for rank, member in enumerate(ring.members)}
        self.node = self._topology.node_of[ring.rank]
        """The number of this member's node."""
        self.pieces, self.counts = pieces(
            cuts, len(self._topology.slices), lanes.piece_bytes(self._topology.most, piece_bytes)
        )
        """counts: the number of pieces of each slice."""
        self.largest = max((piece.size for piece in self.pieces), default=0)
        """Bytes."""

    @property
    def node_of(self) -> Sequence[int]:
        """The number of the node of each rank."""
        return self._topology.node_of

    def node_of_member(self, worker: str) -> int:
        return self._topology.node_of[self._ranks[worker]]

    def members_of(self, node: int) -> list[str]:
        return [self._members[rank] for rank in self._topology.ranks[node]]

    def is_shared(self, node: int) -> bool:
        """Whether there are several members on it; else the only one sends its terms to owners, as they are."""
        return len(self._topology.ranks[node]) > 1

    def owner(self, of_slice: int) -> str:
        return self._members[self._topology.slices[of_slice].owner]

    def aggregator(self, of_slice: int, node: int) -> str:
        return self._members[self._topology.slices[of_slice].aggregators[node]]

    def takes_terms(self, of_slice: int) -> str:
        """To whom this member sends its terms of a slice; itself if it adds them."""
        return self.aggregator(of_slice, self.node) if self.is_shared(self.node) else self.owner(of_slice)

    def source(self, of_slice: int) -> str:
        """The member that sends the sum of a slice to this one; "" if this member owns the slice."""
        cut = self._topology.slices[of_slice]
        return "" if cut.owner == self._rank else self._members[self._topology.source(cut, self._rank)]

    def recipients(self, of_slice: int) -> list[str]:
        """The members to which this one sends the sum of a slice when it is here."""
        return [self._members[rank] for rank in self._topology.recipients(self._topology.slices[of_slice], self._rank)]

    def divide(self, folds: Sequence[Fold], workers: Sequence[str]) -> Division:
        """The folds over terms of these members, by where they are computed."""
        adds = [len(ranks) > 1 for ranks in self._topology.ranks]
        return divide(folds, [self.node_of_member(worker) for worker in workers], adds)
