"""What every Store does, as tests. A module that subclasses StoreSuite and gives the three fixtures runs them.

The suite's keys are its own: fixture `at` makes them, a new prefix for each test, so one server serves all tests.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Protocol

import pytest

from elastic.errors import LeaseExpired, StoreRefused
from elastic.store.base import (
    Compare,
    CreateRevision,
    Delete,
    Item,
    KeyDeleted,
    KeyPut,
    Lease,
    ModRevision,
    Prefix,
    Put,
    Store,
    WatchCompacted,
    WatchEvent,
)
from tests.memory_store import delete_key, write_key

CALL_S = 60.0
"""Deadline of one call; generous, because a loaded machine is no fault of the store."""


class Surroundings(Protocol):
    """What a test needs beside the store."""

    def pass_time(self, until: Callable[[], bool]) -> None:
        """Let time pass until the condition holds; fails the test if it never does."""

    def compact(self, revision: int) -> None:
        """Make the store forget its history before that revision."""


At = Callable[[str], str]


class Inbox:
    """Collects what a watch delivers."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[WatchEvent] = queue.SimpleQueue()

    def __call__(self, event: WatchEvent) -> None:
        self._queue.put(event)

    def take(self, count: int = 1) -> list[WatchEvent]:
        return [self._queue.get(timeout=CALL_S) for _ in range(count)]

    def empty(self) -> bool:
        return self._queue.empty()


