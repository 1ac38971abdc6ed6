"""One operation over a ring: all members get the headers of all members, and the sum of all their terms.

`exchange` is the canonical reduction: terms are roots of the tree in elastic/protocol/reduction_tree.py and are added
in its order, so the bits depend on nothing but the leaves. With `leaves`, one local sum per member is added in the
order of ranks.

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
from dataclasses import dataclass, field

import torch
from torch import Tensor

from elastic.errors import Disagree, RingBroken
from runtime.reduction.headers import HeaderExchange, Headers
from runtime.reduction.partial_sum import Json, Partial
from runtime.reduction.schedule import (
    DTYPES,
    Fold,
    ScheduledPiece,
    Term,
    add,
    add_metas,
    along_tree,
    as_counts,
    as_list,
    by_rank,
    parse_term,
    pieces,
)
from runtime.reduction.topology import divide, topology
from runtime.ring.frames import Frame, FrameKind, LinkError, Payload, PeerLink
from runtime.ring.ring import Ring

PIECE_BYTES = 1 << 20
"""Smaller pieces cost more calls, larger ones leave the cache before they are added (docs/decisions/own-mesh.md)."""
_PIECE_BYTES_MIN = 64 << 10
"""Pieces get smaller where a member aggregates many slices, so that its memory does not grow with the nodes."""
_WINDOW = 4
"""How many pieces of a slice and term a peer may be ahead of the sum, so that memory does not grow with the model."""
_SCRATCH_BYTES = 32 << 20
"""Bytes of scratch per peer; with many terms the window shrinks, at worst to one piece of each."""
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


def exchange(
    ring: Ring,
    *,
    op: int,
    header: dict[str, Json],
    agreed: dict[str, Json] | None = None,
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
    contiguous 1-D CPU tensors of the group's dtype and length. header: the caller's fields. agreed: more of them, that
    should be the same on all members (headers.py). check gets every member's header by worker_id, with the fields
    worker_id, units, groups, terms (Partial.meta of each root) added, once all are in and before any sum is used.
    Exceptions of check pass through, after this worker's own header was sent. sums: receives the result, also the part
    that is there if this raises; None: new tensors. again: the same on all members: some may have begun this operation
    before. Then only pieces that a member lacks are sent.

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
    reduction = _Reduction(ring, op, header, agreed or {}, roots, metas, units, groups, check, arrange, sums, again)
    ring.run(reduction)
    return reduction.headers, reduction.result()


@dataclass(slots=True)
class _Contribution:
    """What one peer sends to a lane, in the order of (piece, term)."""

    pieces: Sequence[int]
    terms: int
    depth: int
    """How many pieces of it the slots hold."""
    slots: list[tuple[memoryview, Tensor]] = field(default_factory=list)
    got: int = 0
    term: int = 0
    used: int = 0

    def slot(self, piece: int, term: int) -> tuple[memoryview, Tensor]:
        return self.slots[(piece % self.depth) * self.terms + term]

    @property
    def expected(self) -> int:
        """The number of frames that still have to come."""
        return (len(self.pieces) - self.got) * self.terms - self.term


class _Lane:
    """Pieces, by their numbers in the schedule, whose terms come to this member: of slices that it owns, or of slices
    that it aggregates for its node only."""

    def __init__(self, pieces: Sequence[int], slices: int) -> None:
        self.pieces = pieces
        self.position = {piece: position for position, piece in enumerate(pieces)}
        self.window = _WINDOW * slices
        self.done = 0
        self.of: dict[str, _Contribution] = {}

    @property
    def next(self) -> int | None:
        return self.pieces[self.done] if self.done < len(self.pieces) else None


@dataclass(slots=True)
class _From:
    """What has come from one peer."""

    terms: Sequence[Term] = ()
    like_us: bool = False
    held: Sequence[int] = ()
    """By slice: how many of its pieces the peer had when it began."""
    left: int = 0
    """How many frames still have to come from it, once all headers are there."""


@dataclass(slots=True)
class _Leaving:
    """Memory for what leaves the node of an aggregator, for one piece. ticket: see PeerLink.send."""

    parts: list[tuple[memoryview, Tensor]]
    link: PeerLink | None = None
    ticket: int = 0


class _Reduction:
    """The ring.Operation of both variants."""

    def __init__(
        self,
        ring: Ring,
        op: int,
        header: dict[str, Json],
        agreed: dict[str, Json],
        own: Sequence[Partial],
        metas: Sequence[dict[str, Json]],
        units: int,
        groups: dict[str, int],
        check: Callable[[Headers], None],
        arrange: Callable[[Sequence[Term], int, Sequence[int]], list[Fold]],
        sums: Sums | None,
        again: bool,
    ) -> None:
        self._ring, self._op, self._units, self._groups = ring, op, units, groups
        self._check, self._arrange = check, arrange
        if taken := (set(header) | set(agreed)) & set(_OURS):
            raise ValueError(f"header fields {sorted(taken)} are set by the exchange")
        if units < 1 or op < 0 or set(groups) - set(DTYPES):
            raise ValueError(f"units={units}, op={op}, groups={groups}: wanted >= 1, >= 0, names in {list(DTYPES)}")
        if sums is None:
            sums = Sums({group: torch.empty(length, dtype=DTYPES[group]) for group, length in groups.items()})
        self._own = [_checked(partial.flats, groups, "root") for partial in own]
        self._own_bytes = [{group: _bytes(flat) for group, flat in flats.items()} for flats in self._own]
        self._out = _checked(sums.out, groups, "out")
        self._out_bytes = {group: _bytes(flat) for group, flat in self._out.items()}
        self._topology = topology(ring.hosts)
        self._node = self._topology.node_of[ring.rank]
        self._near = [ring.members[rank] for rank in self._topology.ranks[self._node] if rank != ring.rank]
        slices = self._topology.slices
        size = piece_bytes(self._topology.most, PIECE_BYTES)
        self._pieces, self._counts = pieces(tuple(sorted(groups.items())), len(slices), size)
        self._largest = max((piece.size for piece in self._pieces), default=0)
        self._again, self._held = again, sums.held
        if not again:
            self._held.clear()
        self._peers = {peer: _From(held=[0] * len(slices)) for peer in ring.links}
        self._owned, self._relayed = _Lane((), 0), _Lane((), 0)
        self._leaving: list[_Leaving] = []
        self._ready = False
        self._terms: list[Term] = []
        self._places: list[tuple[str, int]] = []
        self._folds: list[Fold] = []
        self._division = divide((), (), ())
        self._folds_at_owner: tuple[Fold, ...] = ()
        self.headers: Headers = {}
        self._agreed: dict[str, Json] = {**agreed, "units": units, "groups": dict(groups)}
        self._held_back: dict[int, list[int]] = {}
        """Rank -> pieces of the terms that are sent to it behind a header."""
        fields: dict[str, Json] = {**header, "worker_id": ring.me, "terms": list(metas)}
        if again:
            fields["held"] = [self._held.get(number, 0) for number in range(len(self._counts))]
        self._words = HeaderExchange(ring, op, self._agreed, fields, self._release)
        self._own_terms = [parse_term(meta) for meta in as_list(self._words.own["terms"])]
        self._words.begin()
        if not again:  # else the headers say from which piece on
            self._open_lanes([0] * len(self._counts), self._words.uninformed)

    # --------------------------------------------------------------------------------------------- lanes

    def _open_lanes(self, summed: Sequence[int], uninformed: Collection[int] = ()) -> None:
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
            _Lane(of, len({self._pieces[number].slice for number in of})) for of in (owned, relayed)
        )
        for to, numbers in terms_of.items():
            if to in uninformed:
                self._held_back[to] = numbers
            else:
                self._ring.links[self._ring.members[to]].send_bulk(self._scatter(numbers))
        for peer, source in self._peers.items():
            if source.like_us:
                self._expect_terms(peer, source)

    def _release(self, rank: int) -> None:
        """Send the terms that had to wait for the header to this rank, which is queued now."""
        if (numbers := self._held_back.pop(rank, None)) is not None:
            self._ring.links[self._ring.members[rank]].send_bulk(self._scatter(numbers))

    def _scatter(self, numbers: Sequence[int]) -> Iterator[tuple[Frame, Payload]]:
        generation = self._ring.generation
        for number in numbers:
            piece = self._pieces[number]
            for term, flat in enumerate(self._own_bytes):
                frame = Frame(FrameKind.SCATTER, generation, self._op, piece.size, term, number)
                yield frame, _part(flat, piece)

    def _expect_terms(self, peer: str, source: _From) -> None:
        """Make memory for the terms of a peer that sends them to this member, as far as its own header tells."""
        if not source.terms or not self._pieces:
            return
        node = self._topology.node_of[self._words.ranks[peer]]
        if node == self._node:
            self._expect(peer, len(source.terms), {lane: lane.pieces for lane in (self._owned, self._relayed)})
        elif len(self._topology.ranks[node]) == 1:
            self._expect(peer, len(source.terms), {self._owned: self._owned.pieces})

    def _expect_leaving(self) -> None:
        """The same for what aggregators of other nodes send, once all headers are there."""
        slices = self._topology.slices
        for node, folds in enumerate(self._division.nodes):
            if node == self._node or len(self._topology.ranks[node]) == 1 or not folds.leave:
                continue
            for rank in self._topology.ranks[node]:
                numbers = [n for n in self._owned.pieces if slices[self._pieces[n].slice].aggregators[node] == rank]
                self._expect(self._ring.members[rank], len(folds.leave), {self._owned: numbers})

    def _expect(self, peer: str, terms: int, lanes: dict[_Lane, Sequence[int]]) -> None:
        affordable = _SCRATCH_BYTES // max(self._largest * terms * len(lanes), 1)
        depths = {
            lane: max(1, min(lane.window, affordable, len(numbers))) for lane, numbers in lanes.items() if numbers
        }
        memory = self._ring.scratch(peer, sum(depths.values()) * terms * self._largest)
        start = 0
        for lane, depth in depths.items():
            contribution = lane.of[peer] = _Contribution(lanes[lane], terms, depth)
            for _ in range(depth * terms):
                contribution.slots.append(_slot(memory, start, self._largest))
                start += self._largest

    # ------------------------------------------------------------------------------------ ring.Operation

    @property
    def op(self) -> int:
        return self._op

    def needs(self, peer: str) -> bool:
        return self._peers[peer].left > 0 if self._ready else self._words.awaits(peer)

    def accept(self, peer: str, frame: Frame) -> memoryview | None:
        source = self._peers[peer]
        if frame.kind is FrameKind.HEADER:
            return self._words.accept(peer, frame)
        if self._words.disagree:  # nothing will be summed, and behind this frame comes what that member brings
            if frame.length > PIECE_BYTES:
                raise LinkError(f"{peer} sent {frame.length} bytes for a piece")
            return memoryview(bytearray(frame.length))
        if not self._ready and self._words.awaits_first(peer):
            raise LinkError(f"{peer} sent {frame.kind.name} before its header")
        if not self._ready and (not source.like_us or self._again):
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
        return _part(self._out_bytes, piece) if self._ready else None

    def _accept_term(self, peer: str, frame: Frame) -> memoryview | None:
        lane = self._owned if frame.piece in self._owned.position else self._relayed
        terms = lane.of.get(peer)
        if terms is None and not self._ready:
            return None  # an aggregator's: only all headers together say how many terms it sends
        expected = (terms.pieces[terms.got], terms.term) if terms and terms.got < len(terms.pieces) else ()
        if terms is None or (frame.piece, frame.term) != expected:
            raise LinkError(f"{peer} sent piece {frame.piece} of term {frame.term}, expected {expected or 'none'}")
        if terms.got >= terms.used + terms.depth:
            return None
        return terms.slot(terms.got, frame.term)[0][: frame.length]

    def complete(self, peer: str, frame: Frame, payload: memoryview) -> None:
        source = self._peers[peer]
        if frame.kind is FrameKind.HEADER:
            for worker, agrees, fields in self._words.take(peer, payload):
                self._take_header(worker, agrees, fields)
            return
        if self._words.disagree:
            return
        source.left -= self._ready
        if frame.kind is FrameKind.GATHER:
            self._hold(frame.piece)
        else:
            lane = self._owned if frame.piece in self._owned.position else self._relayed
            terms = lane.of[peer]
            terms.term += 1
            if terms.term == terms.terms:
                terms.got, terms.term = terms.got + 1, 0

    def advance(self) -> bool:
        if not self._ready:
            # If the check raises, the others must have what this member passes on to come to the same conclusion.
            if not self._words.complete or any(link.unsent_urgent for link in self._ring.links.values()):
                return False
            headers = self._words.everybodys()
            if headers is None:
                return False
            self.headers = headers
            self._begin_sum()
        while (number := self._owned.next) is not None and self._has_come(self._owned, number):
            self._sum(number)
        while (number := self._relayed.next) is not None and self._has_come(self._relayed, number):
            if not self._relay(number):
                break
        done = self._owned.next is None and self._relayed.next is None
        return done and not any(source.left for source in self._peers.values())

    # --------------------------------------------------------------------------------------------- headers

    def _take_header(self, peer: str, like_us: bool, fields: dict[str, Json]) -> None:
        """Raises LinkError."""
        source = self._peers[peer]
        try:
            terms = [parse_term(meta) for meta in as_list(fields["terms"])]
            held = as_counts(fields["held"]) if self._again and like_us else source.held
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise LinkError(f"{peer} sent a malformed header: {error}") from error
        if like_us and len(terms) > self._units:
            raise LinkError(f"{peer} brings {len(terms)} terms for {self._units} units")
        if len(held) != len(self._counts) or not all(
            0 <= count <= pieces for count, pieces in zip(held, self._counts, strict=True)
        ):
            raise LinkError(f"{peer} says that it holds {held} pieces")
        source.terms, source.like_us, source.held = terms, like_us, held
        if like_us and not self._again:
            self._expect_terms(peer, source)

    def _begin_sum(self) -> None:
        ring, nodes = self._ring, self._topology.node_of
        self._check(self.headers)
        for name, ours in (("groups", self._groups), ("units", self._units)):
            values = {worker: header[name] for worker, header in self.headers.items()}
            if any(value != ours for value in values.values()):
                raise Disagree(f"the workers bring different {name} to operation {self._op}: {values}")
        if self._words.disagree:
            raise Disagree(f"the workers do not agree about operation {self._op}: {self.headers}")
        term_nodes = []
        for node, worker in zip(nodes, ring.members, strict=True):
            brought = self._own_terms if worker == ring.me else self._peers[worker].terms
            self._terms += brought
            self._places += [(worker, index) for index in range(len(brought))]
            term_nodes += [node] * len(brought)
        try:
            self._folds = self._arrange(self._terms, self._units, term_nodes)
        except ValueError as error:
            raise RingBroken(f"operation {self._op} of generation {ring.generation}: {error}") from error
        self._ready = True
        if not self._pieces:
            return
        self._division = divide(self._folds, term_nodes, [len(ranks) > 1 for ranks in self._topology.ranks])
        self._folds_at_owner = self._division.at_owner(self._node)
        if self._again:
            held = {ring.rank: [self._held.get(number, 0) for number in range(len(self._counts))]}
            held |= {ring.members.index(peer): list(source.held) for peer, source in self._peers.items()}
            self._open_lanes([held[cut.owner][number] for number, cut in enumerate(self._topology.slices)])
        self._expect_leaving()
        self._make_leaving()
        for number, cut in enumerate(self._topology.slices):
            if cut.owner != ring.rank:
                source = self._peers[ring.members[self._topology.source(cut, ring.rank)]]
                source.left += self._counts[number] - self._held.get(number, 0)
        for lane in (self._owned, self._relayed):
            for peer, terms in lane.of.items():
                self._peers[peer].left += terms.expected
        if self._again:
            for number, piece in enumerate(self._pieces):
                if piece.number < self._held.get(piece.slice, 0):
                    self._tell(number)

    def _make_leaving(self) -> None:
        """Make memory for what this aggregator adds up for owners on other nodes."""
        leave = len(self._division.nodes[self._node].leave)
        if not self._relayed.pieces or not leave:
            return
        affordable = max(1, _SCRATCH_BYTES // max(self._largest * leave, 1))
        depth = min(self._relayed.window, affordable, len(self._relayed.pieces))
        memory = self._ring.scratch("leaving", depth * leave * self._largest)
        slots = [_slot(memory, start * self._largest, self._largest) for start in range(depth * leave)]
        self._leaving = [_Leaving(slots[at * leave : (at + 1) * leave]) for at in range(depth)]

    # ------------------------------------------------------------------------------------------------- sum

    def _has_come(self, lane: _Lane, number: int) -> bool:
        """Whether all terms of a lane's next piece are there."""
        return all(
            terms.got > terms.used
            for terms in lane.of.values()
            if terms.used < len(terms.pieces) and terms.pieces[terms.used] == number
        )

    def _values_of_node(self, lane: _Lane, piece: ScheduledPiece) -> tuple[list[Tensor], list[bool]]:
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
        self._use(self._owned, number)
        self._hold(number)

    def _relay(self, number: int) -> bool:
        """Add up one piece over the terms of this node and send what leaves to the slice's owner; False while there is
        no memory for it."""
        piece, node = self._pieces[number], self._division.nodes[self._node]
        if node.leave:
            room = self._leaving[self._relayed.done % len(self._leaving)]
            if room.link is not None and not room.link.has_sent(room.ticket):
                return False
            values, free = self._values_of_node(self._relayed, piece)
            targets = {at: _view(part, piece) for at, (_, part) in zip(node.leave, room.parts, strict=True)}
            add(values, free, node.folds, targets)
            owner = self._ring.members[self._topology.slices[piece.slice].owner]
            room.link = self._ring.links[owner]
            for term, (memory, _) in enumerate(room.parts):
                frame = Frame(FrameKind.SCATTER, self._ring.generation, self._op, piece.size, term, number)
                room.ticket = room.link.send(frame, memory[: piece.size])
        self._use(self._relayed, number)
        return True

    def _use(self, lane: _Lane, number: int) -> None:
        lane.done += 1
        for terms in lane.of.values():
            if terms.used < len(terms.pieces) and terms.pieces[terms.used] == number:
                terms.used += 1

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
            if piece.number >= self._peers[peer].held[piece.slice]:
                self._ring.links[peer].send(frame, payload)

    def _source(self, piece: ScheduledPiece) -> str:
        """Who sends the sum of a piece to this member; "" if it owns it."""
        cut = self._topology.slices[piece.slice]
        return "" if cut.owner == self._ring.rank else self._ring.members[self._topology.source(cut, self._ring.rank)]

    def result(self) -> Partial:
        """The sum of all terms, once the operation is complete."""
        total = add_metas(self._terms, self._folds)
        return Partial(
            0, self._units, self._out, total.has_grad, total.weight, total.scalars, total.note, total.nonfinite
        )


def piece_bytes(slices: int, most: int) -> int:
    """The size of a piece, at most `most`, where a member aggregates that many slices."""
    return min(most, max(_PIECE_BYTES_MIN, most * _WINDOW // slices))


def _slot(memory: memoryview, start: int, size: int) -> tuple[memoryview, Tensor]:
    part = memory[start : start + size]
    return part, torch.frombuffer(part, dtype=torch.uint8)


def _view(part: Tensor, piece: ScheduledPiece) -> Tensor:
    return part[: piece.size].view(DTYPES[piece.group])


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
