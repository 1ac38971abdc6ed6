"""How orders of a leader reach agents in few bytes: serialised once for all, and generations as differences.

    leader: Publisher.addressed(order, workers, known)  ->  Addressed  ->  agent: Reader.read -> order

A leader knows which generations an agent has: it said so in its hello, and has been told others on the same stream
since. Both sides keep those of the highest numbers only, by the same rule. An agent that finds another generation than
the one that was meant forgets all and comes again, and gets the whole list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from elastic.protocol.messages import Generation, Laggard, Order, Publish, Share
from elastic.wire import codec, generation_delta
from elastic.wire import elastic_pb2 as pb
from elastic.wire.generation_delta import Delta, KeptGenerations, WrongBase

PACK_BYTES = 4096
"""Longer orders are packed."""

SERIALISED = 32
"""So many orders are kept as bytes."""


class Publisher:
    """A leader's side."""

    def __init__(self) -> None:
        self._records: dict[int, Generation] = {}
        self._serialised: dict[object, dict[str, Any]] = {}
        self._tasks: dict[int, tuple[dict[str, Share], dict[str, Laggard]]] = {}

    def remember(self, records: Iterable[Generation]) -> None:
        """Committed ones, against which others may be told; those remembered last are kept."""
        for record in records:
            self._records[record.number] = self._records.pop(record.number, record)
            if record.number not in self._tasks:
                shares = {share.worker_id: share for share in record.plan.shares}
                self._tasks[record.number] = shares, {late.worker_id: late for late in record.plan.laggards}
        for number in list(self._records)[: -2 * generation_delta.KEPT]:
            del self._records[number], self._tasks[number]

    def addressed(self, order: Order, to: Sequence[str], known: dict[int, str]) -> pb.Addressed:
        """known: number -> digest of the generations that the agent has; brought up to date."""
        if not isinstance(order, Publish):
            return pb.Addressed(to=to, **self._content(0, order))
        record = order.generation
        self.remember([record])
        base = self._base(record.number, known)
        known[record.number] = record.digest()
        generation_delta.forget(known)
        content = self._content(base, order)
        if not base:
            return pb.Addressed(to=to, **content)
        shares, laggards = self._tasks[record.number]
        return pb.Addressed(
            to=to,
            shares=[codec.value_to_wire(shares[worker]) for worker in to if worker in shares],
            laggards=[codec.value_to_wire(laggards[worker]) for worker in to if worker in laggards],
            **content,
        )

    def _base(self, number: int, known: Mapping[int, str]) -> int:
        """The highest generation that both have, the one that is told at best; 0: none."""
        both = [n for n, digest in known.items() if n in self._records and self._records[n].digest() == digest]
        return number if number in both else max(both, default=0)

    def _content(self, base: int, order: Order) -> dict[str, Any]:
        """base 0: the whole order."""
        # By number, because a hash of the record would look at all members, for each agent that is told.
        key = (base, order.generation.number) if isinstance(order, Publish) else order
        if (content := self._serialised.get(key)) is not None:
            return content
        if base and isinstance(order, Publish):
            delta = generation_delta.difference(self._records[base], order.generation, order.term)
            content = {"delta": codec.value_to_wire(delta).SerializeToString()}
        else:
            document = codec.order_to_wire(order).SerializeToString()
            content = {"packed": codec.packed(document)} if len(document) > PACK_BYTES else {"order": document}
        self._serialised[key] = content
        if len(self._serialised) > SERIALISED:
            del self._serialised[next(iter(self._serialised))]
        return content


class Reader:
    """An agent's side. Outlives the streams."""

    def __init__(self) -> None:
        self._kept = KeptGenerations()

    @property
    def known(self) -> dict[int, str]:
        """Number -> digest of what a leader may tell others against."""
        return self._kept.known

    def read(self, addressed: pb.Addressed) -> Order:
        """Raises WireError for what no Publisher has made for us."""
        match addressed.WhichOneof("content"):
            case "delta":
                return self._changed(addressed)
            case "packed":
                order = codec.order_from_bytes(codec.unpacked(addressed.packed))
            case _:
                order = codec.order_from_bytes(addressed.order)
        if isinstance(order, Publish):
            self._kept.keep(order.generation)
        return order

    def _changed(self, addressed: pb.Addressed) -> Publish:
        delta = read_delta(addressed.delta)
        shares = [codec.value_from_wire(Share, share) for share in addressed.shares]
        laggards = [codec.value_from_wire(Laggard, laggard) for laggard in addressed.laggards]
        try:
            record = self._kept.made(delta, shares, laggards)
        except WrongBase as error:
            self._kept.forget_all()
            raise codec.WireError(str(error)) from error
        self._kept.keep(record)
        return Publish(delta.term, record)


def read_delta(document: bytes) -> Delta:
    """Raises WireError for what is none."""
    delta: Delta = codec.value_from_wire(Delta, codec.parsed(pb.Delta, document))
    return delta