class StoreSuite:
    """Fixtures to give: store, surroundings, at."""

    def test_a_missing_key_is_none(self, store: Store, at: At) -> None:
        assert store.get(at("nothing"), timeout_s=CALL_S) is None

    def test_a_key_remembers_the_revision_of_its_creation_and_of_its_last_write(self, store: Store, at: At) -> None:
        first = write_key(store, at("k"), b"1", timeout_s=CALL_S)
        second = write_key(store, at("k"), b"2", timeout_s=CALL_S)
        item = store.get(at("k"), timeout_s=CALL_S)
        assert item is not None
        assert (item.value, item.create_revision, item.mod_revision) == (b"2", first, second)
        assert second == first + 1

    def test_any_bytes_come_back_as_they_were_written(self, store: Store, at: At) -> None:
        value = bytes(range(256)) * 64
        write_key(store, at("k"), value, timeout_s=CALL_S)
        item = store.get(at("k"), timeout_s=CALL_S)
        assert item is not None and item.value == value

    def test_a_key_created_anew_is_a_new_key(self, store: Store, at: At) -> None:
        write_key(store, at("k"), b"1", timeout_s=CALL_S)
        assert delete_key(store, at("k"), timeout_s=CALL_S)
        again = write_key(store, at("k"), b"2", timeout_s=CALL_S)
        item = store.get(at("k"), timeout_s=CALL_S)
        assert item is not None and item.create_revision == again

    def test_deleting_nothing_changes_nothing(self, store: Store, at: At) -> None:
        before = store.prefix(at(""), timeout_s=CALL_S).revision
        assert not delete_key(store, at("nothing"), timeout_s=CALL_S)
        assert store.prefix(at(""), timeout_s=CALL_S).revision == before

    def test_a_prefix_lists_its_keys_in_order_at_one_revision(self, store: Store, at: At) -> None:
        for name in ("b", "a/2", "a/10", "aa", "ä"):
            last = write_key(store, at(name), name.encode(), timeout_s=CALL_S)
        listing = store.prefix(at(""), timeout_s=CALL_S)
        assert [item.value.decode() for item in listing.items] == ["a/10", "a/2", "aa", "b", "ä"]
        assert listing.revision == last
        assert [item.value for item in store.prefix(at("a/"), timeout_s=CALL_S).items] == [b"a/10", b"a/2"]
        assert store.prefix(at("zzz"), timeout_s=CALL_S).items == ()

    def test_what_is_between_two_keys_is_listed_in_order_the_first_ones_of_many(self, store: Store, at: At) -> None:
        for name in ("1", "10", "2", "3", "30", "a"):
            last = write_key(store, at(name), name.encode(), timeout_s=CALL_S)

        def between(first: str, end: str, limit: int) -> list[str]:
            listing = store.between(at(first), at(end), limit=limit, timeout_s=CALL_S)
            assert listing.revision == last
            return [item.value.decode() for item in listing.items]

        assert between("1", "3", 10) == ["1", "10", "2"]
        assert between("1", "3\0", 10) == ["1", "10", "2", "3"]
        assert between("1\0", "3\0", 2) == ["10", "2"]
        assert between("3", "1", 10) == between("4", "9", 10) == []
        for first, end in (("", "b"), ("b", "")):
            with pytest.raises(StoreRefused):
                store.between(first, end, limit=1, timeout_s=CALL_S)

    def test_the_empty_prefix_lists_everything(self, store: Store, at: At) -> None:
        write_key(store, at("k"), b"", timeout_s=CALL_S)
        assert at("k") in {item.key for item in store.prefix("", timeout_s=CALL_S).items}

    def test_a_transaction_is_one_revision(self, store: Store, at: At) -> None:
        before = write_key(store, at("old"), b"", timeout_s=CALL_S)
        result = store.txn((), [Put(at("a"), b"1"), Put(at("b"), b"2")], [at("old")], timeout_s=CALL_S)
        listing = store.prefix(at(""), timeout_s=CALL_S)
        assert result.succeeded
        assert [(item.key, item.mod_revision) for item in listing.items] == [
            (at("a"), before + 1),
            (at("b"), before + 1),
        ]
        assert result.revision == listing.revision == before + 1

    def test_a_transaction_deletes_all_keys_of_a_prefix(self, store: Store, at: At) -> None:
        for name in ("a/1", "a/2", "a/2/3", "a", "b"):
            write_key(store, at(name), b"", timeout_s=CALL_S)
        inbox = Inbox()
        watch = store.watch(at(""), store.prefix(at(""), timeout_s=CALL_S).revision + 1, inbox, timeout_s=CALL_S)
        deletes: list[Delete] = [Prefix(at("a/")), at("b"), at("a/1"), Prefix(at("none/"))]
        revision = store.txn((), [Put(at("c"), b"")], deletes, timeout_s=CALL_S).revision
        assert [item.key for item in store.prefix(at(""), timeout_s=CALL_S).items] == [at("a"), at("c")]
        gone = {KeyDeleted(at(name), revision) for name in ("a/1", "a/2", "a/2/3", "b")}
        assert gone == {event for event in inbox.take(5) if isinstance(event, KeyDeleted)}
        watch.cancel()
        for puts, delete in (([Put(at("a/4"), b"")], Prefix(at("a/"))), ([], Prefix(""))):
            with pytest.raises(StoreRefused):
                store.txn((), puts, [delete], timeout_s=CALL_S)

    def test_a_failed_transaction_writes_nothing_and_tells_the_revision(self, store: Store, at: At) -> None:
        before = write_key(store, at("k"), b"1", timeout_s=CALL_S)
        result = store.txn([ModRevision(at("k"), before + 1)], [Put(at("x"), b"3")], [at("k")], timeout_s=CALL_S)
        item = store.get(at("k"), timeout_s=CALL_S)
        assert not result.succeeded and result.revision == before
        assert item is not None and item.value == b"1"
        assert store.get(at("x"), timeout_s=CALL_S) is None

    @pytest.mark.parametrize("kind", [CreateRevision, ModRevision])
    def test_a_missing_key_has_revision_zero(
        self, store: Store, at: At, kind: type[CreateRevision] | type[ModRevision]
    ) -> None:
        """The compare that lets only one of many create a key."""
        first = store.txn([kind(at("k"), 0)], [Put(at("k"), b"1")], timeout_s=CALL_S)
        second = store.txn([kind(at("k"), 0)], [Put(at("k"), b"2")], timeout_s=CALL_S)
        assert (first.succeeded, second.succeeded) == (True, False)

    def test_compares_tell_creation_from_last_write(self, store: Store, at: At) -> None:
        created = write_key(store, at("k"), b"1", timeout_s=CALL_S)
        written = write_key(store, at("k"), b"2", timeout_s=CALL_S)

        def holds(compare: Compare) -> bool:
            return store.txn([compare], [], timeout_s=CALL_S).succeeded

        assert holds(CreateRevision(at("k"), created)) and not holds(CreateRevision(at("k"), written))
        assert holds(ModRevision(at("k"), written)) and not holds(ModRevision(at("k"), created))

    def test_all_compares_must_hold(self, store: Store, at: At) -> None:
        written = write_key(store, at("k"), b"1", timeout_s=CALL_S)
        compares: list[Compare] = [ModRevision(at("k"), written), CreateRevision(at("other"), 7)]
        assert not store.txn(compares, [Put(at("x"), b"")], timeout_s=CALL_S).succeeded

    def test_a_transaction_without_effect_keeps_the_revision(self, store: Store, at: At) -> None:
        before = write_key(store, at("k"), b"1", timeout_s=CALL_S)
        assert store.txn((), (), [at("nothing")], timeout_s=CALL_S).revision == before

    def test_one_transaction_writes_a_key_once(self, store: Store, at: At) -> None:
        with pytest.raises(StoreRefused, match="twice"):
            store.txn((), [Put(at("k"), b"1"), Put(at("k"), b"2")], timeout_s=CALL_S)
        with pytest.raises(StoreRefused, match="twice"):
            store.txn((), [Put(at("k"), b"1")], [at("k")], timeout_s=CALL_S)
        assert store.get(at("k"), timeout_s=CALL_S) is None

    def test_an_empty_key_is_refused(self, store: Store) -> None:
        for call in (
            lambda: store.get("", timeout_s=CALL_S),
            lambda: write_key(store, "", b"", timeout_s=CALL_S),
            lambda: delete_key(store, "", timeout_s=CALL_S),
            lambda: store.txn([ModRevision("", 0)], (), timeout_s=CALL_S),
        ):
            with pytest.raises(StoreRefused, match="key"):
                call()

    def test_a_lease_is_granted_for_whole_seconds_and_at_least_what_was_asked(self, store: Store) -> None:
        lease = store.lease(2.5, timeout_s=CALL_S)
        assert lease.granted_ttl_s >= 3
        assert store.keep_alive(lease, timeout_s=CALL_S) == lease.granted_ttl_s

    @pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan"), float("inf")])
    def test_a_lease_of_no_length_is_refused(self, store: Store, ttl_s: float) -> None:
        with pytest.raises(StoreRefused, match="lease"):
            store.lease(ttl_s, timeout_s=CALL_S)

    def test_a_key_dies_with_its_lease(self, store: Store, at: At, surroundings: Surroundings) -> None:
        lease = store.lease(1, timeout_s=CALL_S)
        write_key(store, at("mine"), b"", lease=lease, timeout_s=CALL_S)
        write_key(store, at("free"), b"", timeout_s=CALL_S)
        item = store.get(at("mine"), timeout_s=CALL_S)
        assert item is not None and item.lease == lease.id
        surroundings.pass_time(until=lambda: store.get(at("mine"), timeout_s=CALL_S) is None)
        assert store.get(at("free"), timeout_s=CALL_S) is not None
        assert store.keep_alive(lease, timeout_s=CALL_S) == 0

    def test_a_lease_that_is_kept_alive_outlives_one_that_is_not(
        self, store: Store, at: At, surroundings: Surroundings
    ) -> None:
        kept, left = store.lease(2, timeout_s=CALL_S), store.lease(2, timeout_s=CALL_S)
        write_key(store, at("kept"), b"", lease=kept, timeout_s=CALL_S)
        write_key(store, at("left"), b"", lease=left, timeout_s=CALL_S)

        def left_is_gone() -> bool:
            assert store.keep_alive(kept, timeout_s=CALL_S) > 0
            return store.get(at("left"), timeout_s=CALL_S) is None

        surroundings.pass_time(until=left_is_gone)
        assert store.get(at("kept"), timeout_s=CALL_S) is not None

    def test_revoking_deletes_all_keys_of_the_lease_in_one_revision(self, store: Store, at: At) -> None:
        lease = store.lease(60, timeout_s=CALL_S)
        write_key(store, at("a"), b"", lease=lease, timeout_s=CALL_S)
        before = write_key(store, at("b"), b"", lease=lease, timeout_s=CALL_S)
        store.revoke(lease, timeout_s=CALL_S)
        listing = store.prefix(at(""), timeout_s=CALL_S)
        assert listing.items == () and listing.revision == before + 1
        assert store.keep_alive(lease, timeout_s=CALL_S) == 0

    def test_revoking_twice_is_no_error(self, store: Store) -> None:
        lease = store.lease(60, timeout_s=CALL_S)
        store.revoke(lease, timeout_s=CALL_S)
        store.revoke(lease, timeout_s=CALL_S)

    def test_a_write_on_a_lease_that_ended_is_told_apart(self, store: Store, at: At) -> None:
        lease = store.lease(60, timeout_s=CALL_S)
        store.revoke(lease, timeout_s=CALL_S)
        with pytest.raises(LeaseExpired):
            write_key(store, at("k"), b"", lease=lease, timeout_s=CALL_S)
        with pytest.raises(LeaseExpired):
            store.txn((), [Put(at("other"), b""), Put(at("k"), b"", lease)], timeout_s=CALL_S)
        assert store.prefix(at(""), timeout_s=CALL_S).items == ()

    def test_the_last_write_decides_on_which_lease_a_key_hangs(self, store: Store, at: At) -> None:
        leases = [store.lease(60, timeout_s=CALL_S) for _ in range(2)]
        for key in ("freed", "moved"):
            write_key(store, at(key), b"", lease=leases[0], timeout_s=CALL_S)
        write_key(store, at("freed"), b"", timeout_s=CALL_S)
        write_key(store, at("moved"), b"", lease=leases[1], timeout_s=CALL_S)
        store.revoke(leases[0], timeout_s=CALL_S)
        assert [item.key for item in store.prefix(at(""), timeout_s=CALL_S).items] == [at("freed"), at("moved")]
        store.revoke(leases[1], timeout_s=CALL_S)
        assert [item.key for item in store.prefix(at(""), timeout_s=CALL_S).items] == [at("freed")]

    def test_a_lease_nobody_granted_has_ended(self, store: Store) -> None:
        assert store.keep_alive(Lease(987654321, 5), timeout_s=CALL_S) == 0

    def test_a_watch_tells_every_change_of_its_prefix_in_order(self, store: Store, at: At) -> None:
        inbox = Inbox()
        start = store.prefix(at(""), timeout_s=CALL_S).revision + 1
        watch = store.watch(at("a/"), start, inbox, timeout_s=CALL_S)
        put = write_key(store, at("a/1"), b"x", timeout_s=CALL_S)
        write_key(store, at("b"), b"elsewhere", timeout_s=CALL_S)
        delete_key(store, at("a/1"), timeout_s=CALL_S)
        store.txn((), [Put(at("a/2"), b"y"), Put(at("b"), b"z")], timeout_s=CALL_S)
        events = inbox.take(3)
        watch.cancel()
        assert [type(event) for event in events] == [KeyPut, KeyDeleted, KeyPut]
        put_event, deleted, last = events
        assert isinstance(put_event, KeyPut) and put_event.item == store_item(at("a/1"), b"x", put)
        assert deleted == KeyDeleted(at("a/1"), put + 2)
        assert isinstance(last, KeyPut) and (last.item.key, last.item.mod_revision) == (at("a/2"), put + 3)
        assert inbox.empty()

    def test_a_watch_from_the_past_tells_the_history_first(self, store: Store, at: At) -> None:
        first = write_key(store, at("k"), b"1", timeout_s=CALL_S)
        write_key(store, at("k"), b"2", timeout_s=CALL_S)
        delete_key(store, at("k"), timeout_s=CALL_S)
        inbox = Inbox()
        watch = store.watch(at(""), first + 1, inbox, timeout_s=CALL_S)
        write_key(store, at("k"), b"3", timeout_s=CALL_S)
        revisions = [e.item.mod_revision if isinstance(e, KeyPut) else e for e in inbox.take(3)]
        watch.cancel()
        assert revisions == [first + 1, KeyDeleted(at("k"), first + 2), first + 3]

    def test_listing_and_watching_from_the_next_revision_misses_and_repeats_nothing(self, store: Store, at: At) -> None:
        write_key(store, at("a"), b"1", timeout_s=CALL_S)
        listing = store.prefix(at(""), timeout_s=CALL_S)
        write_key(store, at("a"), b"2", timeout_s=CALL_S)
        inbox = Inbox()
        watch = store.watch(at(""), listing.revision + 1, inbox, timeout_s=CALL_S)
        write_key(store, at("a"), b"3", timeout_s=CALL_S)
        values = [event.item.value for event in inbox.take(2) if isinstance(event, KeyPut)]
        watch.cancel()
        assert [item.value for item in listing.items] + values == [b"1", b"2", b"3"]

    def test_the_end_of_a_lease_is_seen_by_a_watch(self, store: Store, at: At, surroundings: Surroundings) -> None:
        lease = store.lease(1, timeout_s=CALL_S)
        put = write_key(store, at("k"), b"", lease=lease, timeout_s=CALL_S)
        inbox = Inbox()
        watch = store.watch(at(""), put + 1, inbox, timeout_s=CALL_S)
        surroundings.pass_time(until=lambda: not inbox.empty())
        watch.cancel()
        (seen,) = inbox.take()
        # The store's revision counts the keys of all tests, and leases of earlier ones may end meanwhile.
        assert isinstance(seen, KeyDeleted) and seen.key == at("k") and seen.revision > put

    def test_a_cancelled_watch_is_silent(self, store: Store, at: At) -> None:
        cancelled, other = Inbox(), Inbox()
        start = store.prefix(at(""), timeout_s=CALL_S).revision + 1
        watch = store.watch(at(""), start, cancelled, timeout_s=CALL_S)
        witness = store.watch(at(""), start, other, timeout_s=CALL_S)
        watch.cancel()
        watch.cancel()
        write_key(store, at("k"), b"", timeout_s=CALL_S)
        other.take()
        witness.cancel()
        assert cancelled.empty()

    def test_a_watch_on_forgotten_history_says_so_and_listing_again_goes_on(
        self, store: Store, at: At, surroundings: Surroundings
    ) -> None:
        first = write_key(store, at("k"), b"1", timeout_s=CALL_S)
        last = write_key(store, at("k"), b"2", timeout_s=CALL_S)
        surroundings.compact(last)
        inbox = Inbox()
        store.watch(at(""), first, inbox, timeout_s=CALL_S)
        assert inbox.take() == [WatchCompacted(last)]
        listing = store.prefix(at(""), timeout_s=CALL_S)
        assert [item.value for item in listing.items] == [b"2"]
        again = store.watch(at(""), listing.revision + 1, inbox, timeout_s=CALL_S)
        write_key(store, at("k"), b"3", timeout_s=CALL_S)
        (event,) = inbox.take()
        again.cancel()
        assert isinstance(event, KeyPut) and event.item.value == b"3"

    def test_watching_from_revision_zero_is_refused(self, store: Store, at: At) -> None:
        with pytest.raises(StoreRefused, match="revision 0"):
            store.watch(at(""), 0, Inbox(), timeout_s=CALL_S)

    def test_an_election_has_one_winner_and_a_successor_fences_the_loser(self, store: Store, at: At) -> None:
        """The pattern the rendezvous uses: a key on a lease, whose creation revision is the term of its owner."""

        def stand(lease: Lease, name: bytes) -> bool:
            return store.txn(
                [CreateRevision(at("leader"), 0)], [Put(at("leader"), name, lease)], timeout_s=CALL_S
            ).succeeded

        def term() -> int:
            item = store.get(at("leader"), timeout_s=CALL_S)
            assert item is not None
            return item.create_revision

        def write(as_of: int) -> bool:
            return store.txn(
                [CreateRevision(at("leader"), as_of)], [Put(at("decision"), b"")], timeout_s=CALL_S
            ).succeeded

        leases = [store.lease(60, timeout_s=CALL_S) for _ in range(2)]
        assert [stand(leases[0], b"a"), stand(leases[1], b"b")] == [True, False]
        old_term = term()
        assert write(old_term)
        store.revoke(leases[0], timeout_s=CALL_S)
        assert not write(old_term)
        assert stand(leases[1], b"b")
        assert term() > old_term and not write(old_term) and write(term())


def store_item(key: str, value: bytes, revision: int) -> Item:
    """A key as it is right after the write that created it."""
    return Item(key, value, create_revision=revision, mod_revision=revision)
