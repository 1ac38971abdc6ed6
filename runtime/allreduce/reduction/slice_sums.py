"""The tensors of one operation over a ring: which terms a member sends, which it adds, and where the sums go.

topology.py says who sums which slice, routes.py from whom to whom its pieces go. The terms of a slice go to its
aggregator on each node, what remains of them after the aggregators' folds goes to the slice's owner (scatter), and the
sum goes back on the same way (gather). Slices are sent in pieces, and a piece is added and sent on as soon as it has
arrived, while it is still in the processor's cache: receiving, adding and sending overlap. With one term per member and
one node this moves 2 * (P - 1) / P bytes per byte and member, which is the optimum (Patarasuk & Yuan 2009).

All members treat pieces in the same order (schedule.pieces). So the first piece that is not complete on all members
waits only for its own terms, even if other frames wait behind it in a stream. So members cannot wait for each other in
a circle.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.allreduce.reduction import lanes
from runtime.allreduce.reduction.lanes import Lane, LeavingPiece
from runtime.allreduce.reduction.routes import PieceRoutes
from runtime.allreduce.reduction.schedule import DTYPES, Cut, Fold, ScheduledPiece, add, whole
from runtime.allreduce.reduction.topology import divide
from runtime.allreduce.ring.frames import Frame, FrameKind, LinkError, Payload
from runtime.allreduce.ring.ring import Ring


@dataclass(slots=True)
class Source:
    """What one peer brings to an operation, and what has come of it."""

    terms: int = 0
    """How many tensors of each group it sends."""
    like_us: bool = False
    """Whether its header is there, and agrees with this member's."""
    held: Sequence[int] = ()
    """By slice: how many of its pieces the peer had when it began."""
    left: int = 0
    """How many frames still have to come from it, once all headers are there."""


class OwnTerms:
    """The tensors that this member brings, as far as it has them yet. flats: of each of its terms, by group; contiguous
    1-D CPU tensors. cuts: their parts; (): one with all. ready: how many of the cuts, from the first on, are there; it
    grows while the operation runs, after which the ring has to be woken. None: all of them."""

    def __init__(
        self, flats: Sequence[dict[str, Tensor]], cuts: tuple[Cut, ...] = (), ready: Callable[[], int] | None = None
    ) -> None:
        self._flats, self.cuts, self._ready = flats, cuts, ready
        self._bytes = [{group: _bytes(flat) for group, flat in of_term.items()} for of_term in flats]
        self._cuts = len(cuts) or 1
        self._there = self._cuts if ready is None else ready()
        """How many cuts are there, as far as was looked."""

    @property
    def grows(self) -> bool:
        """Whether more cuts come later, as far as was looked."""
        return self._there < self._cuts

    def look(self) -> bool:
        """Whether more is there than at the last look."""
        if self._ready is None or (there := self._ready()) <= self._there:
            return False
        self._there = there
        return True

    def has(self, piece: ScheduledPiece) -> bool:
        return piece.cut < self._there

    def values(self, term: int, piece: ScheduledPiece) -> Tensor:
        return self._flats[term][piece.group][piece.lo : piece.hi]

    def payloads(self, piece: ScheduledPiece) -> Iterator[memoryview]:
        """The bytes of a piece of each term."""
        return (_part(of_term, piece) for of_term in self._bytes)


