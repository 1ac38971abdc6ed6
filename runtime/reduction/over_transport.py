"""The reduction of over_mesh.py, with the tensors over a transport and everything else over the mesh.

Headers, scalars and notes go first, as an operation without groups: after it a member knows all terms of all members,
and so the same list of pieces and of folds. Then the tensors move in rounds, each with the same steps on every member:
all pieces of every slice to the slice's owner, the owner's sum, the sums to all. No confirmation follows: a member that
has the sum keeps it, and members that lack it ask for the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from elastic.errors import Disagree
from runtime.reduction.over_mesh import Headers, exchange
from runtime.reduction.partial_sum import Json, Partial
from runtime.reduction.schedule import (
    DTYPES,
    Fold,
    ScheduledPiece,
    Term,
    add,
    along_tree,
    as_list,
    by_rank,
    parse_term,
    pieces,
)
from runtime.ring.ring import Ring
from runtime.ring.transport import Transport

PIECE_BYTES = 16 << 20
"""Large, because a round costs a call on every member; small compared to a model, because scratch holds many pieces."""
SCRATCH_BYTES = 128 << 20
"""Bytes of one member for the pieces of all others; with many terms the pieces shrink."""
_BULK = "bulk"
"""Header field: the groups of the tensors, which the operation over the mesh does not have."""


def exchange_over(
    ring: Ring,
    *,
    transport: Transport,
    op: int,
    header: dict[str, Json],
    roots: Sequence[Partial],
    units: int,
    groups: dict[str, int],
    check: Callable[[Headers], None],
    out: dict[str, Tensor],
    leaves: Sequence[int] | None = None,
) -> tuple[Headers, Partial]:
    """As over_mesh.exchange, with flats and out on the transport's device; the headers also have the field "bulk".

    Raises what over_mesh.exchange raises; RingBroken also for every error of the transport.
    """
    flats = [_checked(root.flats, groups, out) for root in roots]
    headers, total = exchange(
        ring,
        op=op,
        header={**header, _BULK: dict(groups)},
        roots=[replace(root, flats={}) for root in roots],
        units=units,
        groups={},
        check=_checking(check, groups, op),
        leaves=leaves,
    )
    terms = _terms(headers)
    arrange = along_tree if leaves is None else by_rank
    _move(transport, ring, terms, arrange([term for _, _, term in terms], units), flats, groups, out)
    return headers, replace(total, flats=out)


_Brought = tuple[int, int, Term]
"""Rank of a member, the index of one of its terms, and the term."""


def _checking(check: Callable[[Headers], None], groups: dict[str, int], op: int) -> Callable[[Headers], None]:
    def checked(headers: Headers) -> None:
        check(headers)
        values = {worker: header.get(_BULK) for worker, header in headers.items()}
        if any(value != groups for value in values.values()):
            raise Disagree(f"the workers bring different groups to operation {op}: {values}")

    return checked


def _terms(headers: Headers) -> list[_Brought]:
    """The terms in the order in which over_mesh.py numbers them."""
    return [
        (rank, index, parse_term(meta))
        for rank, header in enumerate(headers.values())
        for index, meta in enumerate(as_list(header["terms"]))
    ]


def _move(
    transport: Transport,
    ring: Ring,
    brought: Sequence[_Brought],
    folds: Sequence[Fold],
    own: Sequence[dict[str, Tensor]],
    groups: dict[str, int],
    out: dict[str, Tensor],
) -> None:
    """Fill out with the sum of all members' terms."""
    me, others = ring.rank, [rank for rank in range(ring.world_size) if rank != ring.rank]
    counts = [sum(rank == holder for holder, _, _ in brought) for rank in range(ring.world_size)]
    # All members must cut alike, so the member with the most to receive decides.
    received = max(sum(counts) - min(counts), 1)
    piece_bytes = max(min(PIECE_BYTES, SCRATCH_BYTES // received) // 8 * 8, 8)
    cut = [pieces(groups, ring.world_size, rank, piece_bytes) for rank in range(ring.world_size)]
    mine = cut[me]
    with transport.attempt():
        scratch = _Scratch(ring, mine, {rank: counts[rank] for rank in others}, out)
        for number in range(max(map(len, cut))):
            piece = mine[number] if number < len(mine) else None
            owners = [rank for rank in others if number < len(cut[rank])]
            for index in range(max(counts)):
                bringing = [rank for rank in others if index < counts[rank]]
                transport.exchange(
                    {rank: _part(own[index], cut[rank][number]) for rank in owners} if index < len(own) else {},
                    {rank: scratch.of(rank, index, piece) for rank in bringing} if piece else {},
                )
            if piece:
                values = [
                    _part(own[index], piece) if rank == me else scratch.of(rank, index, piece)
                    for rank, index, _ in brought
                ]
                add(values, [rank != me for rank, _, _ in brought], folds, _part(out, piece))
            transport.exchange(
                {rank: _part(out, piece) for rank in others} if piece else {},
                {rank: _part(out, cut[rank][number]) for rank in owners},
            )


class _Scratch:
    """Memory for one piece of every term of every other member, reused by each round."""

    def __init__(
        self, ring: Ring, mine: Sequence[ScheduledPiece], counts: dict[int, int], out: dict[str, Tensor]
    ) -> None:
        self._largest = -(-max((piece.size for piece in mine), default=0) // 64) * 64
        terms = sum(counts.values())
        device = next((flat.device for flat in out.values()), torch.device("cpu"))
        if device.type == "cpu":
            # Fresh pages in every step would cost more than the sum.
            memory = ring.scratch("bulk", max(terms * self._largest, 1))
            self._memory = torch.frombuffer(memory, dtype=torch.uint8)
        else:
            self._memory = torch.empty(terms * self._largest, dtype=torch.uint8, device=device)
        self._first = dict(zip(counts, accumulate(counts.values(), initial=0), strict=False))

    def of(self, rank: int, index: int, piece: ScheduledPiece) -> Tensor:
        at = (self._first[rank] + index) * self._largest
        return self._memory[at : at + piece.size].view(DTYPES[piece.group])


def _part(flats: dict[str, Tensor], piece: ScheduledPiece) -> Tensor:
    return flats[piece.group][piece.lo : piece.hi]


def _checked(flats: dict[str, Tensor], groups: dict[str, int], out: dict[str, Tensor]) -> dict[str, Tensor]:
    if not flats.keys() == groups.keys() == out.keys():
        raise ValueError(f"a root has groups {sorted(flats)}, the result {sorted(out)}, the operation {sorted(groups)}")
    for group, elements in groups.items():
        for flat in (flats[group], out[group]):
            fits = flat.dtype == DTYPES[group] and flat.shape == (elements,) and flat.is_contiguous()
            if not fits or flat.device != out[group].device:
                raise ValueError(
                    f"{group!r} is {flat.dtype} {tuple(flat.shape)} on {flat.device}; wanted {DTYPES[group]} "
                    f"({elements},), contiguous, on {out[group].device}"
                )
    return {group: flat.detach() for group, flat in flats.items()}
