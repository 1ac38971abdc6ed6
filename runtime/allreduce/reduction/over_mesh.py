"""One operation over a ring: all members get the headers of all members, and the sum of all their terms.

`exchange` is the canonical reduction: terms are roots of the tree in elastic/protocol/reduction_tree.py and are added
in its order, so the bits depend on nothing but the leaves. With `leaves`, one local sum per member is added in the
order of ranks. headers.py carries the headers, slice_sums.py the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from elastic.errors import Disagree, RingBroken
from runtime.allreduce.reduction.entries import Said, Term
from runtime.allreduce.reduction.flat_pool import CPU
from runtime.allreduce.reduction.headers import HeaderExchange, Headers
from runtime.allreduce.reduction.partial_sum import Json, Partial, as_counts
from runtime.allreduce.reduction.schedule import DTYPES, Cut, Fold, add_metas, fold_terms, in_turn, tensors_of
from runtime.allreduce.reduction.slice_sums import OwnTerms, SliceSums
from runtime.allreduce.ring.frames import Frame, FrameKind, LinkError
from runtime.allreduce.ring.ring import Ring

PIECE_BYTES = 1 << 20
"""Smaller pieces cost more calls, larger ones leave the cache before they are added (docs/decisions/own-mesh.md)."""
_OURS = ("worker_id", "units", "groups", "terms", "held")


@dataclass(slots=True)
class Sums:
    """The result of an operation while it is built. It outlives an exchange that is broken off: the same members go on
    with it. The bits of a sum do not depend on who holds which roots; in native order it has all leaves too.

    out: group -> the sum, a contiguous 1-D CPU tensor of the group's dtype and length. held: slice -> number of its
    pieces, from the first on, that are in out.
    """

    out: dict[str, Tensor]
    held: dict[int, int] = field(default_factory=dict)


def _nothing_to_check(headers: Headers) -> None:
    """A check that headers of every kind pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionRequest:
    """What one member brings to an operation, whatever carries the tensors, and what all members ask for alike.

    op: its number, the same on all members. roots: nodes of the tree over 0..units-1 that this member holds, none if
    idle; they are not changed, and must not change until the operation is over. groups: name -> elements, empty if only
    scalars are reduced. Flats are contiguous 1-D tensors of the group's dtype and length. header: the caller's fields.
    agreed: more of them, that should be the same on all members (headers.py). check gets every member's header by
    worker_id, with the fields worker_id, units and groups added, once all are in and before any sum is used; it must
    not change them. Its exceptions pass through, after this worker's own header was sent.

    leaves: for sums in native order, whose bits change with the world: a member brings at most one root, which is the
    sum of these leaves, any of them, and whose lo and hi are ignored; the roots are added in rank order, and the result
    has the note of the first rank with one.

    merged: for sums in any order: what the member brings in place of its roots' flats, which are not used: one sum, or
    nothing. All members give it, or none does; whoever has a root has a sum.

    cuts: for tensors that this member gets while the operation runs, cut by cut; (): all at once. The same on all
    members, without a gap.

    Raises ValueError for what is no such request.
    """

    op: int
    units: int
    groups: dict[str, int]
    roots: Sequence[Partial]
    header: dict[str, Json] = field(default_factory=dict)
    agreed: dict[str, Json] = field(default_factory=dict)
    check: Callable[[Headers], None] = _nothing_to_check
    leaves: Sequence[int] | None = None
    merged: Sequence[dict[str, Tensor]] | None = None
    cuts: tuple[Cut, ...] = ()

    def __post_init__(self) -> None:
        if self.leaves is not None and (len(self.roots) > 1 or bool(self.roots) != bool(self.leaves)):
            raise ValueError("a sum comes with its leaves, and leaves with their one sum")
        if self.merged is not None and len(self.merged) != tensors_of(len(self.roots), True):
            raise ValueError("whoever has roots brings one sum")
        if taken := (set(self.header) | set(self.agreed)) & set(_OURS):
            raise ValueError(f"header fields {sorted(taken)} are set by the exchange")
        if self.units < 1 or self.op < 0 or set(self.groups) - set(DTYPES):
            raise ValueError(
                f"units={self.units}, op={self.op}, groups={self.groups}: wanted >= 1, >= 0, names in {list(DTYPES)}"
            )

    @property
    def told_groups(self) -> dict[str, Json]:
        """The groups as headers have them, in one order: members compare bytes, and the tensors of a newcomer are those
        of the result that it was sent, in another order than the harvest's."""
        return dict(sorted(self.groups.items()))

    @property
    def flats(self) -> Sequence[dict[str, Tensor]]:
        """The tensors that this member brings."""
        return [root.flats for root in self.roots] if self.merged is None else self.merged

    def said(self) -> ReductionRequest:
        """The same tensors, where the members have got each other's words already."""
        return replace(self, header={}, agreed={}, check=_nothing_to_check)


