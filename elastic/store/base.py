"""The store every durable decision is written to.

The words are etcd's. The store has one revision, a number that grows by one with every change; a transaction is
one change, whatever it writes. A key remembers the revision that created it and the one that last wrote it; a key
that does not exist has revision 0 in a compare. A key may hang on a lease and is deleted with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from elastic.errors import StoreRefused


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


Compare: TypeAlias = CreateRevision | ModRevision


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
        checked_key(key)
    twice = {key for key in written if written.count(key) > 1 or any(means(delete, key) for delete in deletes)}
    if twice:
        raise StoreRefused(f"one transaction writes {', '.join(sorted(twice))} twice")


def check_from_revision(from_revision: int) -> None:
    """Raises StoreRefused below 1: the store's numbers start there, and etcd takes 0 for "from now on"."""
    if from_revision < 1:
        raise StoreRefused(f"cannot watch from revision {from_revision}; the first is 1")


def means(delete: Delete, key: str) -> bool:
    """Whether the delete of a transaction means that key."""
    return key.startswith(delete.prefix) if isinstance(delete, Prefix) else key == delete


def checked_key(key: str) -> str:
    """Raises StoreRefused for an empty one."""
    if not key:
        raise StoreRefused("a key cannot be empty")
    return key
