"""One replica's hold on a job in the store: who leads, which generations are committed, how the job ended.

    /elastic/<job>/leader            address of the leader, on its lease; its create revision is the *term*
    /elastic/<job>/top               number of the highest committed generation
    /elastic/<job>/generations/<n>   the record, written once; of a long one its digest
    /elastic/<job>/pieces/<digest>/<i>   what such a record consists of (chunks.py)
    /elastic/<job>/checkpoints/<series>  the pointer to its newest complete checkpoint
    /elastic/<job>/result            how the job ended
    /elastic/<job>/surpassed         the last term that this etcd had to catch up with (restored from a backup)

Election by lease and create revision, as in etcd's own recipe. Every write of a leader is one transaction compared
with its term, so one that was replaced without noticing writes nothing; a commit is compared with `top` besides, so
for one number there is at most one record.

Each method makes a bounded number of bounded calls and raises what they raise: trying again is the caller's, while
a thread of its own calls renew() (lease.py). All else: one thread at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from elastic.checkpoints.pointer import Pointer
from elastic.errors import CompareFailed, ElasticError
from elastic.protocol.messages import Generation, Kind
from elastic.store import chunks
from elastic.store.base import (
    Compare,
    CreateRevision,
    Delete,
    Item,
    Lease,
    ModRevision,
    Put,
    Store,
    TxnResult,
    Watch,
    WatchEvent,
)
from elastic.wire import codec

CALL_S = 1.0
"""Longest wait for one call. A timed-out transaction is found out about by reading."""

LONG_CALL_S = 5.0
"""The same of a call that reads many records."""

RECORDS_AT_ONCE = 32
"""In one answer: 16 MiB where each is as long as one that is not in pieces can be."""

LEASE_S = 2.0
"""A leader that dies is replaced after this long; training goes on meanwhile. Two lost renewals fit in it."""

LEASE_WORKERS = 1000
"""For so many. With more a leader has more to do than to renew its lease, and nobody notices sooner that it is gone."""

SURPASSED_AT_MOST = 100_000
"""Revisions by which etcd may be behind a term that somebody has seen. Each is a write, some milliseconds."""

SAFETY = 0.9
"""The part of the lease a leader relies on: clocks of two machines do not run alike."""


class LeadershipLost(ElasticError):
    """Tell nobody anything more, and stand for election again."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Somebody else leads. revision: watch the key from here."""

    leader: str
    revision: int


@dataclass(frozen=True, slots=True)
class Won:
    term: int


