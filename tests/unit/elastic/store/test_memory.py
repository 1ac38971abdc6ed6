"""The conformance suite on MemoryStore, and what only it can do."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest

from elastic.store.base import KeyDeleted, KeyPut, WatchEvent, WatchLost
from tests.conformance.store_suite import At, StoreSuite, Surroundings
from tests.memory_store import MemoryStore, write_key


class _Virtual:
    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._now_s = 0.0

    def pass_time(self, until: Callable[[], bool]) -> None:
        for _ in range(1000):
            if until():
                return
            self._now_s += 0.1
            self._store.advance(self._now_s)
        pytest.fail("100 s passed")

    def compact(self, revision: int) -> None:
        self._store.compact(revision)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def surroundings(store: MemoryStore) -> Surroundings:
    return _Virtual(store)


@pytest.fixture
def at() -> At:
    return "/t/{}".format


class TestMemoryStore(StoreSuite):
    """Every test of the suite."""


def test_a_lease_ends_exactly_when_its_time_is_over(store: MemoryStore) -> None:
    lease = store.lease(5, timeout_s=1)
    write_key(store, "k", b"", lease=lease, timeout_s=1)
    assert store.next_expiry_s() == 5
    store.advance(4.999)
    assert store.keep_alive(lease, timeout_s=1) == 5
    assert store.next_expiry_s() == pytest.approx(9.999)
    store.advance(9.998)
    assert store.get("k", timeout_s=1) is not None
    store.advance(9.9991)
    assert store.get("k", timeout_s=1) is None
    assert store.next_expiry_s() == math.inf


def test_leases_end_in_the_order_of_their_time(store: MemoryStore) -> None:
    seen: list[WatchEvent] = []
    for ttl_s in (4, 3, 5):
        write_key(store, f"k{ttl_s}", b"", lease=store.lease(ttl_s, timeout_s=1), timeout_s=1)
    store.watch("", store.prefix("", timeout_s=1).revision + 1, seen.append, timeout_s=1)
    store.advance(60)
    assert [event.key for event in seen if isinstance(event, KeyDeleted)] == ["k3", "k4", "k5"]


def test_time_never_runs_backwards(store: MemoryStore) -> None:
    store.advance(100)
    store.advance(0)
    store.lease(5, timeout_s=1)
    assert store.next_expiry_s() == 105


def test_lost_watches_say_so_once_and_then_nothing(store: MemoryStore) -> None:
    seen: list[WatchEvent] = []
    store.watch("", 1, seen.append, timeout_s=1)
    store.lose_watches("the server went away")
    store.lose_watches("again")
    write_key(store, "k", b"", timeout_s=1)
    assert seen == [WatchLost("the server went away")]


def test_a_watch_cancelled_by_what_it_hears_hears_nothing_more(store: MemoryStore) -> None:
    seen: list[WatchEvent] = []

    def once(event: WatchEvent) -> None:
        seen.append(event)
        watch.cancel()

    watch = store.watch("", 1, once, timeout_s=1)
    for number in itertools.islice(itertools.count(), 3):
        write_key(store, f"k{number}", b"", timeout_s=1)
    assert [event.item.key for event in seen if isinstance(event, KeyPut)] == ["k0"]
