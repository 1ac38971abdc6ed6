"""What a member serves to others over copy connections: where the job stands, its state, and kept results.

Each connection has a thread of the listener, and brings one request after another. There are two ways to the state:

* Inside the window of a joinable operation it is sent straight from the registered tensors, which do not change in
  it. A copy that is not through when the window closes is cut off.
* For a newcomer whose copy was cut off, or would certainly be, a copy is held: it is made inside the next window, and
  sent while training goes on. From its operation on the results are kept; the newcomer takes them over until it has
  caught up with the operation in progress. Both are freed when it is through, or its connection ends.

    {"want": "meta"}                        -> {"meta": ...} or {"later": why}
    {"want": "state"}                       -> {"op", "about", "state"} + tensors, or {"later": why}
      then {"complete": op}                    from a newcomer that has it all; not with "follows": a held one
    {"want": "next", "op": k, "join": j}    -> {"results": [...]} + tensors: of k, k + 1, ...; {"now": k}, with join:
       from one that holds the state of k      k is in progress, and this newcomer counts as a holder of its state;
                                               {"later": why}; {"refused": why}: k is over, its result is not held
    {"want": "outcome", "op": k}            -> {"outcome": p, "result": ...} + tensors if generation p took effect after
                                               operation k, {"outcome": 0} if none did, or {"later": why}
    {"want": "result", "op": k}             -> {"result": ...} + tensors, or {"refused": why}
    {"want": "initial", "digest": d}        -> {"state": ...} + tensors, or {"refused": why}
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import cast

import torch

from elastic.journal import Journal
from elastic.position import CopyBegun, CopyEnded, Phase, outcome
from runtime.copy import CopyConnection, CopyFailed
from runtime.held import HeldState, Room
from runtime.partial import Json, Partial
from runtime.resultlog import Entry, ResultLog
from runtime.session import JoinMeta, Op
from runtime.standing import Standing
from runtime.state import Carrier

LATER_S = 5.0
"""How long a newcomer's question waits here for its answer; then it is asked again, here or elsewhere."""

CERTAINLY_BYTES_PER_S = 8 << 30
"""No copy is faster: the kernel alone takes that long."""

HOLD_BYTES_PER_S = 1 << 30
"""A slow machine's copying within its memory."""

LOG_BYTES_MIN = 64 << 20
LOG_STATES = 2
"""The log of results may take so many times the state's bytes. A step exchanges its gradients at about the speed of the
copy, so while the state is copied results of about its own size arrive."""

RESULTS_BYTES = 64 << 20
"""Results in one answer, if there are several."""