class Candidate:
    """address: what the others are told when this replica leads. clock: monotonic seconds."""

    def __init__(
        self, store: Store, job: str, address: str, clock: Callable[[], float], lease_s: float = LEASE_S
    ) -> None:
        self._store = store
        self._address = address
        self._clock = clock
        self._lease_s = lease_s
        root = f"/elastic/{job}"
        self._leader_key = f"{root}/leader"
        self._surpassed_key = f"{root}/surpassed"
        self._top_key = f"{root}/top"
        self._generation_keys = f"{root}/generations/"
        self._piece_keys = f"{root}/pieces/"
        self._pointer_keys = f"{root}/checkpoints/"
        self._result_key = f"{root}/result"
        self._lease: Lease | None = None
        self.held_until_s = 0.0
        """As renew() said last."""
        self._term = 0
        self._top_revision = 0

    # ---------------------------------------------------------------------------------------------- election

    def stand(self) -> Won | Taken:
        """Take the key if it is free. After StoreUnavailable call again: whether it was taken is read first."""
        item = self._store.get(self._leader_key, timeout_s=CALL_S)
        if item is not None:
            return self._seen(item)
        self._keep_lease()
        self._store.txn(
            (CreateRevision(self._leader_key, 0),),
            (Put(self._leader_key, self._address.encode(), self._lease),),
            timeout_s=CALL_S,
        )
        item = self._store.get(self._leader_key, timeout_s=CALL_S)
        return Taken("", 1) if item is None else self._seen(item)

    def _seen(self, item: Item) -> Won | Taken:
        if self._lease is not None and item.lease == self._lease.id:
            self._term = item.create_revision
            return Won(self._term)
        return Taken(item.value.decode(errors="replace"), item.mod_revision + 1)

    def _keep_lease(self) -> None:
        """A lease with its whole time ahead."""
        asked_s = self._clock()
        if self._lease is None or not self._store.keep_alive(self._lease, timeout_s=CALL_S):
            asked_s = self._clock()
            self._lease = self._store.lease(self._lease_s, timeout_s=CALL_S)
        self.held_until_s = asked_s + SAFETY * self._lease.granted_ttl_s

    def watch_leader(self, from_revision: int, deliver: Callable[[WatchEvent], None]) -> Watch:
        """Deliver whatever happens to the election key from then on."""
        return self._store.watch(self._leader_key, from_revision, deliver, timeout_s=CALL_S)

    def renew(self) -> float:
        """Until when, on this process's clock, nobody else can lead. Raises LeadershipLost if the lease is gone."""
        if self._lease is None:
            raise LeadershipLost("this replica holds no lease")
        asked_s = self._clock()
        left_s = self._store.keep_alive(self._lease, timeout_s=CALL_S)
        if not left_s:
            self._lease = None
            raise LeadershipLost("the lease has expired")
        self.held_until_s = asked_s + SAFETY * left_s
        return self.held_until_s

    def resign(self) -> None:
        """Give the key back at once, so that a successor need not wait for the lease."""
        lease, self._lease = self._lease, None
        if lease is not None:
            self._store.revoke(lease, timeout_s=CALL_S)

    def surpass(self, term: int) -> str:
        """Somebody has seen that term, which is later than the one that this candidate has won. If this candidate still
        holds the key, etcd was restored from a backup, and counts again numbers that others have seen. So make etcd
        count beyond that term; the next term is then later than all before. Returns why the present one has to be given
        up, or "" if the other one cannot be meant. May be called again. Raises LeadershipLost if the present one is
        over."""
        found = self._store.between(self._leader_key, f"{self._leader_key}\0", limit=1, timeout_s=CALL_S)
        holds = [item for item in found.items if item.key == self._leader_key and item.create_revision == self._term]
        revision = found.revision
        if not holds or term > revision + SURPASSED_AT_MOST:
            return ""
        while revision < term:
            revision = self.write((), (Put(self._surpassed_key, str(term).encode()),)).revision
        return f"term {term} was seen before this one, {self._term}: etcd was restored from a backup"

    # ----------------------------------------------------------------------------------------------- records

    def chain(self) -> tuple[Generation, ...]:
        """The committed records from the last form or loss generation to the highest, ascending; empty at first."""
        top = self._store.get(self._top_key, timeout_s=CALL_S)
        self._top_revision = top.mod_revision if top else 0
        if top is None:
            return ()
        number = int(top.value)
        (highest,) = self._records(number, number + 1)
        if highest.kind is not Kind.PLANNED:
            return (highest,)
        return (*self._records(highest.base, number), highest)

    def commit(self, generation: Generation) -> None:
        """Make a record durable, once. After StoreUnavailable call again with the same one: if the lost transaction
        got through, the second finds its own record and is content.

        Raises CompareFailed if another record took the number, LeadershipLost if another replica leads.
        """
        document, parts = chunks.cut(codec.to_json(generation))
        for part, content in parts.items():
            self.write((), (Put(f"{self._piece_keys}{part}", content),))
        key = f"{self._generation_keys}{generation.number}"
        result = self.write(
            (ModRevision(self._top_key, self._top_revision), CreateRevision(key, 0)),
            (Put(key, document), Put(self._top_key, str(generation.number).encode())),
        )
        if result.succeeded:
            self._top_revision = result.revision
            return
        top = self._store.get(self._top_key, timeout_s=CALL_S)
        record = self._store.get(key, timeout_s=CALL_S)
        if record is None or top is None or record.value != document or record.mod_revision != top.mod_revision:
            self._top_revision = top.mod_revision if top else 0
            highest = top.value.decode() if top else "none"
            raise CompareFailed(f"generation {generation.number} is taken; the highest committed is {highest}")
        self._top_revision = top.mod_revision

    def pointer(self, series: str) -> Pointer | None:
        """Where the pointer of a series is. Raises CheckpointCorrupt for what nobody here has written."""
        item = self._store.get(f"{self._pointer_keys}{series}", timeout_s=CALL_S)
        return Pointer.from_json(item.value) if item is not None else None

    def point(self, series: str, pointer: Pointer) -> Pointer:
        """Move the pointer if that is newer, under this term and in the highest committed generation. Returns where it
        is then. After StoreUnavailable it may be called again with the same one.

        Raises LeadershipLost, and CheckpointCorrupt for what nobody here has written.
        """
        key = f"{self._pointer_keys}{series}"
        item = self._store.get(key, timeout_s=CALL_S)
        before = Pointer.from_json(item.value) if item is not None else None
        if before is not None and not pointer.is_newer_than(before):
            return before
        unmoved = ModRevision(key, item.mod_revision if item is not None else 0)
        result = self.write((ModRevision(self._top_key, self._top_revision), unmoved), (Put(key, pointer.to_json()),))
        if not result.succeeded:
            raise CompareFailed(f"the pointer of {series}, or the highest generation, has changed meanwhile")
        return pointer

    def finish(self, result: dict[str, object]) -> None:
        """Write how the job ended; no leader after this one runs it again."""
        self.write((), (Put(self._result_key, json.dumps(result, sort_keys=True).encode()),))

    def result(self) -> dict[str, object] | None:
        """How the job ended, or None while it goes on."""
        item = self._store.get(self._result_key, timeout_s=CALL_S)
        if item is None:
            return None
        ended: dict[str, object] = json.loads(item.value)
        return ended

    def _records(self, first: int, end: int) -> list[Generation]:
        """Those from that number on, in as few reads as their number and size allow. Raises WireError for one that is
        missing or damaged."""
        found: dict[int, bytes] = {}
        for begin, last in _alike(first, end):
            key, beyond = f"{self._generation_keys}{begin}", f"{self._generation_keys}{last}\0"
            while True:
                items = self._store.between(key, beyond, limit=RECORDS_AT_ONCE, timeout_s=LONG_CALL_S).items
                for item in items:
                    found[int(item.key.removeprefix(self._generation_keys))] = item.value
                if len(items) < RECORDS_AT_ONCE:
                    break
                key = f"{items[-1].key}\0"
        return [self._record(number, found.get(number)) for number in range(first, end)]

    def _record(self, number: int, committed: bytes | None) -> Generation:
        if committed is None:
            raise codec.WireError(f"generation {number} is missing in the store")
        if (document := chunks.whole(committed, self._piece)) is None:
            raise codec.WireError(f"generation {number} is not whole in the store")
        return codec.generation_from_json(document)

    def _piece(self, key: str) -> bytes | None:
        item = self._store.get(f"{self._piece_keys}{key}", timeout_s=CALL_S)
        return item.value if item is not None else None

    def write(
        self, compares: tuple[Compare, ...], puts: tuple[Put, ...], deletes: tuple[Delete, ...] = ()
    ) -> TxnResult:
        """One transaction under this term. Raises LeadershipLost when the term is over."""
        fence = CreateRevision(self._leader_key, self._term)
        result = self._store.txn((fence, *compares), puts, deletes, timeout_s=CALL_S)
        if not result.succeeded:
            leader = self._store.get(self._leader_key, timeout_s=CALL_S)
            if leader is None or leader.create_revision != self._term:
                raise LeadershipLost("another replica leads")
        return result


def _alike(first: int, end: int) -> Iterator[tuple[int, int]]:
    """(from, to) of each run of numbers with as many digits, which sort as keys as they count. `end` is not in it."""
    while first < end:
        beyond = min(end, 10 ** len(str(first)))
        yield first, beyond - 1
        first = beyond


def lease_of(workers: int) -> float:
    """How long the lease of a job of that size lasts, in seconds."""
    return LEASE_S * max(1.0, workers / LEASE_WORKERS)
