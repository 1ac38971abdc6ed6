"""The reduction of over_mesh.py, with the tensors over a transport and everything else over the mesh.

Headers, scalars and notes go first, as an operation without groups: after it a member knows all terms of all members,
and so the same list of pieces and of folds. Then the tensors move in rounds, one for the n-th pieces of all slices,
each with the same steps on every member: the terms of every slice to its aggregators (topology.py), what these add up
to the slice's owner, the sum to the aggregators, and from there to all. No confirmation follows: a member that has the
sum keeps it, and members that lack it ask for the result. Integers, which are added in any order, are left to the
transport if it can add.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import groupby

import torch
from torch import Tensor

from runtime.allreduce.reduction.flat_pool import CPU
from runtime.allreduce.reduction.headers import Headers
from runtime.allreduce.reduction.over_mesh import MeshReduction, ReductionRequest, check_alike, checked
from runtime.allreduce.reduction.partial_sum import Partial, nothing_of
from runtime.allreduce.reduction.schedule import DTYPES, Cut, Fold, ScheduledPiece, add, pieces, whole
from runtime.allreduce.reduction.topology import Topology, divide, topology
from runtime.allreduce.ring.ring import Ring
from runtime.allreduce.ring.transport import Transport

PIECE_BYTES = 16 << 20
"""Large, because a round costs a call on every member; small compared to a model, because scratch holds many pieces."""
SCRATCH_BYTES = 128 << 20
"""Bytes of one member for the pieces of all others; with many terms the pieces shrink."""
_BULK = "bulk"
"""Header field: the groups of the tensors, which the operation over the mesh does not have."""


def exchange_over(
    ring: Ring,
    request: ReductionRequest,
    *,
    transport: Transport,
    out: dict[str, Tensor],
    wait_for: Callable[[int], None] = lambda cut: None,
) -> tuple[Headers, Partial]:
    """As over_mesh.exchange, with flats and out on the transport's device; the headers also have the field "bulk".
    wait_for: returns when this member has its tensors of a cut, or raises.

    Raises what over_mesh.exchange raises; RingBroken also for every error of the transport.
    """
    groups, merged = request.groups, request.merged
    device = next((flat.device for flat in out.values()), CPU)
    checked(out, groups, "out", device)
    flats = [checked(each, groups, "root", device) for each in request.flats]
    without_tensors = replace(
        request,
        groups={},
        roots=[replace(root, flats={}) for root in request.roots],
        merged=None if merged is None else [{} for _ in merged],
        agreed={**request.agreed, _BULK: request.told_groups},
        check=partial(_check_all, request),
        cuts=(),
    )
    mesh = MeshReduction(ring, without_tensors)
    ring.run(mesh)
    with transport.attempt():
        if merged is not None and transport.adds:
            for number, cut in enumerate(request.cuts or whole(out)):
                wait_for(number)
                parts = [out[group][lo:hi] for group, lo, hi in cut]
                for part, (group, lo, hi) in zip(parts, cut, strict=True):
                    part.copy_(flats[0][group][lo:hi]) if flats else part.fill_(nothing_of(part.dtype))
                transport.add_up(parts)
        else:
            mover = _Mover(ring, mesh.brought, mesh.folds, flats, request.cuts or whole(out), out)
            for (number, _), round_of in groupby(mover.pieces, lambda piece: (piece.cut, piece.number)):
                wait_for(number)
                mover.round(transport, list(round_of))
    return mesh.headers, replace(mesh.result(), flats=out)


def _check_all(request: ReductionRequest, headers: Headers) -> None:
    request.check(headers)
    check_alike(headers, _BULK, "groups", request.groups, request.op)


class _Mover:
    """Fills out with the sum of all members' terms."""

    def __init__(
        self,
        ring: Ring,
        brought: Sequence[tuple[int, int]],
        folds: Sequence[Fold],
        own: Sequence[dict[str, Tensor]],
        cuts: tuple[Cut, ...],
        out: dict[str, Tensor],
    ) -> None:
        self._ring, self._own, self._out = ring, own, out
        self._topology = topology(ring.hosts)
        self._node = self._topology.node_of[ring.rank]
        self._brought = brought
        nodes = [self._topology.node_of[rank] for rank, _ in self._brought]
        adds = [len(ranks) > 1 for ranks in self._topology.ranks]
        division = divide(folds, nodes, adds)
        self._nodes, self._folds_at_owner = division.nodes, division.at_owner(self._node)
        self._counts = [sum(rank == holder for holder, _ in self._brought) for rank in range(ring.world_size)]
        self._leave_most = max(len(node.leave) for node in self._nodes)
        # All members must cut alike, so the most that any of them may have to keep decides.
        kept = self._topology.most * (len(self._brought) + self._leave_most * len(self._nodes))
        size = max(min(PIECE_BYTES, SCRATCH_BYTES // kept) // 8 * 8, 8)
        self.pieces, _ = pieces(cuts, len(self._topology.slices), size)
        self._scratch = _Scratch(ring, max((piece.size for piece in self.pieces), default=0), out)

    def round(self, transport: Transport, cut: Sequence[ScheduledPiece]) -> None:
        """Sum one piece of each slice, or of each slice that is long enough."""
        me, slices, self._scratch.used = self._ring.rank, self._topology.slices, 0
        near = [rank for rank in self._topology.ranks[self._node] if rank != me]
        hops = _hops(self._topology, tuple(piece.slice for piece in cut))
        aggregated = [piece for piece in cut if slices[piece.slice].aggregators[self._node] == me]
        terms: dict[tuple[int, int, int], Tensor] = {}
        """(slice, rank, index), or (slice, ~node, index) of what leaves a node."""

        move = _Move()
        for piece in cut:
            to = slices[piece.slice].aggregators[self._node] if near else slices[piece.slice].owner
            if to != me:
                move.sends[to] += [_part(flats, piece) for flats in self._own]
        for piece in aggregated:
            owned = slices[piece.slice].owner == me
            alone = [
                ranks[0] for node, ranks in enumerate(self._topology.ranks) if len(ranks) == 1 and node != self._node
            ]
            for rank in near + (alone if owned else []):
                node = self._topology.node_of[rank]
                for index in range(self._counts[rank]):
                    # What a member that is alone on its node sends is what leaves the node.
                    key = (piece.slice, rank if node == self._node else ~node, index)
                    terms[key] = self._scratch.take(piece)
                    move.receives[rank].append(terms[key])
        move.run(transport, hops.terms * max(self._counts))

        move = _Move()
        for piece in aggregated:
            cut_of = slices[piece.slice]
            if cut_of.owner != me:
                if near:
                    move.sends[cut_of.owner] += self._leaving(piece, terms)
                continue
            for node, rank in enumerate(cut_of.aggregators):
                if node != self._node and len(self._topology.ranks[node]) > 1:
                    for index in range(len(self._nodes[node].leave)):
                        value = terms[piece.slice, ~node, index] = self._scratch.take(piece)
                        move.receives[rank].append(value)
        move.run(transport, hops.leaving * self._leave_most)

        move = _Move()
        for piece in aggregated:
            cut_of = slices[piece.slice]
            if cut_of.owner != me:
                move.receives[cut_of.owner].append(_part(self._out, piece))
                continue
            values, free = self._values_of_node(piece, terms)
            for node, folds in enumerate(self._nodes):
                if node != self._node:
                    values += [terms[piece.slice, ~node, index] for index in range(len(folds.leave))]
            free += [True] * (len(values) - len(free))
            last = len(values) + len(self._folds_at_owner) - 1
            add(values, free, self._folds_at_owner, {last: _part(self._out, piece)})
            for node, rank in enumerate(cut_of.aggregators):
                if node != self._node:
                    move.sends[rank].append(_part(self._out, piece))
        move.run(transport, hops.sums)

        move = _Move()
        for piece in cut if near else ():
            rank = slices[piece.slice].aggregators[self._node]
            if rank != me:
                move.receives[rank].append(_part(self._out, piece))
                continue
            for other in near:
                move.sends[other].append(_part(self._out, piece))
        move.run(transport, hops.within)

    def _values_of_node(
        self, piece: ScheduledPiece, terms: dict[tuple[int, int, int], Tensor]
    ) -> tuple[list[Tensor], list[bool]]:
        """The terms of this node's members, and whether each may be overwritten: scratch, not a root."""
        values, free = [], []
        for rank, index in (self._brought[position] for position in self._nodes[self._node].terms):
            free.append(rank != self._ring.rank)
            values.append(terms[piece.slice, rank, index] if free[-1] else _part(self._own[index], piece))
        return values, free

    def _leaving(self, piece: ScheduledPiece, terms: dict[tuple[int, int, int], Tensor]) -> list[Tensor]:
        """What this node adds up for the owner of a slice."""
        node = self._nodes[self._node]
        found = [self._scratch.take(piece) for _ in node.leave]
        add(*self._values_of_node(piece, terms), node.folds, dict(zip(node.leave, found, strict=True)))
        return found


@dataclass(slots=True)
class _Move:
    """Tensors by rank; the n-th one that goes to a rank is the n-th one that it receives."""

    sends: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    receives: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))

    def run(self, transport: Transport, calls: int) -> None:
        """calls: the same on all members, and at least as many as any two have tensors for each other."""
        for number in range(calls):
            transport.exchange(
                {rank: tensors[number] for rank, tensors in self.sends.items() if number < len(tensors)},
                {rank: tensors[number] for rank, tensors in self.receives.items() if number < len(tensors)},
            )