class Donor:
    def __init__(self, standing: Standing, journal: Journal) -> None:
        self._standing = standing
        self._journal = journal
        self.carrier: Carrier | None = None
        self.meta: JoinMeta | None = None
        self.op: Op | None = None
        """The operation in progress, set by the user's thread before it begins."""
        self._open = False
        self._opened = 0
        """Windows so far."""
        self._opened_s = 0.0
        self._patience_s = 0.0
        self._reading = 0
        """Threads that read the registered tensors just now."""
        self._cut_off: set[CopyConnection] = set()
        """Connections to abort when the window closes."""
        self._too_slow: set[str] = set()
        """Newcomers whose copy was cut off."""
        self._taking = False
        """A thread is about to make a copy to hold; there is one at a time, as long as somebody reads it."""
        self._held: HeldState | None = None
        self._readers = 0
        self._log = ResultLog()
        self._close_behind: dict[str, int] = {}
        """Newcomer -> the last operation whose result it was given."""

    # ------------------------------------------------------------------------------- the user's thread

    def open_window(self, op: Op, patience_s: float) -> None:
        """A joinable operation has begun. patience_s: about how long from now until a copy would be cut off."""
        changed = self._standing.changed
        with changed:
            self.op, self._open, self._patience_s = op, True, patience_s
            self._opened, self._opened_s = self._opened + 1, time.monotonic()
            for newcomer, number in self._close_behind.items():
                if number == self._standing.position.reduced - 1:
                    self._standing.post(CopyBegun(newcomer))
            changed.notify_all()

    def close_window(self) -> None:
        """Cut off whoever still sends the state, and wait until nobody reads it."""
        changed = self._standing.changed
        with changed:
            self._open = False
            for connection in self._cut_off:
                connection.abort()
            while self._reading:
                changed.wait()

    def keep(self, number: int, op: Op, fingerprint: dict[str, str], result: Partial) -> None:
        """An operation is complete here. Called under the lock."""
        held = self._log.append(Entry(number, op, fingerprint, result))
        self._standing.keep(result, shared=held)

    # ------------------------------------------------------------------------------ threads of requests

    def serve(self, connection: CopyConnection, worker_id: str) -> None:
        """Answer requests until the asker hangs up. worker_id: the asker, as its hello says (and its token proves)."""
        try:
            while True:
                request, _ = connection.receive()
                self._answer(connection, worker_id, request)
        except CopyFailed:
            return  # the asker notices by itself and asks again, here or elsewhere
        finally:
            connection.close()
            self._forget(connection, worker_id)

    def _answer(self, connection: CopyConnection, worker_id: str, request: dict[str, Json]) -> None:
        match request:
            case {"want": "meta"}:
                self._serve_meta(connection)
            case {"want": "state"}:
                self._serve_state(connection, worker_id)
            case {"want": "next", "op": int(op), "join": bool(join)}:
                self._serve_next(connection, worker_id, op, join)
            case {"want": "outcome", "op": int(op)}:
                self._serve_outcome(connection, worker_id, op)
            case {"want": "result", "op": int(op)}:
                self._serve_result(connection, op)
            case {"want": "initial", "digest": str(digest)}:
                self._serve_initial(connection, digest)
            case _:
                connection.send({"refused": f"unknown request {str(request)[:80]}"})

    def _forget(self, connection: CopyConnection, newcomer: str) -> None:
        """It is a member now, or gone, or will ask again over another connection."""
        standing = self._standing
        with standing.changed:
            self._log.leave(connection)
            self._close_behind.pop(newcomer, None)
            if newcomer in standing.position.copying:
                standing.post(CopyEnded(newcomer, standing.position.reduced, False))

    def _serve_meta(self, connection: CopyConnection) -> None:
        with self._standing.changed:
            meta, member = self.meta, self._standing.position.entered > 0
        if meta is None or not member:
            connection.send({"later": "the loop has not begun here"})
        else:
            connection.send({"meta": cast(Json, asdict(meta))})

    # ---------------------------------------------------------------------------------------- the state

    def _serve_state(self, connection: CopyConnection, newcomer: str) -> None:
        standing = self._standing
        with standing.changed:
            standing.changed.wait_for(lambda: not self._taking, LATER_S)
            directly = newcomer not in self._too_slow or self._stands_still
            held = self._state_held(connection)
        if held is None and directly and self._send_state(connection, newcomer):
            return
        if held is None:
            held = self._hold_state(connection, newcomer)
        if held is None:
            connection.send({"later": "no window here"})
            return
        header: dict[str, Json] = {"op": held.number, "about": op_json(held.op), "state": held.header}
        try:
            connection.send(header | {"follows": True}, held.blobs)
        finally:
            with standing.changed:
                self._readers -= 1
                if not self._readers:
                    self._held = None

    def _send_state(self, connection: CopyConnection, newcomer: str) -> bool:
        """Straight from the tensors, inside the window. False: the state is certainly too large for that."""
        standing = self._standing
        with self._window(lambda: self._may_copy(newcomer)) as number:
            if number is None:
                connection.send({"later": "no window here"})
                return True
            op, header, blobs = self._capture()
            if _nbytes(blobs) > self._patience_s * CERTAINLY_BYTES_PER_S and not self._stands_still:
                return False
            with standing.changed:
                self._cut_off.add(connection)
                standing.post(CopyBegun(newcomer))
                if not self._open:
                    connection.abort()
            complete = False
            try:
                connection.send({"op": number, "about": op_json(op), "state": header}, blobs)
                answer, _ = connection.receive()
                complete = answer.get("complete") == number
            finally:
                with standing.changed:
                    self._cut_off.discard(connection)
                    if not complete and not self._open:
                        self._too_slow.add(newcomer)
                    standing.post(CopyEnded(newcomer, number, complete))
        return True

    def _state_held(self, follower: CopyConnection) -> HeldState | None:
        """The one that is being sent to somebody else, if all results from there on are held. Under the lock."""
        if self._held is not None and self._log.holds_all_since(self._held.number):
            self._log.follow(follower, self._held.number, _log_limit(_nbytes(self._held.blobs)))
            self._readers += 1
            return self._held
        return None

    def _hold_state(self, follower: CopyConnection, newcomer: str) -> HeldState | None:
        """Inside a window, whose end waits for it; so not at its end, unless windows are shorter than that anyway.

        The first window tells how much memory it takes. None: there was none in time, or another copy is held.
        """
        standing = self._standing
        with standing.changed:
            if self._taking or self._held is not None:
                return None
            self._taking = True
        room = Room([])
        try:
            while True:
                seen = self._opened
                needed_s = sum(room.sizes) / HOLD_BYTES_PER_S

                def ready(seen: int = seen, needed_s: float = needed_s) -> bool:
                    fits = time.monotonic() - self._opened_s + needed_s < self._patience_s
                    good = not needed_s or seen < self._opened or fits or self._stands_still
                    return good and self._may_copy(newcomer)

                with self._window(ready, follower if room.sizes else None, _log_limit(sum(room.sizes))) as number:
                    if number is None:
                        self._log.leave(follower)
                        return None
                    begun_s = time.monotonic()
                    op, header, blobs = self._capture()
                    sizes = [blob.numel() for blob in blobs]
                    if sizes == room.sizes:
                        held = HeldState(number, op, header, room.fill(blobs))
                        ms = round(1000 * (time.monotonic() - begun_s), 1)
                        self._journal.write("state_held", op=number, bytes=_nbytes(blobs), ms=ms)
                        with standing.changed:
                            self._held, self._readers = held, 1
                        return held
                room = Room(sizes)
        finally:
            with standing.changed:
                self._taking = False
                standing.changed.notify_all()

    @contextmanager
    def _window(
        self, ready: Callable[[], bool], follower: CopyConnection | None = None, limit_bytes: int = 0
    ) -> Iterator[int | None]:
        """The number of an operation whose window does not close before the block ends; None if none was ready in
        time. follower: from this operation on results are kept for it."""
        standing = self._standing
        with standing.changed:
            standing.changed.wait_for(lambda: ready() or not standing.position.donor, LATER_S)
            number = standing.position.reduced if ready() else None
            if number is not None:
                self._reading += 1
                if follower is not None:
                    self._log.follow(follower, number, limit_bytes)
        try:
            yield number
        finally:
            with standing.changed:
                self._reading -= number is not None
                standing.changed.notify_all()

    def _capture(self) -> tuple[Op, dict[str, Json], list[torch.Tensor]]:
        assert self.op is not None and self.carrier is not None
        return (self.op, *self.carrier.capture())

    @property
    def _stands_still(self) -> bool:
        """The operation in progress waits for newcomers, as long as they take."""
        record = self._standing.position.record
        return record is not None and record.hold

    def _may_copy(self, newcomer: str) -> bool:
        """Only the donor's header waits for the copy, so no other copy would count."""
        p = self._standing.position
        wanted = p.newest_pending is not None and p.newest_pending.member(newcomer) is not None
        return p.donor and wanted and self._open and p.phase is Phase.COLLECTING and p.carry is None and not p.quiesced

    # ------------------------------------------------------------------------------------------ results

    def _serve_next(self, connection: CopyConnection, newcomer: str, number: int, join: bool) -> None:
        standing = self._standing
        entries: list[Entry] = []
        with standing.changed:
            standing.changed.wait_for(lambda: self._knows_next(newcomer, number, join), LATER_S)
            p = standing.position
            now = join and number == p.reduced and self._may_copy(newcomer)
            if now:
                self._too_slow.discard(newcomer)
                self._log.follow(connection, number, LOG_BYTES_MIN)  # it may be that nothing takes effect after it
                standing.post(CopyBegun(newcomer))
                standing.post(CopyEnded(newcomer, number, True))
            elif p.donor and number < p.reduced and (entries := self._log.since(connection, number, RESULTS_BYTES)):
                self._close_behind[newcomer] = entries[-1].number
                if entries[-1].number == p.reduced - 1 and self._may_copy(newcomer):
                    standing.post(CopyBegun(newcomer))
        if now:
            connection.send({"now": number})
        elif entries:
            parts = [result_json(entry.result) for entry in entries]
            about: list[Json] = [
                {"about": op_json(entry.op), "fingerprint": dict(entry.fingerprint), **part}
                for entry, (part, _) in zip(entries, parts, strict=True)
            ]
            connection.send({"results": about}, [blob for _, blobs in parts for blob in blobs])
        elif p.donor and number < p.reduced:
            connection.send({"refused": f"the result of operation {number} is not held any more"})
        else:
            connection.send({"later": f"operation {number} is not complete here, or this is not the donor"})

    def _knows_next(self, newcomer: str, number: int, join: bool) -> bool:
        p = self._standing.position
        return not p.donor or number < p.reduced or (join and number == p.reduced and self._may_copy(newcomer))

    def _serve_outcome(self, connection: CopyConnection, newcomer: str, op: int) -> None:
        standing = self._standing
        with standing.changed:
            standing.changed.wait_for(
                lambda: outcome(standing.position, op) is not None or standing.position.phase is Phase.GONE, LATER_S
            )
            p = standing.position
            number = outcome(p, op)
            entered = any(g.number == number and g.member(newcomer) for g in (*p.pending, p.record) if g)
            result = standing.result if entered and p.kept == op else None
            standing.served += result is not None
        if result is not None:
            self._send_result(connection, {"outcome": number}, result)
        elif number is None or entered:
            connection.send({"later": f"what became of operation {op} is not known here, or its result is not held"})
        else:
            connection.send({"outcome": number})

    def _serve_result(self, connection: CopyConnection, op: int) -> None:
        standing = self._standing
        with standing.changed:
            result = standing.result if standing.position.kept == op else None
            standing.served += result is not None
        if result is None:
            connection.send({"refused": f"the result of operation {op} is not held here"})
        else:
            self._send_result(connection, {}, result)

    def _send_result(self, connection: CopyConnection, header: dict[str, Json], result: Partial) -> None:
        """The caller has counted this reader in ``standing.served``."""
        try:
            part, blobs = result_json(result)
            connection.send(header | part, blobs)
        finally:
            with self._standing.changed:
                self._standing.served -= 1

    def _serve_initial(self, connection: CopyConnection, digest: str) -> None:
        """Before the first pass: members wait in the second SYNC operation, so the state stands still."""
        carrier = self.carrier
        if carrier is None or carrier.digest() != digest:
            connection.send({"refused": "another initial state"})
            return
        header, blobs = carrier.capture()
        connection.send({"state": header}, blobs)


def op_json(op: Op) -> dict[str, Json]:
    return {**asdict(op), "kind": str(op.kind)}


def result_json(result: Partial) -> tuple[dict[str, Json], list[torch.Tensor]]:
    """As newcomer.parse_result reads it."""
    names = sorted(result.flats)
    groups: dict[str, Json] = {name: result.flats[name].numel() for name in names}
    return {"result": result.meta(), "groups": groups}, [result.flats[name].view(torch.uint8) for name in names]


def _nbytes(blobs: Iterable[torch.Tensor]) -> int:
    return sum(blob.numel() for blob in blobs)


def _log_limit(state_bytes: int) -> int:
    return max(LOG_BYTES_MIN, LOG_STATES * state_bytes)