def exchange(
    ring: Ring,
    request: ReductionRequest,
    *,
    sums: Sums | None = None,
    again: bool = False,
    ready: Callable[[], int] | None = None,
) -> tuple[Headers, Partial]:
    """Reduce the roots of all members along the canonical tree; returns all headers and Partial(0, units).

    The tensors are on the CPU. sums: receives the result, also the part that is there if this raises; None: new
    tensors. again: the same on all members: some may have begun this operation before. Then only pieces that a member
    lacks are sent. ready: how many of the request's cuts, from the first on, its flats have by now; it grows while the
    operation runs, after which the ring has to be woken. None: all of them.

    Raises RingBroken when a peer is gone, the ring is aborted, or the roots do not cover each unit exactly once;
    Disagree when members bring different groups or units. After any exception the ring is unusable, and of the sums
    only what they count as held is defined.
    """
    reduction = MeshReduction(ring, request, sums, again, ready)
    ring.run(reduction)
    return reduction.headers, reduction.result()


class MeshReduction:
    """The ring.Operation of an exchange, with its arguments."""

    def __init__(
        self,
        ring: Ring,
        request: ReductionRequest,
        sums: Sums | None = None,
        again: bool = False,
        ready: Callable[[], int] | None = None,
    ) -> None:
        self._ring, self._request, self._again = ring, request, again
        self._merges = request.merged is not None
        groups = request.groups
        if sums is None:
            sums = Sums({group: torch.empty(length, dtype=DTYPES[group]) for group, length in groups.items()})
        self._out = checked(sums.out, groups, "out")
        self._own = OwnTerms([checked(flats, groups, "root") for flats in request.flats], request.cuts, ready)
        self._sums = SliceSums(ring, request.op, self._own, self._out, sums.held, piece_bytes=PIECE_BYTES, again=again)
        self.brought: list[tuple[int, int]] = []
        """(rank, number among its own) of each tensor, in rank order, once all headers are there."""
        self.folds: Sequence[Fold] = ()
        """Over these tensors."""
        self._meta_folds: Sequence[Fold] = ()
        self.headers: Headers = {}
        fields: dict[str, Json] = {**request.header, "worker_id": ring.me}
        if again:
            fields["held"] = list[Json](self._sums.held)
        agreed = {**request.agreed, "units": request.units, "groups": request.told_groups}
        self._words = HeaderExchange(
            ring, request.op, agreed, fields, request.roots, request.leaves, self._sums.release
        )
        self._words.begin()
        if not again:  # else the headers say from which piece on
            self._sums.open([0] * len(self._sums.routes.counts), self._words.uninformed)

    # ------------------------------------------------------------------------------------ ring.Operation

    @property
    def op(self) -> int:
        return self._request.op

    @property
    def may_gather(self) -> bool:
        return self._own.grows

    def needs(self, peer: str) -> bool:
        return self._sums.sources[peer].left > 0 if self._sums.begun else self._words.awaits(peer)

    def accept(self, peer: str, frame: Frame) -> memoryview | None:
        if frame.kind is FrameKind.HEADER:
            return self._words.accept(peer, frame)
        if self._words.disagree:  # nothing will be summed, and behind this frame comes what that member brings
            if frame.length > PIECE_BYTES:
                raise LinkError(f"{peer} sent {frame.length} bytes for a piece")
            return memoryview(bytearray(frame.length))
        if not self._sums.begun and self._words.awaits_first(peer):
            raise LinkError(f"{peer} sent {frame.kind.name} before its header")
        return self._sums.accept(peer, frame)

    def complete(self, peer: str, frame: Frame, payload: memoryview) -> None:
        if frame.kind is FrameKind.HEADER:
            for worker, agrees, said in self._words.take(peer, payload):
                self._take_header(worker, agrees, said)
        elif not self._words.disagree:
            self._sums.complete(peer, frame)

    def advance(self) -> bool:
        self._sums.look()
        if not self._sums.begun:
            # If the check raises, the others must have what this member passes on to come to the same conclusion.
            if not self._words.complete or any(link.unsent_urgent for link in self._ring.links.values()):
                return False
            headers = self._words.everybodys()
            if headers is None:
                return False
            self.headers = headers
            self._begin_sum()
        return self._sums.advance()

    # --------------------------------------------------------------------------------------------- headers

    def _take_header(self, peer: str, like_us: bool, said: Said) -> None:
        """Raises LinkError."""
        source, terms = self._sums.sources[peer], len(said.terms)
        if like_us and terms > self._request.units:
            raise LinkError(f"{peer} brings {terms} terms for {self._request.units} units")
        if self._again and like_us:
            source.held = self._read_held(peer, said.fields)
        source.terms, source.like_us = tensors_of(terms, self._merges), like_us
        if like_us and not self._again:
            self._sums.expect_terms(peer)

    def _read_held(self, peer: str, fields: dict[str, Json]) -> list[int]:
        counts = self._sums.routes.counts
        try:
            held = as_counts(fields["held"])
        except (TypeError, KeyError) as error:
            raise LinkError(f"{peer} sent a malformed header: {error}") from error
        if len(held) != len(counts) or not all(0 <= of <= most for of, most in zip(held, counts, strict=True)):
            raise LinkError(f"{peer} says that it holds {held} pieces")
        return held

    def _begin_sum(self) -> None:
        ring, request, said = self._ring, self._request, self._words.said
        request.check(self.headers)
        check_alike(self.headers, "groups", "groups", request.groups, request.op)
        check_alike(self.headers, "units", "units", request.units, request.op)
        if self._words.disagree:
            raise Disagree(f"the workers do not agree about operation {request.op}: {self.headers}")
        counts, node_of = [len(said[rank].terms) for rank in range(ring.world_size)], self._sums.routes.node_of
        nodes = [node_of[rank] for rank, count in enumerate(counts) for _ in range(count)]
        try:
            self._meta_folds = fold_terms(self._terms(), request.units, nodes, request.leaves is not None)
        except ValueError as error:
            raise RingBroken(f"operation {request.op} of generation {ring.generation}: {error}") from error
        self.brought = [
            (rank, number) for rank, count in enumerate(counts) for number in range(tensors_of(count, self._merges))
        ]
        self.folds = self._meta_folds
        if self._merges:
            self.folds = in_turn(tuple(node_of[rank] for rank, _ in self.brought))
        self._sums.begin([(ring.members[rank], number) for rank, number in self.brought], self.folds)

    def _terms(self) -> list[Term]:
        return [term for rank in range(self._ring.world_size) for term in self._words.said[rank].terms]

    def result(self) -> Partial:
        """The sum of all terms, once the operation is complete."""
        terms, numbers = self._terms(), []
        for rank in range(self._ring.world_size):
            begin, of_member = 0, self._words.numbers[rank]
            for term in self._words.said[rank].terms:
                numbers.append(of_member[begin : begin + term.numbers])
                begin += term.numbers
        return replace(add_metas(terms, numbers, self._meta_folds), lo=0, hi=self._request.units, flats=self._out)


def check_alike(headers: Headers, field: str, what: str, ours: object, op: int) -> None:
    """Raise Disagree unless all members' headers have this value in this field."""
    values = {worker: header.get(field) for worker, header in headers.items()}
    if any(value != ours for value in values.values()):
        raise Disagree(f"the workers bring different {what} to operation {op}: {values}")


def checked(
    flats: dict[str, Tensor], groups: dict[str, int], what: str, device: torch.device = CPU
) -> dict[str, Tensor]:
    """The tensors, detached. Raises ValueError unless they are those of the operation, on this device."""
    if flats.keys() != groups.keys():
        raise ValueError(f"{what} has groups {sorted(flats)}, the operation {sorted(groups)}")
    for group, flat in flats.items():
        fits = flat.dtype == DTYPES[group] and flat.shape == (groups[group],)
        if not fits or flat.device != device or not flat.is_contiguous():
            raise ValueError(
                f"{what} {group!r} is {flat.dtype} {tuple(flat.shape)} on {flat.device}; "
                f"wanted {DTYPES[group]} ({groups[group]},), contiguous, on {device}"
            )
    return {group: flat.detach() for group, flat in flats.items()}
