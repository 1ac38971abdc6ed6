"""The keys of one run of torchrun in etcd: read, written if nobody else has, waited for.

A call is tried again while no member of etcd answers, for ANSWERED_S: elections take a few seconds. A write that may
have happened is recognised by a number that only it has. The keys hang on leases, so what a run leaves behind is gone
some hours later.
"""

from __future__ import annotations

import secrets
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import tenacity

from elastic.errors import ConfigError, ElasticError, LeaseExpired, StoreUnavailable
from elastic.store.base import Item, Lease, ModRevision, Put, Store

PREFIX = "/elastic-ring/torchrun"
MAGIC = b"etr1"
NONCE_BYTES = 8

ANSWERED_S = 30.0
ATTEMPT_S = 5.0
LONGEST_PAUSE_S = 1.0

LEASE_S = 4 * 3600
"""A key is gone so long after it was written, and no sooner than after half of that. The state of the rendezvous is
written every few seconds; everything else is read within the round in which it was written."""

LOOK_S = 1.0
"""How often a key that is waited for is looked for where no watch says that it is there."""

T = TypeVar("T")


class CorruptValue(ElasticError):
    """Somebody else writes to the keys of this run, or has damaged them: remove them, or take another --rdzv-id."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A value, the revision that wrote it, and the one in which its key came to be."""

    value: bytes
    revision: int
    created: int


class RunKeys:
    """Used by any thread. Names are relative to the run. Every call raises StoreError if etcd does not answer for
    ANSWERED_S or refuses, and what reads raises CorruptValue."""

    def __init__(self, store: Store, run: str) -> None:
        """run: the --rdzv-id. Raises ConfigError for one that is empty or has a slash."""
        if not run or "/" in run:
            raise ConfigError(f"--rdzv-id {run!r} cannot be the name of a run: give one without a slash")
        self._store = store
        self._prefix = f"{PREFIX}/{run}/"
        self._leasing = threading.Lock()
        self._lease: tuple[Lease, float] | None = None

    def path(self, name: str) -> str:
        """Its key in etcd."""
        return f"{self._prefix}{name}"

    def read(self, name: str) -> Entry | None:
        item = self._tried(lambda: self._store.get(self.path(name), timeout_s=ATTEMPT_S))
        return None if item is None else Entry(_payload(item), item.mod_revision, item.create_revision)

    def write(
        self, name: str, payload: bytes, *, if_revision: int | None = None, overwritten: bool = False
    ) -> int | None:
        """if_revision: only if the key was last written then; 0: only if it does not exist; None: in any case. Returns
        the new revision; None: it was another.

        overwritten: the write is recognised also if another one has followed before the answer to it was lost. For that
        it leaves a second key.
        """
        key = self.path(name)
        nonce = secrets.token_bytes(NONCE_BYTES)
        value = MAGIC + zlib.crc32(nonce + payload).to_bytes(4, "big") + nonce + payload
        compares = () if if_revision is None else (ModRevision(key, if_revision),)
        proof = f"{key}/{nonce.hex()}" if overwritten else key

        def attempt() -> int | None:
            puts = [Put(written, value, self._current_lease()) for written in dict.fromkeys((key, proof))]
            done = self._store.txn(compares, puts, timeout_s=ATTEMPT_S)
            if done.succeeded:
                return done.revision
            there = self._store.get(proof, timeout_s=ATTEMPT_S)
            return there.mod_revision if there is not None and there.value == value else None

        return self._tried(attempt)

    def await_all(self, names: Sequence[str], timeout_s: float) -> bool:
        """Until all of them exist; False: not in time. timeout_s 0: whether they exist."""
        until_s = time.monotonic() + timeout_s
        return all(self._await(self.path(name), until_s) for name in names)

    def _await(self, key: str, until_s: float) -> bool:
        changed = threading.Event()
        while True:
            listing = self._tried(lambda: self._store.between(key, key + "\0", limit=1, timeout_s=ATTEMPT_S))
            if listing.items:
                return True
            if (left_s := until_s - time.monotonic()) <= 0:
                return False
            changed.clear()
            try:
                watch = self._store.watch(key, listing.revision + 1, lambda _: changed.set(), timeout_s=ATTEMPT_S)
            except StoreUnavailable:
                time.sleep(min(left_s, LOOK_S))  # no watch to wait on: look again
                continue
            try:
                changed.wait(min(left_s, LOOK_S))
            finally:
                watch.cancel()

    def _current_lease(self) -> Lease:
        with self._leasing:
            now_s = time.monotonic()
            if self._lease is None or now_s > self._lease[1] + LEASE_S / 2:
                self._lease = self._store.lease(LEASE_S, timeout_s=ATTEMPT_S), now_s
            return self._lease[0]

    def _tried(self, call: Callable[[], T]) -> T:
        again = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type((StoreUnavailable, LeaseExpired)),
            wait=tenacity.wait_random_exponential(multiplier=0.05, max=LONGEST_PAUSE_S),
            stop=tenacity.stop_after_delay(ANSWERED_S),
            before_sleep=self._failed,
            reraise=True,
        )
        return again(call)

    def _failed(self, state: tenacity.RetryCallState) -> None:
        """Before another attempt."""
        if state.outcome is not None and isinstance(state.outcome.exception(), LeaseExpired):
            with self._leasing:
                self._lease = None


def _payload(item: Item) -> bytes:
    head, body = item.value[: len(MAGIC) + 4], item.value[len(MAGIC) + 4 :]
    if len(body) < NONCE_BYTES or head != MAGIC + zlib.crc32(body).to_bytes(4, "big"):
        raise CorruptValue(f"{item.key} in etcd holds what no agent of torchrun has written there")
    return body[NONCE_BYTES:]
