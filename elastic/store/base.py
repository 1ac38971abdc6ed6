"""The store every durable decision is written to, and the same in memory.

The words are etcd's. The store has one revision, a number that grows by one with every change; a transaction is
one change, whatever it writes. A key remembers the revision that created it and the one that last wrote it; a key
that does not exist has revision 0 in a compare. A key may hang on a lease and is deleted with it.

Time is an argument: MemoryStore reads no clock, its leases expire in advance(now_s).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from elastic.errors import LeaseExpired, StoreRefused

LEAST_LEASE_S = 2
"""What etcd grants at least with its default election timeout of one second."""


@dataclass(frozen=True, slots=True)
class Item:
    """A key as it was read. lease: the id of the lease it hangs on, or 0."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Listing:
    """Items in key order, and the revision at which they were read: watch from the one after it."""

    items: tuple[Item, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class Lease:
    """granted_ttl_s: whole seconds, at least what was asked for, perhaps more."""

    id: int
    granted_ttl_s: int


@dataclass(frozen=True, slots=True)
class CreateRevision:
    """Holds if the key was created in that revision; 0: if it does not exist."""

    key: str
    equals: int


@dataclass(frozen=True, slots=True)
class ModRevision:
    """Holds if the key was last written in that revision; 0: if it does not exist."""

    key: str
    equals: int


@dataclass(frozen=True, slots=True)
class ValueIs:
    """Holds if the key exists and has that value."""

    key: str
    equals: bytes


Compare: TypeAlias = CreateRevision | ModRevision | ValueIs


@dataclass(frozen=True, slots=True)
class Put:
    """A write in a transaction. Without a lease the key stays, also if it hung on one before."""

    key: str
    value: bytes
    lease: Lease | None = None


@dataclass(frozen=True, slots=True)
class Prefix:
    """As a delete in a transaction: every key that starts so, however many there are. Not empty."""

    prefix: str


Delete: TypeAlias = str | Prefix


@dataclass(frozen=True, slots=True)
class TxnResult:
    """revision: of the store after the transaction; of the write itself if it succeeded and changed anything."""

    succeeded: bool
    revision: int


@dataclass(frozen=True, slots=True)
class KeyPut:
    """A key was written; the revision is item.mod_revision."""

    item: Item


@dataclass(frozen=True, slots=True)
class KeyDeleted:
    """A key was deleted, or its lease ended."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class WatchLost:
    """The last word of a watch that cannot go on: list again and watch from the revision after the listing's."""

    because: str


@dataclass(frozen=True, slots=True)
class WatchCompacted:
    """The last word of a watch whose start is no longer in the history: list again, as after WatchLost.

    revision: the oldest one from which a watch can still start.
    """

    revision: int


WatchEvent: TypeAlias = KeyPut | KeyDeleted | WatchLost | WatchCompacted


class Watch(Protocol):
    """A running watch."""

    def cancel(self) -> None:
        """Deliver nothing that was not being delivered already. Any number of times, also after its last word."""


class Store(Protocol):
    """Synchronous; each call waits at most timeout_s and then raises StoreUnavailable.

    StoreUnavailable.ambiguous is True for a write that may have happened: read before writing again.
    StoreRefused: the request or the rights are wrong. Keys are non-empty strings.
    """

    def get(self, key: str, *, timeout_s: float) -> Item | None:
        """The newest value that a majority agreed on, or None."""

    def prefix(self, prefix: str, *, timeout_s: float) -> Listing:
        """Every key that starts so, at one revision. The empty prefix lists all."""

    def between(self, first: str, end: str, *, limit: int, timeout_s: float) -> Listing:
        """The keys from `first` on that come before `end`, of more than `limit` the first ones."""

    def put(self, key: str, value: bytes, *, lease: Lease | None = None, timeout_s: float) -> int:
        """Write, and return the new revision. Raises LeaseExpired."""

    def delete(self, key: str, *, timeout_s: float) -> bool:
        """Whether there was something to delete."""

    def txn(
        self, compares: Sequence[Compare], puts: Sequence[Put], deletes: Sequence[Delete] = (), *, timeout_s: float
    ) -> TxnResult:
        """All writes if all compares hold, else none. Raises LeaseExpired; StoreRefused if a key is written twice."""

    def lease(self, ttl_s: float, *, timeout_s: float) -> Lease:
        """A new lease of at least that many seconds."""

    def keep_alive(self, lease: Lease, *, timeout_s: float) -> int:
        """Start its time anew; the seconds it has from now, 0 if it has expired or was revoked."""

    def revoke(self, lease: Lease, *, timeout_s: float) -> None:
        """End it and delete its keys, in one revision. A lease that has ended already is no error."""

    def watch(
        self, prefix: str, from_revision: int, deliver: Callable[[WatchEvent], None], *, timeout_s: float
    ) -> Watch:
        """Deliver every change of matching keys from that revision (>= 1) on, in order, exactly once.

        deliver runs on a thread of the store and only posts to a mailbox: it neither blocks nor calls the store.
        WatchLost or WatchCompacted is the last it hears. timeout_s bounds the start of the watch.
        """


@dataclass(slots=True)
class _LeaseState:
    ttl_s: int
    expires_s: float
    keys: set[str] = field(default_factory=set)


class _MemoryWatch:
    def __init__(self, prefix: str, deliver: Callable[[WatchEvent], None], watches: list[_MemoryWatch]) -> None:
        self.prefix = prefix
        self.deliver = deliver
        self._watches = watches

    def cancel(self) -> None:
        if self in self._watches:
            self._watches.remove(self)


class MemoryStore:
    """A Store in one process, for simulation and tests. One thread; deliveries happen inside the call that causes
    them. Leases expire only in advance(), and as late as the caller likes, as in etcd."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s
        self._revision = 1
        self._items: dict[str, Item] = {}
        self._leases: dict[int, _LeaseState] = {}
        self._last_lease = 0
        self._history: list[KeyPut | KeyDeleted] = []
        self._compacted = 0
        self._watches: list[_MemoryWatch] = []

    def advance(self, now_s: float) -> None:
        """Move time forward; leases that ended by then delete their keys, the earliest first."""
        self._now_s = max(now_s, self._now_s)
        due = [(state.expires_s, lease_id) for lease_id, state in self._leases.items()]
        for expires_s, lease_id in sorted(due):
            if expires_s <= self._now_s:
                self._end(lease_id)

    def next_expiry_s(self) -> float:
        """When the next lease ends if nobody keeps it alive; infinity without leases."""
        return min((state.expires_s for state in self._leases.values()), default=math.inf)

    def compact(self, revision: int) -> None:
        """Forget the history before that revision; a watch cannot start there any more."""
        self._compacted = max(self._compacted, min(revision, self._revision))
        self._history = [event for event in self._history if _revision_of(event) >= self._compacted]

    def lose_watches(self, because: str) -> None:
        """End every watch, as a store that goes away does."""
        watches, self._watches[:] = list(self._watches), []
        for watch in watches:
            watch.deliver(WatchLost(because))

    def get(self, key: str, *, timeout_s: float) -> Item | None:
        return self._items.get(_checked_key(key))

    def prefix(self, prefix: str, *, timeout_s: float) -> Listing:
        # Unicode strings and their UTF-8 bytes sort alike, so this is etcd's order.
        items = tuple(self._items[key] for key in sorted(self._items) if key.startswith(prefix))
        return Listing(items, self._revision)

    def between(self, first: str, end: str, *, limit: int, timeout_s: float) -> Listing:
        first, end = _checked_key(first), _checked_key(end)
        keys = sorted(key for key in self._items if first <= key < end)
        return Listing(tuple(self._items[key] for key in keys[:limit]), self._revision)

    def put(self, key: str, value: bytes, *, lease: Lease | None = None, timeout_s: float) -> int:
        return self.txn((), (Put(key, value, lease),), timeout_s=timeout_s).revision

    def delete(self, key: str, *, timeout_s: float) -> bool:
        existed = _checked_key(key) in self._items
        self._commit((), (key,))
        return existed

    def txn(
        self, compares: Sequence[Compare], puts: Sequence[Put], deletes: Sequence[Delete] = (), *, timeout_s: float
    ) -> TxnResult:
        check_txn(compares, puts, deletes)
        if not all(self._holds(compare) for compare in compares):
            return TxnResult(False, self._revision)
        for put in puts:
            if put.lease is not None and put.lease.id not in self._leases:
                raise LeaseExpired(f"the lease of {put.key!r} has expired")
        self._commit(puts, deletes)
        return TxnResult(True, self._revision)

    def lease(self, ttl_s: float, *, timeout_s: float) -> Lease:
        granted_s = max(LEAST_LEASE_S, whole_ttl_s(ttl_s))
        self._last_lease += 1
        self._leases[self._last_lease] = _LeaseState(granted_s, self._now_s + granted_s)
        return Lease(self._last_lease, granted_s)

    def keep_alive(self, lease: Lease, *, timeout_s: float) -> int:
        state = self._leases.get(lease.id)
        if state is None:
            return 0
        state.expires_s = self._now_s + state.ttl_s
        return state.ttl_s

    def revoke(self, lease: Lease, *, timeout_s: float) -> None:
        self._end(lease.id)

    def watch(
        self, prefix: str, from_revision: int, deliver: Callable[[WatchEvent], None], *, timeout_s: float
    ) -> Watch:
        check_from_revision(from_revision)
        watch = _MemoryWatch(prefix, deliver, self._watches)
        if from_revision < self._compacted:
            deliver(WatchCompacted(self._compacted))
            return watch
        self._watches.append(watch)
        for event in list(self._history):
            if _revision_of(event) >= from_revision and _key_of(event).startswith(prefix):
                deliver(event)
        return watch

    def _holds(self, compare: Compare) -> bool:
        item = self._items.get(compare.key)
        match compare:
            case CreateRevision():
                return (item.create_revision if item else 0) == compare.equals
            case ModRevision():
                return (item.mod_revision if item else 0) == compare.equals
            case ValueIs():
                return item is not None and item.value == compare.equals

    def _commit(self, puts: Sequence[Put], deletes: Sequence[Delete]) -> None:
        """One revision for all writes; none if nothing changes."""
        gone = sorted({key for delete in deletes for key in self._items if _deletes(delete, key)})
        if not puts and not gone:
            return
        self._revision += 1
        events: list[KeyPut | KeyDeleted] = []
        for put in puts:
            old = self._detach(put.key)
            created = old.create_revision if old else self._revision
            lease_id = put.lease.id if put.lease else 0
            item = Item(put.key, put.value, created, self._revision, lease_id)
            self._items[put.key] = item
            if lease_id:
                self._leases[lease_id].keys.add(put.key)
            events.append(KeyPut(item))
        for key in gone:
            self._detach(key)
            del self._items[key]
            events.append(KeyDeleted(key, self._revision))
        self._history += events
        for event in events:
            for watch in list(self._watches):
                if watch in self._watches and _key_of(event).startswith(watch.prefix):
                    watch.deliver(event)

    def _detach(self, key: str) -> Item | None:
        old = self._items.get(key)
        if old is not None and old.lease in self._leases:
            self._leases[old.lease].keys.discard(key)
        return old

    def _end(self, lease_id: int) -> None:
        state = self._leases.pop(lease_id, None)
        if state is not None:
            self._commit((), sorted(state.keys))


def whole_ttl_s(ttl_s: float) -> int:
    """Leases are granted in whole seconds: rounded up. Raises StoreRefused unless positive and finite."""
    if not math.isfinite(ttl_s) or ttl_s <= 0:
        raise StoreRefused(f"a lease of {ttl_s} s cannot be granted; ask for a positive number of seconds")
    return math.ceil(ttl_s)


def check_txn(compares: Sequence[Compare], puts: Sequence[Put], deletes: Sequence[Delete]) -> None:
    """Raises StoreRefused for an empty key, and for a key that one transaction would write twice."""
    written = [put.key for put in puts]
    deleted = [delete.prefix if isinstance(delete, Prefix) else delete for delete in deletes]
    for key in (*written, *deleted, *(compare.key for compare in compares)):
        _checked_key(key)
    twice = {key for key in written if written.count(key) > 1 or any(_deletes(delete, key) for delete in deletes)}
    if twice:
        raise StoreRefused(f"one transaction writes {', '.join(sorted(twice))} twice")


def check_from_revision(from_revision: int) -> None:
    """Raises StoreRefused below 1: the store's numbers start there, and etcd takes 0 for "from now on"."""
    if from_revision < 1:
        raise StoreRefused(f"cannot watch from revision {from_revision}; the first is 1")


def _deletes(delete: Delete, key: str) -> bool:
    return key.startswith(delete.prefix) if isinstance(delete, Prefix) else key == delete


def _checked_key(key: str) -> str:
    if not key:
        raise StoreRefused("a key cannot be empty")
    return key


def _revision_of(event: KeyPut | KeyDeleted) -> int:
    return event.item.mod_revision if isinstance(event, KeyPut) else event.revision


def _key_of(event: KeyPut | KeyDeleted) -> str:
    return event.item.key if isinstance(event, KeyPut) else event.key
