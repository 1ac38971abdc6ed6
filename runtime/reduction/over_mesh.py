"""One operation over a ring: all members get the headers of all members, and the sum of all their terms.

`exchange` is the canonical reduction: terms are roots of the tree in elastic/protocol/reduction_tree.py and are added
in its order, so the bits depend on nothing but the leaves. `exchange_native` adds one local sum per member in rank
order.

Each member owns a slice of every group and receives that slice of every term (scatter), adds, and sends the sum to all
(gather). The slices are sent in pieces, and a piece is added and sent on as soon as it has arrived, while it is still
in the processor's cache: receiving, adding and sending overlap. With one term per member this moves 2 * (P - 1) / P
bytes per byte and member, which is the optimum (Patarasuk & Yuan 2009).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from elastic.errors import Disagree, RingBroken
from runtime.reduction.partial_sum import Json, Partial
from runtime.reduction.schedule import (
    DTYPES,
    Fold,
    ScheduledPiece,
    Term,
    add,
    add_metas,
    along_tree,
    as_list,
    by_rank,
    parse_term,
    pieces,
)
from runtime.ring.frames import Frame, FrameKind, LinkError, Payload
from runtime.ring.ring import Ring

Headers: TypeAlias = dict[str, dict[str, Json]]

PIECE_BYTES = 1 << 20
"""Smaller pieces cost more calls, larger ones leave the cache before they are added (docs/decisions/own-mesh.md)."""
MAX_HEADER_BYTES = 64 << 20
_WINDOW = 4
"""How many pieces of a term a peer may be ahead of the sum, so that memory does not grow with the model."""
_SCRATCH_BYTES = 32 << 20
"""Bytes of scratch per peer; with many terms the window shrinks, at worst to one piece of each."""
_OURS = ("worker_id", "generation", "op", "units", "groups", "terms", "held")


@dataclass(slots=True)
class Sums:
    """The result of an operation while it is built. It outlives an exchange that is broken off: the same members go on
    with it. The bits of a sum do not depend on who holds which roots; in native order it has all leaves too.

    out: group -> the sum, a contiguous 1-D CPU tensor of the group's dtype and length. held: member -> number of pieces
    of its slice, from the first on, that are in out.
    """

    out: dict[str, Tensor]
    held: dict[str, int] = field(default_factory=dict)


def exchange(
    ring: Ring,
    *,
    op: int,
    header: dict[str, Json],
    roots: Sequence[Partial],
    units: int,
    groups: dict[str, int],
    check: Callable[[Headers], None],
    leaves: Sequence[int] | None = None,
    sums: Sums | None = None,
    again: bool = False,
) -> tuple[Headers, Partial]:
    """Reduce the roots of all members along the canonical tree; returns all headers and Partial(0, units).

    roots: nodes of the tree over 0..units-1 that this member holds, none if idle; they are not changed, and must not
    change until this returns or raises. groups: name -> elements, empty if only scalars are reduced. flats are
    contiguous 1-D CPU tensors of the group's dtype and length. header: the caller's fields; check gets every member's
    header by worker_id, with the fields worker_id, generation, op, units, groups, terms (Partial.meta of each root)
    added, once all are in and before any sum is used. Exceptions of check pass through, after this worker's own header
    was sent. sums: receives the result, also the part that is there if this raises; None: new tensors. again: the same
    on all members: some may have begun this operation before. Then only pieces that a member lacks are sent.

    leaves: for sums in native order, whose bits change with the world: a member brings at most one root, which is the
    sum of these leaves, any of them, and whose lo and hi are ignored; the roots are added in rank order, and the result
    has the note of the first rank with one.

    Raises RingBroken when a peer is gone, the ring is aborted, or the roots do not cover each unit exactly once;
    Disagree when members bring different groups or units. After any exception the ring is unusable, and of the sums
    only what they count as held is defined.
    """
    metas = [root.meta() for root in roots]
    if leaves is not None:
        if len(roots) > 1 or bool(roots) != bool(leaves):
            raise ValueError("a sum comes with its leaves, and leaves with their one sum")
        metas = [{**meta, "leaves": list[Json](sorted(leaves))} for meta in metas]
    arrange = along_tree if leaves is None else by_rank
    reduction = _Reduction(ring, op, header, roots, metas, units, groups, check, arrange, sums, again)
    ring.run(reduction)
    return reduction.headers, reduction.result()


@dataclass(slots=True)
class _From:
    """What has come from one peer. Frames come in the order of (piece, term)."""

    terms: int = 0
    scattered: int = 0
    term: int = 0
    gathered: int = 0
    window: int = _WINDOW
    slots: list[tuple[memoryview, Tensor]] = field(default_factory=list)
    like_us: bool = False
    held: list[int] = field(default_factory=list)
    """By rank: how many pieces of each slice the peer had when it began."""

    def slot(self, piece: int, term: int) -> tuple[memoryview, Tensor]:
        return self.slots[(piece % self.window) * self.terms + term]


class _Reduction:
    """The ring.Operation of both variants."""

    def __init__(
        self,
        ring: Ring,
        op: int,
        header: dict[str, Json],
        own: Sequence[Partial],
        metas: Sequence[dict[str, Json]],
        units: int,
        groups: dict[str, int],
        check: Callable[[Headers], None],
        arrange: Callable[[Sequence[Term], int], list[Fold]],
        sums: Sums | None,
        again: bool,
    ) -> None:
        self._ring, self._op, self._units, self._groups = ring, op, units, groups
        self._check, self._arrange = check, arrange
        if taken := set(header) & set(_OURS):
            raise ValueError(f"header fields {sorted(taken)} are set by the exchange")
        if units < 1 or op < 0 or set(groups) - set(DTYPES):
            raise ValueError(f"units={units}, op={op}, groups={groups}: wanted >= 1, >= 0, names in {list(DTYPES)}")
        if sums is None:
            sums = Sums({group: torch.empty(length, dtype=DTYPES[group]) for group, length in groups.items()})
        self._own = [_checked(partial.flats, groups, "root") for partial in own]
        self._out = _checked(sums.out, groups, "out")
        self._out_bytes = {group: _bytes(flat) for group, flat in self._out.items()}
        self._pieces = [pieces(groups, ring.world_size, rank, PIECE_BYTES) for rank in range(ring.world_size)]
        self._mine = self._pieces[ring.rank]
        self._again, self._held = again, sums.held
        if not again:
            self._held.clear()
        self._summed = self._held.get(ring.me, 0)
        self._peers = {
            peer: _From(scattered=self._summed, gathered=self._held.get(peer, 0), held=[0] * ring.world_size)
            for peer in ring.links
        }
        self._ready = False
        self._terms: list[Term] = []
        self._places: list[tuple[str, int]] = []
        self._folds: list[Fold] = []
        self.headers: Headers = {}
        self._start(header, metas)

    def _start(self, header: dict[str, Json], metas: Sequence[dict[str, Json]]) -> None:
        ring = self._ring
        fields: dict[str, Json] = {
            **header,
            "worker_id": ring.me,
            "generation": ring.generation,
            "op": self._op,
            "units": self._units,
            "groups": dict(self._groups),
            "terms": list(metas),
        }
        if self._again:
            fields["held"] = [self._held.get(member, 0) for member in ring.members]
        encoded = json.dumps(fields, separators=(",", ":")).encode()
        if len(encoded) > MAX_HEADER_BYTES:
            raise ValueError(f"header of {len(encoded)} bytes, at most {MAX_HEADER_BYTES} allowed")
        # All members must fold the same values, so this one reads its own header as the others do.
        self.headers[ring.me] = json.loads(encoded)
        for peer, link in ring.links.items():
            link.send(Frame(FrameKind.HEADER, ring.generation, self._op, len(encoded)), encoded)
            if not self._again:  # else the peer's header says from which piece on
                link.send_bulk(self._scatter(peer, 0))

    def _scatter(self, peer: str, first: int) -> Iterator[tuple[Frame, Payload]]:
        generation = self._ring.generation
        flats = [{group: _bytes(flat) for group, flat in own.items()} for own in self._own]
        for number, piece in enumerate(self._pieces_of(peer)[first:], first):
            for term, flat in enumerate(flats):
                frame = Frame(FrameKind.SCATTER, generation, self._op, piece.size, term, number)
                yield frame, _part(flat, piece)

    # ------------------------------------------------------------------------------------ ring.Operation

    @property
    def op(self) -> int:
        return self._op

    def needs(self, peer: str) -> bool:
        source = self._peers[peer]
        if not self._ready:
            return peer not in self.headers
        scattered = source.scattered == len(self._mine) or not source.terms
        return not scattered or source.gathered < len(self._pieces_of(peer))

    def accept(self, peer: str, frame: Frame) -> memoryview | None:
        source = self._peers[peer]
        if frame.kind is FrameKind.HEADER:
            if peer in self.headers or frame.length > MAX_HEADER_BYTES:
                raise LinkError(f"{peer} sent a header of {frame.length} bytes that was not expected")
            return memoryview(bytearray(frame.length))
        if peer not in self.headers:
            raise LinkError(f"{peer} sent {frame.kind.name} before its header")
        if not (self._ready or source.like_us):
            return None
        if frame.kind is FrameKind.SCATTER:
            return self._accept_scatter(peer, source, frame)
        if frame.piece != source.gathered or frame.piece >= len(self._pieces_of(peer)):
            raise LinkError(f"{peer} sent sum {frame.piece}, expected {source.gathered}")
        piece = self._pieces_of(peer)[frame.piece]
        if frame.length != piece.size:
            raise LinkError(f"{peer} sent {frame.length} bytes for a sum of {piece.size}")
        return _part(self._out_bytes, piece) if self._ready else None

    def _accept_scatter(self, peer: str, source: _From, frame: Frame) -> memoryview | None:
        expected = (source.scattered, source.term)
        if (frame.piece, frame.term) != expected or not source.terms or frame.piece >= len(self._mine):
            raise LinkError(
                f"{peer} sent piece {frame.piece} of term {frame.term}, expected {source.scattered} of {source.term}"
            )
        piece = self._mine[frame.piece]
        if frame.length != piece.size:
            raise LinkError(f"{peer} sent {frame.length} bytes for a piece of {piece.size}")
        if frame.piece >= self._summed + source.window:
            return None
        return source.slot(frame.piece, frame.term)[0][: piece.size]

    def complete(self, peer: str, frame: Frame, payload: memoryview) -> None:
        source = self._peers[peer]
        if frame.kind is FrameKind.HEADER:
            self._take_header(peer, source, payload)
        elif frame.kind is FrameKind.GATHER:
            source.gathered += 1
            self._held[peer] = source.gathered
        else:
            source.term += 1
            if source.term == source.terms:
                source.scattered, source.term = source.scattered + 1, 0

    def advance(self) -> bool:
        if not self._ready:
            if len(self.headers) < self._ring.world_size:
                return False
            # If the check raises, the others must have this header to come to the same conclusion.
            if any(link.unsent_urgent for link in self._ring.links.values()):
                return False
            self._begin_sum()
        arrived = min((peer.scattered for peer in self._peers.values() if peer.terms), default=len(self._mine))
        while self._summed < arrived:
            self._sum(self._summed)
            self._summed += 1
            self._held[self._ring.me] = self._summed
        return self._summed == len(self._mine) and not any(self.needs(peer) for peer in self._peers)

    # --------------------------------------------------------------------------------------------- headers

    def _take_header(self, peer: str, source: _From, payload: memoryview) -> None:
        try:
            header = json.loads(bytes(payload))
            if (header["worker_id"], header["generation"], header["op"]) != (peer, self._ring.generation, self._op):
                raise ValueError("it speaks for another worker or operation")
            terms = [parse_term(meta) for meta in as_list(header["terms"])]
            groups = {str(group): int(length) for group, length in header["groups"].items()}
            units = int(header["units"])
            held = [int(count) for count in header["held"]] if self._again else source.held
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise LinkError(f"{peer} sent a malformed header: {error}") from error
        if len(terms) > units:
            raise LinkError(f"{peer} brings {len(terms)} terms for {units} units")
        if len(held) != self._ring.world_size or not all(
            0 <= count <= len(pieces) for count, pieces in zip(held, self._pieces, strict=True)
        ):
            raise LinkError(f"{peer} says that it holds {held} pieces")
        self.headers[peer] = header
        source.terms, source.held = len(terms), held
        source.like_us = groups == self._groups and units == self._units
        if source.like_us and terms and self._mine:
            self._make_slots(peer, source)
        if self._again:
            self._ring.links[peer].send_bulk(self._scatter(peer, held[self._ring.members.index(peer)]))

    def _make_slots(self, peer: str, source: _From) -> None:
        largest = max(piece.size for piece in self._mine)
        affordable = _SCRATCH_BYTES // (largest * source.terms)
        source.window = max(1, min(_WINDOW, affordable, len(self._mine)))
        count = source.window * source.terms
        memory = self._ring.scratch(peer, count * largest)
        for start in range(0, count * largest, largest):
            part = memory[start : start + largest]
            source.slots.append((part, torch.frombuffer(part, dtype=torch.uint8)))

    def _begin_sum(self) -> None:
        self.headers = {worker: self.headers[worker] for worker in self._ring.members}
        self._check(self.headers)
        for name, ours in (("groups", self._groups), ("units", self._units)):
            values = {worker: header[name] for worker, header in self.headers.items()}
            if any(value != ours for value in values.values()):
                raise Disagree(f"the workers bring different {name} to operation {self._op}: {values}")
        for worker in self._ring.members:
            for index, meta in enumerate(as_list(self.headers[worker]["terms"])):
                self._terms.append(parse_term(meta))
                self._places.append((worker, index))
        try:
            self._folds = self._arrange(self._terms, self._units)
        except ValueError as error:
            raise RingBroken(f"operation {self._op} of generation {self._ring.generation}: {error}") from error
        self._ready = True
        for number in range(self._summed):
            self._tell(number)

    # ------------------------------------------------------------------------------------------------- sum

    def _sum(self, number: int) -> None:
        """Add one piece of this worker's slice over all terms into out, and send it to all members."""
        piece = self._mine[number]
        target = self._out[piece.group][piece.lo : piece.hi]
        values: list[Tensor] = []
        ours: list[bool] = []
        """Whether a value may be overwritten: scratch, not a root."""
        for worker, index in self._places:
            values.append(self._value(worker, index, number, piece))
            ours.append(worker != self._ring.me)
        add(values, ours, self._folds, target)
        self._tell(number)

    def _tell(self, number: int) -> None:
        """Send the sum of a piece of this worker's slice to all members that lack it."""
        piece = self._mine[number]
        frame = Frame(FrameKind.GATHER, self._ring.generation, self._op, piece.size, 0, number)
        payload = _part(self._out_bytes, piece)
        for peer, link in self._ring.links.items():
            if number >= self._peers[peer].held[self._ring.rank]:
                link.send(frame, payload)

    def _value(self, worker: str, index: int, number: int, piece: ScheduledPiece) -> Tensor:
        if worker == self._ring.me:
            return self._own[index][piece.group][piece.lo : piece.hi]
        slot = self._peers[worker].slot(number, index)[1]
        return slot[: piece.size].view(DTYPES[piece.group])

    def result(self) -> Partial:
        """The sum of all terms, once the operation is complete."""
        total = add_metas(self._terms, self._folds)
        return Partial(0, self._units, self._out, total.has_grad, total.weight, total.scalars, total.note)

    def _pieces_of(self, peer: str) -> list[ScheduledPiece]:
        return self._pieces[self._ring.members.index(peer)]


def _checked(flats: dict[str, Tensor], groups: dict[str, int], what: str) -> dict[str, Tensor]:
    if flats.keys() != groups.keys():
        raise ValueError(f"{what} has groups {sorted(flats)}, the operation {sorted(groups)}")
    for group, flat in flats.items():
        fits = flat.dtype == DTYPES[group] and flat.shape == (groups[group],)
        if not fits or flat.device.type != "cpu" or not flat.is_contiguous():
            raise ValueError(
                f"{what} {group!r} is {flat.dtype} {tuple(flat.shape)} on {flat.device}; "
                f"wanted {DTYPES[group]} ({groups[group]},), contiguous, on cpu"
            )
    return {group: flat.detach() for group, flat in flats.items()}


def _bytes(flat: Tensor) -> memoryview:
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _part(flats: dict[str, memoryview], piece: ScheduledPiece) -> memoryview:
    itemsize = DTYPES[piece.group].itemsize
    return flats[piece.group][piece.lo * itemsize : piece.hi * itemsize]
