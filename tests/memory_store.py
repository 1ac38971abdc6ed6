"""A Store in memory, which reads no clock: its leases expire in advance(now_s). And writes of one key to any Store."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from elastic.errors import LeaseExpired
from elastic.store.base import (
    Compare,
    CreateRevision,
    Delete,
    Item,
    KeyDeleted,
    KeyPut,
    Lease,
    Listing,
    ModRevision,
    Put,
    Store,
    TxnResult,
    Watch,
    WatchCompacted,
    WatchEvent,
    WatchLost,
    check_from_revision,
    check_txn,
    checked_key,
    means,
    whole_ttl_s,
)

LEAST_LEASE_S = 2
"""What etcd grants at least with its default election timeout of one second."""


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
        return self._items.get(checked_key(key))

    def prefix(self, prefix: str, *, timeout_s: float) -> Listing:
        # Unicode strings and their UTF-8 bytes sort alike, so this is etcd's order.
        items = tuple(self._items[key] for key in sorted(self._items) if key.startswith(prefix))
        return Listing(items, self._revision)

    def between(self, first: str, end: str, *, limit: int, timeout_s: float) -> Listing:
        first, end = checked_key(first), checked_key(end)
        keys = sorted(key for key in self._items if first <= key < end)
        return Listing(tuple(self._items[key] for key in keys[:limit]), self._revision)

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

    def _commit(self, puts: Sequence[Put], deletes: Sequence[Delete]) -> None:
        """One revision for all writes; none if nothing changes."""
        gone = sorted({key for delete in deletes for key in self._items if means(delete, key)})
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


def _revision_of(event: KeyPut | KeyDeleted) -> int:
    return event.item.mod_revision if isinstance(event, KeyPut) else event.revision


def _key_of(event: KeyPut | KeyDeleted) -> str:
    return event.item.key if isinstance(event, KeyPut) else event.key


def write_key(store: Store, key: str, value: bytes, *, lease: Lease | None = None, timeout_s: float) -> int:
    """Returns the new revision."""
    return store.txn((), (Put(key, value, lease),), timeout_s=timeout_s).revision


def delete_key(store: Store, key: str, *, timeout_s: float) -> bool:
    """Whether there was something to delete."""
    existed = store.get(key, timeout_s=timeout_s) is not None
    store.txn((), (), (key,), timeout_s=timeout_s)
    return existed
