"""One watch on a prefix, which notices by itself that nobody answers any more."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from elastic.errors import StoreError, StoreRefused, StoreUnavailable
from elastic.store.base import KeyDeleted, KeyPut, WatchCompacted, WatchEvent, WatchLost
from elastic.store.etcd_messages import rpc
from elastic.store.etcd_requests import code_of, details_of, item_of, typed

PROBE_S = 2.0
"""How often a watch asks etcd for a sign of life."""

CANCEL_S = 5.0
"""How long `cancel` waits for what is being delivered."""

PROBES_UNANSWERED = 3
"""A watch is lost when that many questions in a row had no answer. Counted, not timed: a process that was frozen
itself asks again before it blames etcd."""

_PROGRESS_REQUEST = b"\x1a\x00"
"""WatchRequest{progress_request{}}: field 3, which etcd has had since 3.4 and the messages of etcd3 do not know."""

_HAS_LEADER = (("hasleader", "true"),)
"""Makes a member that lost its quorum end a watch instead of keeping it silent. Not on other calls: those would fail
at once during an election, and a caller that gives a deadline wants them to wait."""


class EtcdWatch:
    """One watch on a stream and a thread of its own, so that it can be ended without asking anybody."""

    def __init__(
        self, stub: Any, create: Any, deliver: Callable[[WatchEvent], None], forget: Callable[[EtcdWatch], None]
    ) -> None:
        self._deliver = deliver
        self._forget = forget
        self._settled = threading.Event()
        self._refusal: StoreError | None = None
        self._cancelled = threading.Event()
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._requests.put(create)
        self._unanswered = 0
        self._call = stub.Watch(self._questions(), metadata=_HAS_LEADER)
        self._thread = threading.Thread(target=self._run, name="etcd-watch", daemon=True)

    def start(self, timeout_s: float) -> None:
        """Return once etcd has confirmed the watch."""
        self._thread.start()
        if not self._settled.wait(timeout_s):
            self.cancel()
            raise StoreUnavailable(f"etcd did not confirm the watch within {timeout_s} s")
        if self._refusal is not None:
            raise self._refusal

    def cancel(self) -> None:
        self._cancelled.set()
        self._requests.put(None)
        self._call.cancel()
        if threading.current_thread() is not self._thread:
            self._thread.join(CANCEL_S)  # no longer: it may be in `deliver`, whose receiver is about to end

    def _questions(self) -> Iterator[Any]:
        """The requests of the stream: create the watch, then ask for progress for as long as it lasts."""
        while True:
            try:
                request = self._requests.get(timeout=PROBE_S)
            except queue.Empty:
                if self._unanswered >= PROBES_UNANSWERED:
                    self._call.cancel()
                    return
                self._unanswered += 1
                request = rpc.WatchRequest.FromString(_PROGRESS_REQUEST)
            if request is None:
                return
            yield request

    def _run(self) -> None:
        try:
            last = self._follow()
        except grpc.RpcError as error:
            if not self._settled.is_set():
                self._refusal = typed(error, writes=False)
            last = WatchLost(self._silence() or f"{code_of(error).name}: {details_of(error)}")
        finally:
            self._requests.put(None)
            self._call.cancel()
            self._forget(self)
            opened = self._settled.is_set()
            self._settled.set()
        if opened:
            self._say(last)

    def _follow(self) -> WatchLost | WatchCompacted:
        for reply in self._call:
            self._unanswered = 0
            if reply.compact_revision:
                self._settled.set()
                return WatchCompacted(int(reply.compact_revision))
            if reply.canceled:
                reason = f"etcd cancelled the watch: {reply.cancel_reason or 'no reason given'}"
                if not self._settled.is_set():
                    self._refusal = StoreRefused(reason)
                return WatchLost(reason)
            if reply.created:
                self._settled.set()
            self._deliver_events(reply)
        if not self._settled.is_set():
            self._refusal = StoreUnavailable("etcd ended the stream before it confirmed the watch")
        return WatchLost("etcd ended the stream")

    def _silence(self) -> str:
        return "etcd answers no more" if self._unanswered >= PROBES_UNANSWERED else ""

    def _deliver_events(self, reply: Any) -> None:
        for event in reply.events:
            if event.type == event.DELETE:
                self._say(KeyDeleted(event.kv.key.decode(errors="backslashreplace"), int(event.kv.mod_revision)))
            else:
                self._say(KeyPut(item_of(event.kv)))

    def _say(self, event: WatchEvent) -> None:
        if not self._cancelled.is_set():
            self._deliver(event)