class SliceSums:
    """One member's part. out: gets the sum; contiguous 1-D CPU tensors of the groups' dtypes and lengths. held: slice
    -> number of its pieces, from the first on, that are in out; kept up to date. again: some may have begun this
    operation before: only pieces that a member lacks are sent.

    Terms are sent before all headers are there: `open`, `expect_terms` with each header, then `begin`.
    """

    def __init__(
        self,
        ring: Ring,
        op: int,
        own: OwnTerms,
        out: dict[str, Tensor],
        held: dict[int, int],
        *,
        piece_bytes: int,
        again: bool,
    ) -> None:
        self._ring, self._op, self._own, self._out, self._again = ring, op, own, out, again
        self._out_bytes = {group: _bytes(flat) for group, flat in out.items()}
        self.routes = PieceRoutes(ring, own.cuts or whole(out), piece_bytes)
        self._pieces = self.routes.pieces
        self._held = held
        if not again:
            held.clear()
        nothing = (0,) * len(self.routes.counts)
        self.sources = {peer: Source(held=nothing) for peer in ring.links}
        self._owned, self._relayed = Lane((), 0), Lane((), 0)
        self._rooms: list[LeavingPiece] = []
        self._places: Sequence[tuple[str, int]] = ()
        self._division = divide((), (), ())
        self._folds_at_owner: tuple[Fold, ...] = ()
        self._held_back: dict[str, list[int]] = {}
        """Member -> pieces of the terms that are sent to it behind a header."""
        self.begun = False
        """Whether all headers are there."""

    @property
    def held(self) -> list[int]:
        """By slice: how many of its pieces this member has."""
        return [self._held.get(number, 0) for number in range(len(self.routes.counts))]

    # ------------------------------------------------------------------------------------ before the headers

    def open(self, summed: Sequence[int], uninformed: Collection[int] = ()) -> None:
        """Send this member's terms, and take those of others. summed: by slice, how many pieces its owner has.
        uninformed: ranks that get their terms behind a header which this member cannot send yet: they could not take
        the terms, and so would not come to the header."""
        ring, routes = self._ring, self.routes
        terms_of: dict[str, list[int]] = {}
        """Aggregator on this node, or an owner if the node is this member alone -> pieces."""
        for number, piece in enumerate(self._pieces):
            if piece.number >= summed[piece.slice]:
                terms_of.setdefault(routes.takes_terms(piece.slice), []).append(number)
        mine = terms_of.pop(ring.me, [])
        owned = [number for number in mine if routes.owner(self._pieces[number].slice) == ring.me]
        relayed = [number for number in mine if routes.owner(self._pieces[number].slice) != ring.me]
        self._owned, self._relayed = (
            Lane(of, len({self._pieces[number].slice for number in of})) for of in (owned, relayed)
        )
        later = {ring.members[rank] for rank in uninformed}
        for to, numbers in terms_of.items():
            if to in later:
                self._held_back[to] = numbers
            else:
                ring.links[to].send_bulk(self._scatter(numbers))
        for peer, source in self.sources.items():
            if source.like_us:
                self.expect_terms(peer)

    def release(self, rank: int) -> None:
        """Send the terms that had to wait for the header to this rank, which is queued now."""
        peer = self._ring.members[rank]
        if (numbers := self._held_back.pop(peer, None)) is not None:
            self._ring.links[peer].send_bulk(self._scatter(numbers))

    def _scatter(self, numbers: Sequence[int]) -> Iterator[tuple[Frame, Payload] | None]:
        generation = self._ring.generation
        for number in numbers:
            piece = self._pieces[number]
            while not self._own.has(piece):
                yield None
            for term, payload in enumerate(self._own.payloads(piece)):
                yield Frame(FrameKind.SCATTER, generation, self._op, piece.size, term, number), payload

    def expect_terms(self, peer: str) -> None:
        """Make memory for the terms of a peer that sends them to this member, as far as its own header tells."""
        terms = self.sources[peer].terms
        if not terms or not self._pieces:
            return
        node = self.routes.node_of_member(peer)
        if node == self.routes.node:
            self._expect(peer, terms, {lane: lane.pieces for lane in (self._owned, self._relayed)})
        elif not self.routes.is_shared(node):
            self._expect(peer, terms, {self._owned: self._owned.pieces})

    def _expect(self, peer: str, terms: int, numbers: dict[Lane, Sequence[int]]) -> None:
        lanes.expect(self._ring, peer, terms, numbers, self.routes.largest)

    # ------------------------------------------------------------------------------------- after the headers

    def begin(self, places: Sequence[tuple[str, int]], folds: Sequence[Fold]) -> None:
        """All headers are there. places: (member, number among its own) of each tensor. folds: over all of them."""
        self.begun = True
        if not self._pieces:
            return
        ring, routes = self._ring, self.routes
        self._places = places
        self._division = routes.divide(folds, [worker for worker, _ in places])
        self._folds_at_owner = self._division.at_owner(routes.node)
        if self._again:
            held = {ring.me: self.held, **{peer: source.held for peer, source in self.sources.items()}}
            self.open([held[routes.owner(number)][number] for number in range(len(routes.counts))])
        self._expect_leaving()
        leave = len(self._division.nodes[routes.node].leave)
        if self._relayed.pieces and leave:
            self._rooms = lanes.rooms(ring, self._relayed, leave, routes.largest)
        for number, count in enumerate(routes.counts):
            if peer := routes.source(number):
                self.sources[peer].left += count - self._held.get(number, 0)
        for lane in (self._owned, self._relayed):
            for peer, terms in lane.of.items():
                self.sources[peer].left += terms.expected
        if self._again:
            for number, piece in enumerate(self._pieces):
                if piece.number < self._held.get(piece.slice, 0):
                    self._tell(number)

    def _expect_leaving(self) -> None:
        """Make memory for what aggregators of other nodes send."""
        routes = self.routes
        for node, folds in enumerate(self._division.nodes):
            if node == routes.node or not routes.is_shared(node) or not folds.leave:
                continue
            for peer in routes.members_of(node):
                numbers = [n for n in self._owned.pieces if routes.aggregator(self._pieces[n].slice, node) == peer]
                self._expect(peer, len(folds.leave), {self._owned: numbers})

    # ------------------------------------------------------------------------------------------------ frames

    def accept(self, peer: str, frame: Frame) -> memoryview | None:
        """See FrameSink.accept."""
        if not self.begun and (not self.sources[peer].like_us or self._again):
            return None
        if frame.piece >= len(self._pieces):
            raise LinkError(f"{peer} sent piece {frame.piece} of {len(self._pieces)}")
        piece = self._pieces[frame.piece]
        if frame.length != piece.size:
            raise LinkError(f"{peer} sent {frame.length} bytes for a piece of {piece.size}")
        if frame.kind is FrameKind.SCATTER:
            return self._accept_term(peer, frame)
        held = self._held.get(piece.slice, 0)
        if piece.number != held or self.routes.source(piece.slice) != peer:
            raise LinkError(f"{peer} sent sum {frame.piece}, expected number {held} of slice {piece.slice}")
        return _part(self._out_bytes, piece) if self.begun else None

    def _accept_term(self, peer: str, frame: Frame) -> memoryview | None:
        terms = self._lane(frame).of.get(peer)
        if terms is None and not self.begun:
            return None  # an aggregator's: only all headers together say how many terms it sends
        expected = terms.next if terms else None
        if terms is None or (frame.piece, frame.term) != expected:
            raise LinkError(f"{peer} sent piece {frame.piece} of term {frame.term}, expected {expected or 'none'}")
        return None if terms.is_full else terms.slot(terms.got, frame.term)[0][: frame.length]

    def complete(self, peer: str, frame: Frame) -> None:
        """See FrameSink.complete."""
        self.sources[peer].left -= self.begun
        if frame.kind is FrameKind.GATHER:
            self._hold(frame.piece)
        else:
            self._lane(frame).of[peer].take()

    def _lane(self, frame: Frame) -> Lane:
        return self._owned if frame.piece in self._owned.position else self._relayed

    # --------------------------------------------------------------------------------------------------- sum

    def advance(self) -> bool:
        """Add and send on what has come. True once nothing more has to come. For use after `begin`."""
        while (number := self._owned.next) is not None and self._is_there(self._owned, number):
            self._sum(number)
        while (number := self._relayed.next) is not None and self._is_there(self._relayed, number):
            if not self._relay(number):
                break
        done = self._owned.next is None and self._relayed.next is None
        return done and not any(source.left for source in self.sources.values())

    def look(self) -> None:
        """Send on what this member has got of its own terms since the last look."""
        if self._own.look():
            for link in self._ring.links.values():
                link.resume_bulk()

    def _is_there(self, lane: Lane, number: int) -> bool:
        return self._own.has(self._pieces[number]) and lane.has_come(number)

    def _values_of_node(self, lane: Lane, piece: ScheduledPiece) -> tuple[list[Tensor], list[bool]]:
        """The terms of this node's members, and whether each may be overwritten: scratch, not a root."""
        values, free = [], []
        for worker, index in (self._places[term] for term in self._division.nodes[self.routes.node].terms):
            if worker == self._ring.me:
                values.append(self._own.values(index, piece))
            else:
                terms = lane.of[worker]
                values.append(_view(terms.slot(terms.used, index)[1], piece))
            free.append(worker != self._ring.me)
        return values, free

    def _sum(self, number: int) -> None:
        """Add one piece of a slice that this member owns over all terms into out, and send it on."""
        piece = self._pieces[number]
        values, free = self._values_of_node(self._owned, piece)
        for node, folds in enumerate(self._division.nodes):
            if node == self.routes.node:
                continue
            aggregator = self.routes.aggregator(piece.slice, node)
            for leaving in range(len(folds.leave)):
                terms = self._owned.of[aggregator]
                values.append(_view(terms.slot(terms.used, leaving)[1], piece))
                free.append(True)
        folds_here = self._folds_at_owner
        add(values, free, folds_here, {len(values) + len(folds_here) - 1: self._out[piece.group][piece.lo : piece.hi]})
        self._owned.use(number)
        self._hold(number)

    def _relay(self, number: int) -> bool:
        """Add up one piece over the terms of this node and send what leaves to the slice's owner; False while there is
        no memory for it."""
        piece, node = self._pieces[number], self._division.nodes[self.routes.node]
        if node.leave:
            room = self._rooms[self._relayed.done % len(self._rooms)]
            if not room.is_free:
                return False
            values, free = self._values_of_node(self._relayed, piece)
            targets = {at: _view(part, piece) for at, (_, part) in zip(node.leave, room.parts, strict=True)}
            add(values, free, node.folds, targets)
            room.link = self._ring.links[self.routes.owner(piece.slice)]
            for term, (memory, _) in enumerate(room.parts):
                frame = Frame(FrameKind.SCATTER, self._ring.generation, self._op, piece.size, term, number)
                room.ticket = room.link.send(frame, memory[: piece.size])
        self._relayed.use(number)
        return True

    def _hold(self, number: int) -> None:
        """Note that out has the sum of a piece, and send it on."""
        self._held[self._pieces[number].slice] = self._pieces[number].number + 1
        self._tell(number)

    def _tell(self, number: int) -> None:
        """Send the sum of a piece to the members that get it from this one and lack it."""
        piece = self._pieces[number]
        frame = Frame(FrameKind.GATHER, self._ring.generation, self._op, piece.size, 0, number)
        payload = _part(self._out_bytes, piece)
        for peer in self.routes.recipients(piece.slice):
            if piece.number >= self.sources[peer].held[piece.slice]:
                self._ring.links[peer].send(frame, payload)


def _view(part: Tensor, piece: ScheduledPiece) -> Tensor:
    return part[: piece.size].view(DTYPES[piece.group])


def _bytes(flat: Tensor) -> memoryview:
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _part(flats: dict[str, memoryview], piece: ScheduledPiece) -> memoryview:
    itemsize = DTYPES[piece.group].itemsize
    return flats[piece.group][piece.lo * itemsize : piece.hi * itemsize]
