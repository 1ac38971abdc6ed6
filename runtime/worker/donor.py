"""A member's answers to others over copy connections: where the job stands, its state, and kept results.

Each connection has a thread of the listener, and carries one request after another. There are two ways to the state:

* Inside the window of a joinable operation the state is sent straight from the registered tensors, which do not change
  in it. A copy that is not complete when the window closes is cut off.
* For a newcomer whose copy was cut off, or would certainly be, a copy is held: it is made inside the next window, and
  sent while training goes on. The results of its operation and later ones are kept; the newcomer takes them over until
  it has caught up with the operation in progress. Copy and results are freed when it is done, or its connection ends.

    {"want": "meta"}                        -> {"meta": ...} or {"later": why}
    {"want": "state", "follow": f}          -> {"op", "about", "state"}, with "follows" if it is held or f, "waits" if
                                               the operation waits for newcomers; or {"later": why}
      then {"part": [[blob, start, end], ...]} -> tensors, again and again
      then {"complete": op, "base"}            from a newcomer that has it all; -1: it counts as no holder of it
    {"want": "part", "op": k, "digest": d}  -> {"ready": k} if that is the state in this member's window, or {"refused"}
      then {"part": ...}                       as above, until the asker hangs up
    {"want": "next", "op": k, "join": j,    -> {"results": [...], "newest": n} + tensors: of k, k + 1, ..., while n is
     "base"} from a holder of k's state        in progress; {"now": k}, with join:
                                               k is in progress, and this newcomer counts as a holder of its state;
                                               {"later": why}, with "donor" from one that keeps k's result for it;
                                               {"refused": why}: k is over, its result is not held; or, without
                                               join, k waits for newcomers
    {"want": "outcome", "op": k, "base"}    -> {"outcome": p, "result": ...} + tensors if generation p took effect after
      from a holder of k's state               operation k, {"outcome": 0} if none did, or {"later": why}: if k is in
                                               progress, this newcomer counts as a holder of its state
    {"want": "result", "op": k}             -> {"result": ...} + tensors, or {"refused": why}
    {"want": "initial", "digest": d}        -> {"state": ...} + tensors, or {"refused": why}
    {"want": "object", "name": n}           -> {"state": ...} + tensors: of this registered object alone, which does not
                                               change any more; or {"later": why}

base: the newest loss generation that the newcomer knows. It counts as a holder only if its donor knows the same one: a
loss voids earlier promises, and one of the two may hear of the loss later than the other.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import cast

import torch

from elastic.protocol.worker_state import CopyBegun, CopyEnded, Phase, outcome
from elastic.records.journal import Journal
from runtime.allreduce.reduction.partial_sum import Json, Partial
from runtime.recovery.state.host_bytes import DONE, HostBytes, StreamMark
from runtime.recovery.state.training_state import Carrier, Values
from runtime.recovery.transfer.connection import CopyConnection, CopyFailed
from runtime.recovery.transfer.multi_source import digest, send_parts
from runtime.recovery.transfer.result_log import LoggedResult, ResultLog
from runtime.session import JoinMeta, Op
from runtime.worker.copy_window import LATER_S, CopyWindow
from runtime.worker.held_copy import LOG_BYTES_MIN, CopyHolder, log_bytes
from runtime.worker.state_owner import SharedWorkerState

CERTAINLY_BYTES_PER_S = 8 << 30
"""No copy is faster than this: the kernel alone needs that time."""

RESULTS_BYTES = 64 << 20
"""The most bytes of results in one answer, if there are several results."""


class CopyServer:
    def __init__(self, shared: SharedWorkerState, journal: Journal) -> None:
        self._shared = shared
        self.carrier: Carrier | None = None
        self.answer_others: Callable[[CopyConnection, dict[str, Json]], bool] = lambda connection, request: False
        """Answers what is asked for beside the state, and returns whether it has. Threads of requests."""
        self.meta: JoinMeta | None = None
        self.window = CopyWindow(shared)
        self._log = ResultLog()
        self._holder = CopyHolder(shared, self.window, self._log, journal)
        self._too_slow: set[str] = set()
        """Newcomers whose copy was cut off."""
        self._no_memory_until_s: dict[str, float] = {}
        """Newcomer for which there was no memory for a copy -> until when none is tried for it."""
        self._last: tuple[int, Op, dict[str, str]] | None = None
        """Number, operation and fingerprint of the last result that this worker obtained."""
        self._mark = DONE
        """Behind what the state is that of the operation in progress."""
        self._largest_bytes = 0
        """The size of the largest result so far, in bytes."""
        self._close_behind: dict[CopyConnection, tuple[str, int]] = {}
        """Connection over which a newcomer takes over results -> the newcomer, and the last operation sent."""
        self._copies_over: dict[str, CopyConnection] = {}
        """Newcomer -> the connection over which it copies now, or did last. An earlier one may be found to have ended
        only when the newcomer copies over the next one already."""

    # ------------------------------------------------------------------------------- the user's thread

    def stand_still(self) -> None:
        """The registered tensors do not change until the end of the operation that begins now."""
        if self.carrier is not None:
            self._mark = self.carrier.mark()

    def open_window(self, op: Op, patience_s: float) -> None:
        """A joinable operation has begun. patience_s: about how many seconds from now a copy would be cut off."""
        self.stand_still()
        with self._shared.changed:
            for connection, (newcomer, number) in self._close_behind.items():
                if number == self._shared.position.reduced - 1:
                    self._begin_copy(connection, newcomer)
            self.window.open(op, patience_s)

    def loggable(self, result: Partial) -> Partial:
        """What `keep` is to keep for newcomers: while one follows, a result on a GPU is copied to the CPU, which is
        more likely to have free memory. Not called under the lock, as that takes a while. Raises NoMemory."""
        with self._shared.changed:
            followed = self._log.is_followed
        if not followed or not any(flat.is_cuda for flat in result.flats.values()):
            return result
        _, blobs = result_json(result, _mark(result))
        names = zip(sorted(result.flats), blobs, strict=True)
        return replace(result, flats={name: blob.view(result.flats[name].dtype) for name, blob in names})

    def keep(self, number: int, op: Op, fingerprint: dict[str, str], result: Partial, logged: Partial) -> None:
        """Keep the result of an operation that is complete here. logged: as `loggable` returned it; if a newcomer has
        followed only since then, the log holds the result where it is. Called under the lock."""
        mark = _mark(result)
        entry = LoggedResult(number, op, fingerprint, logged, mark)
        self._last, self._largest_bytes = (number, op, fingerprint), max(self._largest_bytes, entry.nbytes)
        held = self._log.append(entry)
        self._shared.keep(result, mark, shared=held and logged is result)

    # ------------------------------------------------------------------------------ threads of requests

    def serve(self, connection: CopyConnection, worker_id: str) -> None:
        """Answer requests until the asker hangs up. worker_id: the asker, by its hello, which its token proves."""
        try:
            while True:
                request, _ = connection.receive(within_s=math.inf)  # an asker may have nothing to ask for hours
                self._answer(connection, worker_id, request)
        except CopyFailed:
            return  # the asker notices this and asks again, here or elsewhere
        finally:
            connection.close()
            self._forget(connection, worker_id)

    def _answer(self, connection: CopyConnection, worker_id: str, request: dict[str, Json]) -> None:
        match request:
            case {"want": "meta"}:
                self._serve_meta(connection)
            case {"want": "state", "follow": bool(follow)}:
                self._serve_state(connection, worker_id, follow)
            case {"want": "part", "op": int(op), "digest": str(wanted)}:
                self._help_send(connection, op, wanted)
            case {"want": "next", "op": int(op), "join": bool(join), "base": int(base)}:
                self._serve_next(connection, worker_id, op, join, base)
            case {"want": "outcome", "op": int(op)}:  # a newcomer of an earlier version says no base
                self._serve_outcome(connection, worker_id, op, request.get("base"))
            case {"want": "result", "op": int(op)}:
                self._serve_result(connection, op)
            case {"want": "initial", "digest": str(digest)}:
                self._serve_initial(connection, digest)
            case {"want": "object", "name": str(name)}:
                self._serve_object(connection, name)
            case _ if not self.answer_others(connection, request):
                connection.send({"refused": f"unknown request {str(request)[:80]}"})

    def _forget(self, connection: CopyConnection, newcomer: str) -> None:
        """Drop what is kept for a connection: the newcomer is a member now, or gone, or will connect again."""
        shared = self._shared
        with shared.changed:
            self._log.leave(connection)
            followed = self._close_behind.pop(connection, None) is not None
            if followed and newcomer in shared.position.copying:
                self._end_copy(connection, newcomer, shared.position.reduced, False)
            if self._copies_over.get(newcomer) is connection:
                del self._copies_over[newcomer]

    def _begin_copy(self, connection: CopyConnection, newcomer: str) -> None:
        with self._shared.changed:
            self._copies_over[newcomer] = connection
            self._shared.post(CopyBegun(newcomer))

    def _end_copy(self, connection: CopyConnection, newcomer: str, op: int, complete: bool) -> None:
        """The copy over this connection has ended, as in CopyEnded."""
        with self._shared.changed:
            if self._copies_over.get(newcomer) is connection:
                self._shared.post(CopyEnded(newcomer, op, complete))

    def _serve_meta(self, connection: CopyConnection) -> None:
        with self._shared.changed:
            meta, member = self.meta, self._shared.position.entered > 0
        if meta is None or not member:
            connection.send({"later": "the loop has not begun here"})
        else:
            connection.send({"meta": cast(Json, asdict(meta))})

    # ---------------------------------------------------------------------------------------- the state

    def _serve_state(self, connection: CopyConnection, newcomer: str, follow: bool) -> None:
        with self._shared.changed:
            # Every attempt captures the state inside a window, whose end waits for the attempt.
            left_s = self._no_memory_until_s.pop(newcomer, 0.0) - time.monotonic()
            self._shared.changed.wait_for(lambda: self.window.stands_still, max(0.0, left_s))
            directly = newcomer not in self._too_slow or self.window.stands_still
        if directly and self._send_state(connection, newcomer, follow):
            return
        with self._holder.copy(connection, lambda: self._may_copy(newcomer), self._describe) as held:
            if held is None:
                if not self._holder.has_memory:
                    self._no_memory_until_s[newcomer] = time.monotonic() + LATER_S
                connection.send({"later": "no copy of the state can be held here now"})
                return
            connection.send({"op": held.number, **held.about, "state": held.header, "follows": True})
            send_parts(connection, HostBytes(held.blobs))

    def _send_state(self, connection: CopyConnection, newcomer: str, follow: bool) -> bool:
        """Send the state from the tensors, inside the window. False: it is certainly too large for that.

        follow: keep the results of its operation and later ones, even if this newcomer does not count as a holder. They
        are also kept if calls before this step's pass may bind the newcomer to another step.
        """
        shared, window = self._shared, self.window

        def begin(number: int) -> None:
            nonlocal follow
            follow = follow or bool(self._about()["early"])
            if follow:
                self._follow_anew(connection, number)

        with window.reading(lambda: self._may_copy(newcomer), begin) as number:
            if number is None:
                connection.send({"later": "no window here"})
                return True
            about, header, state = self._describe()
            if not window.lasts(sum(state.sizes) / CERTAINLY_BYTES_PER_S):
                return False
            with shared.changed:
                window.state_given = True  # all of it may come there, though that is not heard of here
                self._begin_copy(connection, newcomer)
            complete, base = False, 0
            try:
                with window.sending(connection):
                    ways: dict[str, Json] = {"follows": follow, "waits": window.stands_still}
                    connection.send({"op": number, **about, "state": header, **ways})
                    answer = send_parts(connection, state)
                    complete, base = answer.get("complete") == number, cast(int, answer.get("base"))
            finally:
                with shared.changed:
                    complete = complete and self._knows(base)
                    if not complete and not window.is_open:
                        self._too_slow.add(newcomer)
                    self._end_copy(connection, newcomer, number, complete)
        return True

    def _help_send(self, connection: CopyConnection, number: int, wanted: str) -> None:
        """Send parts of the state of the operation in progress to a newcomer whose donor is another member."""
        window = self.window
        with window.reading(lambda: self._is_in(number), wait=False) as in_progress:
            if in_progress is None:
                connection.send({"refused": f"operation {number} is not in progress here"})
                return
            _, header, state = self._describe()
            if digest(header) != wanted:
                connection.send({"refused": "another state"})
                return
            with window.sending(connection):
                connection.send({"ready": number})
                send_parts(connection, state)

    def _is_in(self, number: int) -> bool:
        p = self._shared.position
        return self.window.is_open and p.phase is Phase.COLLECTING and p.reduced == number

    def _describe(self) -> tuple[dict[str, Json], dict[str, Json], HostBytes]:
        """What is said of the operation in progress, the header of its state, and the state's bytes."""
        assert self.carrier is not None
        header, tensors = self.carrier.describe_settled()
        return self._about(), header, HostBytes([tensor for _, tensor in tensors], self._mark)

    def _about(self) -> dict[str, Json]:
        """The operation in progress, and what a newcomer needs for the script's code before it."""
        op, meta = self.window.op, self.meta
        assert op is not None
        told = meta is not None and meta.step == op.step
        values, early = (meta.state, meta.early_in(op.step)) if meta is not None and told else ({}, {})
        stop = meta.stop if meta is not None and told else None
        return {"about": op_json(op), "values": values, "early": early, "stop": stop}

    def _may_copy(self, newcomer: str) -> bool:
        """Whether a copy would count for this newcomer now. Only the donor's header waits for copies."""
        p = self._shared.position
        wanted = p.newest_pending is not None and p.newest_pending.member(newcomer) is not None
        return (
            p.donor
            and wanted
            and self.window.is_open
            and p.phase is Phase.COLLECTING
            and p.carry is None
            and not p.quiesced
        )

    # ------------------------------------------------------------------------------------------ results

    def _knows(self, base: Json) -> bool:
        """Whether this is the base of this member's generation too. Called under the lock."""
        record = self._shared.position.record
        return record is not None and record.base == base

    def _may_hold(self, newcomer: str, number: int, base: Json) -> bool:
        """Whether a newcomer that has this operation's state counts as a holder of it now. Called under the lock."""
        return number == self._shared.position.reduced and self._may_copy(newcomer) and self._knows(base)

    def _serve_next(self, connection: CopyConnection, newcomer: str, number: int, join: bool, base: int) -> None:
        shared = self._shared
        entries: list[LoggedResult] = []
        with shared.changed:
            if not join and shared.position.donor and number == shared.position.reduced:
                self._follow_anew(connection, number)
            shared.changed.wait_for(lambda: self._knows_next(newcomer, number, join, base), LATER_S)
        limit_bytes = self._limit_bytes(connection, number) if join else LOG_BYTES_MIN
        with shared.changed:
            p = shared.position
            now = join and self._may_hold(newcomer, number, base)
            if now:
                self._too_slow.discard(newcomer)
                self._log.follow(connection, number, limit_bytes)  # perhaps nothing takes effect after this operation
                self._begin_copy(connection, newcomer)
                self._end_copy(connection, newcomer, number, True)
            elif p.donor and number < p.reduced and (entries := self._since(connection, number)):
                shared.served += 1
                self._close_behind[connection] = newcomer, entries[-1].number
                if entries[-1].number == p.reduced - 1 and self._may_copy(newcomer):
                    self._begin_copy(connection, newcomer)
        if now:
            connection.send({"now": number})
        elif entries:
            try:
                _send_entries(connection, entries, p.reduced)
            finally:
                with shared.changed:
                    shared.served -= 1
        elif p.donor and number < p.reduced:
            connection.send({"refused": f"the result of operation {number} is not held any more"})
        elif not join and number == p.reduced and self.window.is_open and self.window.stands_still:
            connection.send({"refused": f"operation {number} waits for a newcomer, and this one waits for its result"})
        else:
            later = f"operation {number} is not complete here, or this is not the donor"
            connection.send({"later": later, "donor": p.donor})

    def _since(self, connection: CopyConnection, number: int) -> list[LoggedResult]:
        """The results from operation ``number`` on that are held and fit into an answer. A newcomer whose donor died
        may get the last result here, though none was kept for it. Called under the lock."""
        result = self._shared.result
        if found := self._log.since(connection, number, RESULTS_BYTES):
            return found
        if self._last is None or result is None or not self._last[0] == number == self._shared.position.kept:
            return []
        self._follow_anew(connection, number + 1)
        return [LoggedResult(*self._last, result, self._shared.mark)]

    def _follow_anew(self, connection: CopyConnection, number: int) -> None:
        """Keep the results from ``number`` on for this connection, if that is not done. Called under the lock."""
        if not self._log.is_followed_by(connection):
            self._log.follow(connection, number, log_bytes(self._largest_bytes))

    def _limit_bytes(self, connection: CopyConnection, number: int) -> int:
        """The log's limit for a newcomer that holds the state of the operation in progress. If it had followed a donor
        that died, it needs as much as after a copy from here; else its limit was set with its copy."""
        mine = self.window.reading(lambda: not self._log.is_followed_by(connection) and self._is_in(number), wait=False)
        with mine as in_progress:
            if in_progress is None or self.carrier is None:
                return LOG_BYTES_MIN
            _, tensors = self.carrier.describe()
            return log_bytes(sum(tensor.nbytes for _, tensor in tensors))

    def _knows_next(self, newcomer: str, number: int, join: bool, base: int) -> bool:
        p = self._shared.position
        if not p.donor or number < p.reduced:
            return True
        return join and (not self._knows(base) or self._may_hold(newcomer, number, base))

    def _serve_outcome(self, connection: CopyConnection, newcomer: str, op: int, base: Json) -> None:
        shared = self._shared
        with shared.changed:
            if newcomer not in shared.position.holders and self._may_hold(newcomer, op, base):
                # Its "complete" or "next", or the answer, was lost. It asks nothing but this from now on: an operation
                # that waits for it would wait for ever.
                self._begin_copy(connection, newcomer)
                self._end_copy(connection, newcomer, op, True)
            shared.changed.wait_for(
                lambda: outcome(shared.position, op) is not None or shared.position.phase is Phase.GONE, LATER_S
            )
            p = shared.position
            number = outcome(p, op)
            entered = any(g.number == number and g.member(newcomer) for g in (*p.pending, p.record) if g)
            result, mark = shared.result if entered and p.kept == op else None, shared.mark
            shared.served += result is not None
        if result is not None:
            self._send_result(connection, {"outcome": number}, result, mark)
        elif number is None or entered:
            connection.send({"later": f"what became of operation {op} is not known here, or its result is not held"})
        else:
            connection.send({"outcome": number})

    def _serve_result(self, connection: CopyConnection, op: int) -> None:
        shared = self._shared
        with shared.changed:
            result, mark = shared.result if shared.position.kept == op else None, shared.mark
            shared.served += result is not None
        if result is None:
            connection.send({"refused": f"the result of operation {op} is not held here"})
        else:
            self._send_result(connection, {}, result, mark)

    def _send_result(
        self, connection: CopyConnection, header: dict[str, Json], result: Partial, mark: StreamMark
    ) -> None:
        """Send one result; the caller has counted this reader in ``shared.served``."""
        try:
            part, blobs = result_json(result, mark)
            connection.send(header | part, blobs)
        finally:
            with self._shared.changed:
                self._shared.served -= 1

    def _serve_initial(self, connection: CopyConnection, digest: str) -> None:
        """Send the state before the first pass: members wait in the second SYNC operation, so it stands still."""
        carrier = self.carrier
        if carrier is None:
            connection.send({"refused": "no state yet"})
            return
        header, tensors = carrier.describe()
        blobs = HostBytes([tensor for _, tensor in tensors], self._mark).blobs()
        if carrier.digest((header, blobs)) != digest:
            connection.send({"refused": "another initial state"})
            return
        connection.send({"state": header}, blobs)

    def _serve_object(self, connection: CopyConnection, name: str) -> None:
        thing = self.carrier.objects.get(name) if self.carrier is not None else None
        if thing is None:
            connection.send({"later": f"there is no {name[:80]} here"})
            return
        alone = Carrier(Values())
        alone.register(None, **{name: thing})
        header, tensors = alone.describe()
        connection.send({"state": header}, HostBytes([tensor for _, tensor in tensors], self._mark).blobs())


def _send_entries(connection: CopyConnection, entries: Sequence[LoggedResult], newest: int) -> None:
    parts = [result_json(entry.result, entry.mark) for entry in entries]
    about: list[Json] = [
        {"about": op_json(entry.op), "fingerprint": dict(entry.fingerprint), **part}
        for entry, (part, _) in zip(entries, parts, strict=True)
    ]
    connection.send({"results": about, "newest": newest}, [blob for _, blobs in parts for blob in blobs])


def op_json(op: Op) -> dict[str, Json]:
    return {**asdict(op), "kind": str(op.kind)}


def _mark(result: Partial) -> StreamMark:
    """Behind what a result is complete that the user's thread has got now."""
    return StreamMark({flat.device for flat in result.flats.values()})


def result_json(result: Partial, mark: StreamMark = DONE) -> tuple[dict[str, Json], list[torch.Tensor]]:
    """The header and blobs of a result, as transfer.client.parse_result reads them. mark: behind what it is complete.
    Raises NoMemory."""
    names = sorted(result.flats)
    groups: dict[str, Json] = {name: result.flats[name].numel() for name in names}
    return {"result": result.meta(), "groups": groups}, HostBytes([result.flats[name] for name in names], mark).blobs()
