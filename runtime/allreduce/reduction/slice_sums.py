"""The tensors of one operation over a ring: which terms a member sends, which it adds, and where the sums go.

topology.py says who sums which slice. The terms of a slice go to its aggregator on each node, what remains of them
after the aggregators' folds goes to the slice's owner (scatter), and the sum goes back on the same way (gather). Slices
are sent in pieces, and a piece is added and sent on as soon as it has arrived, while it is still in the processor's
cache: receiving, adding and sending overlap. With one term per member and one node this moves 2 * (P - 1) / P bytes per
byte and member, which is the optimum (Patarasuk & Yuan 2009).

All members treat pieces in the same order (schedule.pieces). So the first piece that is not complete everywhere waits
for nothing but its own terms, whatever stream of frames has come to a stand behind it, and members cannot wait for each
other in a circle.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.allreduce.reduction import lanes
from runtime.allreduce.reduction.lanes import Lane, LeavingPiece
from runtime.allreduce.reduction.schedule import DTYPES, Cut, Fold, ScheduledPiece, add, pieces, whole
from runtime.allreduce.reduction.topology import divide, topology
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


class SliceSums:
    """One member's part. own: the flats of each of its roots. out: gets the sum. All are contiguous 1-D CPU tensors of
    the groups' dtypes and lengths. held: slice -> number of its pieces, from the first on, that are in out; kept up to
    date. again: some may have begun this operation before: only pieces that a member lacks are sent.

    Terms are sent before all headers are there: `open`, `expect_terms` with each header, then `begin`.
    """

    def __init__(
        self,
        ring: Ring,
        op: int,
        own: Sequence[dict[str, Tensor]],
        out: dict[str, Tensor],
        held: dict[int, int],
        *,
        piece_bytes: int,
        again: bool,
        cuts: tuple[Cut, ...] = (),
        ready: Callable[[], int] | None = None,
    ) -> None:
        """cuts: (): all at once. ready: how many of the cuts, from the first on, own has by now; it grows while the
        operation runs, after which the ring has to be woken. None: all of them."""
        self._ring, self._op, self._own, self._out, self._again = ring, op, own, out, again
        self._own_bytes = [{group: _bytes(flat) for group, flat in flats.items()} for flats in own]
        self._out_bytes = {group: _bytes(flat) for group, flat in out.items()}
        self._topology = topology(ring.hosts)
        self._node = self._topology.node_of[ring.rank]
        self._ranks = {member: rank for rank, member in enumerate(ring.members)}
        slices = len(self._topology.slices)
        size = lanes.piece_bytes(self._topology.most, piece_bytes)
        self._pieces, self.counts = pieces(cuts or whole(out), slices, size)
        """counts: the number of pieces of each slice."""
        self._largest = max((piece.size for piece in self._pieces), default=0)
        self._held = held
        if not again:
            held.clear()
        nothing = (0,) * slices
        self.sources = {peer: Source(held=nothing) for peer in ring.links}
        self._owned, self._relayed = Lane((), 0), Lane((), 0)
        self._rooms: list[LeavingPiece] = []
        self._places: Sequence[tuple[str, int]] = ()
        self._division = divide((), (), ())
        self._folds_at_owner: tuple[Fold, ...] = ()
        self._held_back: dict[int, list[int]] = {}
        """Rank -> pieces of the terms that are sent to it behind a header."""
        self._ready = ready
        self._cuts = len(cuts) or 1
        self._there = self._cuts
        """How many cuts own has, as far as was looked."""
        if ready is not None:
            self._there = ready()
        self.begun = False
        """Whether all headers are there."""

    @property
    def node_of(self) -> Sequence[int]:
        """The number of the node of each rank."""
        return self._topology.node_of

    @property
    def grows(self) -> bool:
        """Whether own gets more cuts later, as far as was looked."""
        return self._there < self._cuts

    @property
    def held(self) -> list[int]:
        """By slice: how many of its pieces this member has."""
        return [self._held.get(number, 0) for number in range(len(self.counts))]

    # ------------------------------------------------------------------------------------ before the headers

    def open(self, summed: Sequence[int], uninformed: Collection[int] = ()) -> None:
        """Send this member's terms, and take those of others. summed: by slice, how many pieces its owner has.
        uninformed: ranks that get their terms behind a header which this member cannot send yet: they could not take
        the terms, and so would not come to the header."""
        slices, rank = self._topology.slices, self._ring.rank
        terms_of: dict[int, list[int]] = {}
        """Aggregator on this node, or an owner if the node is this member alone -> pieces."""
        relays = len(self._topology.ranks[self._node]) > 1
        for number, piece in enumerate(self._pieces):
            if piece.number >= summed[piece.slice]:
                cut = slices[piece.slice]
                terms_of.setdefault(cut.aggregators[self._node] if relays else cut.owner, []).append(number)
        mine = terms_of.pop(rank, [])
        owned = [number for number in mine if slices[self._pieces[number].slice].owner == rank]
        relayed = [number for number in mine if slices[self._pieces[number].slice].owner != rank]
        self._owned, self._relayed = (
            Lane(of, len({self._pieces[number].slice for number in of})) for of in (owned, relayed)
        )
        for to, numbers in terms_of.items():
            if to in uninformed:
                self._held_back[to] = numbers
            else:
                self._ring.links[self._ring.members[to]].send_bulk(self._scatter(numbers))
        for peer, source in self.sources.items():
            if source.like_us:
                self.expect_terms(peer)

    def release(self, rank: int) -> None:
        """Send the terms that had to wait for the header to this rank, which is queued now."""
        if (numbers := self._held_back.pop(rank, None)) is not None:
            self._ring.links[self._ring.members[rank]].send_bulk(self._scatter(numbers))

    def _scatter(self, numbers: Sequence[int]) -> Iterator[tuple[Frame, Payload] | None]:
        generation = self._ring.generation
        for number in numbers:
            piece = self._pieces[number]
            while piece.cut >= self._there:
                yield None
            for term, flat in enumerate(self._own_bytes):
                frame = Frame(FrameKind.SCATTER, generation, self._op, piece.size, term, number)
                yield frame, _part(flat, piece)

    def expect_terms(self, peer: str) -> None:
        """Make memory for the terms of a peer that sends them to this member, as far as its own header tells."""
        terms = self.sources[peer].terms
        if not terms or not self._pieces:
            return
        node = self._topology.node_of[self._ranks[peer]]
        if node == self._node:
            self._expect(peer, terms, {lane: lane.pieces for lane in (self._owned, self._relayed)})
        elif len(self._topology.ranks[node]) == 1:
            self._expect(peer, terms, {self._owned: self._owned.pieces})

    def _expect(self, peer: str, terms: int, numbers: dict[Lane, Sequence[int]]) -> None:
        lanes.expect(self._ring, peer, terms, numbers, self._largest)

    # ------------------------------------------------------------------------------------- after the headers

    def begin(self, places: Sequence[tuple[str, int]], folds: Sequence[Fold]) -> None:
        """All headers are there. places: (member, number among its own) of each tensor. folds: over all of them."""
        self.begun = True
        if not self._pieces:
            return
        ring, nodes = self._ring, self._topology.node_of
        self._places = places
        term_nodes = [nodes[self._ranks[worker]] for worker, _ in places]
        self._division = divide(folds, term_nodes, [len(ranks) > 1 for ranks in self._topology.ranks])
        self._folds_at_owner = self._division.at_owner(self._node)
        if self._again:
            held = {ring.me: self.held, **{peer: source.held for peer, source in self.sources.items()}}
            owners = [ring.members[cut.owner] for cut in self._topology.slices]
            self.open([held[owner][number] for number, owner in enumerate(owners)])
        self._expect_leaving()
        leave = len(self._division.nodes[self._node].leave)
        if self._relayed.pieces and leave:
            self._rooms = lanes.rooms(ring, self._relayed, leave, self._largest)
        for number, cut in enumerate(self._topology.slices):
            if cut.owner != ring.rank:
                source = self.sources[ring.members[self._topology.source(cut, ring.rank)]]
                source.left += self.counts[number] - self._held.get(number, 0)
        for lane in (self._owned, self._relayed):
            for peer, terms in lane.of.items():
                self.sources[peer].left += terms.expected
        if self._again:
            for number, piece in enumerate(self._pieces):
                if piece.number < self._held.get(piece.slice, 0):
                    self._tell(number)

    def _expect_leaving(self) -> None:
        """Make memory for what aggregators of other nodes send."""
        slices = self._topology.slices
        for node, folds in enumerate(self._division.nodes):
            if node == self._node or len(self._topology.ranks[node]) == 1 or not folds.leave:
                continue
            for rank in self._topology.ranks[node]:
                numbers = [n for n in self._owned.pieces if slices[self._pieces[n].slice].aggregators[node] == rank]
                self._expect(self._ring.members[rank], len(folds.leave), {self._owned: numbers})

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
        if piece.number != held or self._source(piece) != peer:
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

    def _source(self, piece: ScheduledPiece) -> str:
        """Who sends the sum of a piece to this member; "" if it owns it."""
        cut = self._topology.slices[piece.slice]
        return "" if cut.owner == self._ring.rank else self._ring.members[self._topology.source(cut, self._ring.rank)]

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
        """Send on what own has got since the last look."""
        if self._ready is not None and (there := self._ready()) > self._there:
            self._there = there
            for link in self._ring.links.values():
                link.resume_bulk()

    def _is_there(self, lane: Lane, number: int) -> bool:
        return self._pieces[number].cut < self._there and lane.has_come(number)

    def _values_of_node(self, lane: Lane, piece: ScheduledPiece) -> tuple[list[Tensor], list[bool]]:
        """The terms of this node's members, and whether each may be overwritten: scratch, not a root."""
        values, free = [], []
        for worker, index in (self._places[term] for term in self._division.nodes[self._node].terms):
            if worker == self._ring.me:
                values.append(self._own[index][piece.group][piece.lo : piece.hi])
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
            if node == self._node:
                continue
            aggregator = self._ring.members[self._topology.slices[piece.slice].aggregators[node]]
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
        piece, node = self._pieces[number], self._division.nodes[self._node]
        if node.leave:
            room = self._rooms[self._relayed.done % len(self._rooms)]
            if not room.is_free:
                return False
            values, free = self._values_of_node(self._relayed, piece)
            targets = {at: _view(part, piece) for at, (_, part) in zip(node.leave, room.parts, strict=True)}
            add(values, free, node.folds, targets)
            owner = self._ring.members[self._topology.slices[piece.slice].owner]
            room.link = self._ring.links[owner]
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
        for rank in self._topology.recipients(self._topology.slices[piece.slice], self._ring.rank):
            peer = self._ring.members[rank]
            if piece.number >= self.sources[peer].held[piece.slice]:
                self._ring.links[peer].send(frame, payload)


def _view(part: Tensor, piece: ScheduledPiece) -> Tensor:
    return part[: piece.size].view(DTYPES[piece.group])


def _bytes(flat: Tensor) -> memoryview:
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _part(flats: dict[str, memoryview], piece: ScheduledPiece) -> memoryview:
    itemsize = DTYPES[piece.group].itemsize
    return flats[piece.group][piece.lo * itemsize : piece.hi * itemsize]
