"""The harness's own journal of a run: what it did, when steps were seen, and every generation as etcd had it."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import Protocol

from chaos_tests.nemesis import signals
from chaos_tests.support import processes
from elastic.errors import ElasticError, StoreError, StoreUnavailable
from elastic.records.journal import Journal, journal_path
from elastic.store import chunks
from elastic.store.base import Item, KeyPut, Watch, WatchCompacted, WatchEvent, WatchLost
from elastic.store.etcd import EtcdStore
from elastic.wire import codec

CALL_S = 2.0


class RecordSource(Protocol):
    """The etcd of a job."""

    def connect(self) -> EtcdStore | None:
        """None: it cannot answer now. Raises StoreError and OSError."""

    def may_write(self) -> bool:
        """False: it is gone, and nothing of its history is missed."""


class Embedded:
    """That of one machine, found among the job's processes. mark: theirs."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._pid = 0
        """Once it was found; another one goes on with the data of one that was stopped."""

    def connect(self) -> EtcdStore | None:
        if not self._runs():
            return None
        return EtcdStore([f"unix:{os.readlink(f'/proc/{self._pid}/cwd')}/localhost:1"], keepalive_s=1.0)

    def may_write(self) -> bool:
        return not self._pid or self._runs()

    def _runs(self) -> bool:
        if not (self._pid and _lives(self._pid)):
            self._pid = processes.services(self._mark).get("etcd", self._pid)
        return bool(self._pid) and _lives(self._pid)


def _lives(pid: int) -> bool:
    return signals.state(pid) in ("R", "S", "D", "I")


class Recorder:
    """A context manager. `look` is called often by one thread; etcd's watch has a thread of its own."""

    def __init__(self, job_dir: Path, job: str, etcd: RecordSource) -> None:
        self._job, self._etcd = job, etcd
        self.journal = Journal(journal_path(job_dir, "harness"), job, "harness", "harness")
        self._applied = 0
        self._store: EtcdStore | None = None
        self._watch: Watch | None = None
        self._seen = 0
        self._put: deque[Item] = deque()
        """Records as the watch brought them; a long one consists of pieces, for which etcd has to be asked."""
        self._lost = ""

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._watch is not None:
            self._watch.cancel()
        elif self._etcd.may_write():
            self.journal.write("etcd_gap", because=self._lost or "etcd was never reached")
        self._note(last=True)
        if self._store is not None:
            self._store.close()
        self.journal.close()

    def look(self, applied: int) -> None:
        """applied: lines of the ledger so far."""
        if applied > self._applied:
            self._applied = applied
            self.journal.write("steps_seen", applied=applied)
        self._note()
        if self._lost and self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._watch is None:
            self._subscribe()

    def _subscribe(self) -> None:
        """From the revision after the last one seen, so that a broken watch misses nothing."""
        try:
            if self._store is None:
                self._store = self._etcd.connect()
            if self._store is None or not self._etcd.may_write():
                return
            self._lost = ""
            prefix = f"/elastic/{self._job}/generations/"
            self._watch = self._store.watch(prefix, self._seen + 1, self._deliver, timeout_s=CALL_S)
        except (StoreError, OSError) as error:
            self._lost = str(error)

    def _deliver(self, event: WatchEvent) -> None:
        match event:
            case KeyPut(item):
                self._seen = item.mod_revision
                self._put.append(item)
            case WatchLost(because):
                self._lost = because or "the watch was lost"
            case WatchCompacted(revision):
                self.journal.write("etcd_gap", because=f"etcd has forgotten what came before revision {revision}")
                self._seen = revision - 1
                self._lost = "compacted"

    def _note(self, last: bool = False) -> None:
        """What the watch has brought since the last time. last: what etcd is not there to be asked for is a gap."""
        while self._put:
            item = self._put[0]
            try:
                record = codec.generation_from_json(self._whole(item))
            except ElasticError as error:
                if isinstance(error, StoreUnavailable) and not last:
                    return
                self.journal.write("etcd_gap", because=f"{item.key} cannot be read: {error}")
                self._put.popleft()
                continue
            self._put.popleft()
            self.journal.write(
                "etcd_put",
                key=item.key,
                revision=item.mod_revision,
                created=item.create_revision,
                number=record.number,
                members=list(record.ids),
            )

    def _whole(self, item: Item) -> bytes:
        if (document := chunks.whole(item.value, self._piece)) is None:
            raise StoreError("not all of its pieces are there")
        return document

    def _piece(self, key: str) -> bytes | None:
        assert self._store is not None  # a watch of it has brought the record
        item = self._store.get(f"/elastic/{self._job}/pieces/{key}", timeout_s=CALL_S)
        return item.value if item is not None else None