@dataclass(frozen=True, slots=True)
class _Hops:
    """How many pieces of one round any two members have for each other, at most, on each part of the way: terms to an
    aggregator, what leaves a node to the owner, the sum to the aggregators, the sum within a node."""

    terms: int
    leaving: int
    sums: int
    within: int


@lru_cache(maxsize=64)
def _hops(of: Topology, slices: tuple[int, ...]) -> _Hops:
    cuts = [of.slices[number] for number in slices]
    shared = [len(ranks) > 1 for ranks in of.ranks]
    within = Counter(rank for cut in cuts for node, rank in enumerate(cut.aggregators) if shared[node])
    alone = Counter(cut.owner for cut in cuts) if not all(shared) and len(of.ranks) > 1 else Counter[int]()
    between = [
        (node, cut.owner, rank)
        for cut in cuts
        for node, rank in enumerate(cut.aggregators)
        if node != of.node_of[cut.owner]
    ]
    leaving = Counter((owner, rank) for node, owner, rank in between if shared[node])
    sums = Counter((owner, rank) for _, owner, rank in between)
    return _Hops(*(max(counts.values(), default=0) for counts in (within | alone, leaving, sums, within)))


class _Scratch:
    """Memory for what a member receives or adds up in one round, used again by each round."""

    def __init__(self, ring: Ring, largest: int, out: dict[str, Tensor]) -> None:
        self._ring = ring
        self._each = -(-largest // 64) * 64
        self._device = next((flat.device for flat in out.values()), CPU)
        self._memory: list[Tensor] = []
        self.used = 0

    def take(self, piece: ScheduledPiece) -> Tensor:
        if self.used == len(self._memory):
            if self._device.type == "cpu":
                # Fresh pages in every step would cost more than the sum.
                memory = self._ring.scratch(f"bulk {self.used}", self._each)
                self._memory.append(torch.frombuffer(memory, dtype=torch.uint8))
            else:
                self._memory.append(torch.empty(self._each, dtype=torch.uint8, device=self._device))
        self.used += 1
        return self._memory[self.used - 1][: piece.size].view(DTYPES[piece.group])


def _part(flats: dict[str, Tensor], piece: ScheduledPiece) -> Tensor:
    return flats[piece.group][piece.lo : piece.hi]
