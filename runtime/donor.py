"""What a member serves to others over copy connections: where the job stands, its state, and kept results.

Each request runs in a thread of the listener. The state is served only inside the window of a joinable operation,
straight from the registered tensors, which do not change in it; a copy that is not through when the window closes
is cut off, and the newcomer tries again in the next one.

    {"want": "meta"}                        -> {"meta": ...} or {"later": why}
    {"want": "state"}                       -> {"op", "about", "state"} + tensors, or {"later": why}
      then {"complete": op}                    from a newcomer that holds it all
    {"want": "outcome", "op": k}            -> {"outcome": p, "result": ...} + tensors if generation p took effect after
                                               operation k, {"outcome": 0} if none did, or {"later": why}
    {"want": "result", "op": k}             -> {"result": ...} + tensors, or {"refused": why}
    {"want": "initial", "digest": d}        -> {"state": ...} + tensors, or {"refused": why}
"""

from __future__ import annotations

from dataclasses import asdict
from typing import cast

import torch

from elastic.position import CopyBegun, CopyEnded, Phase, outcome
from runtime.copy import CopyConnection, CopyFailed
from runtime.partial import Json, Partial
from runtime.session import JoinMeta, Op
from runtime.standing import Standing
from runtime.state import Carrier

LATER_S = 5.0
"""How long a newcomer's question waits here for its answer; then it is asked again, here or elsewhere."""


class Donor:
    def __init__(self, standing: Standing) -> None:
        self._standing = standing
        self.carrier: Carrier | None = None
        self.meta: JoinMeta | None = None
        self.op: Op | None = None
        """The operation in progress, set by the user's thread before it begins."""
        self._open = False
        self._active: set[CopyConnection] = set()

    # ------------------------------------------------------------------------------- the user's thread

    def open_window(self, op: Op) -> None:
        with self._standing.changed:
            self.op = op
            self._open = True
            self._standing.changed.notify_all()

    def close_window(self) -> None:
        """Cut off whoever still reads the state, and wait until nobody does."""
        changed = self._standing.changed
        with changed:
            self._open = False
            for connection in self._active:
                connection.abort()
            while self._active:
                changed.wait()

    # ------------------------------------------------------------------------------ threads of requests

    def serve(self, connection: CopyConnection, worker_id: str) -> None:
        """Answer one request. worker_id: the asker, as its hello says (and its token proves)."""
        try:
            request, _ = connection.receive()
            match request:
                case {"want": "meta"}:
                    self._serve_meta(connection)
                case {"want": "state"}:
                    self._serve_state(connection, worker_id)
                case {"want": "outcome", "op": int(op)}:
                    self._serve_outcome(connection, worker_id, op)
                case {"want": "result", "op": int(op)}:
                    self._serve_result(connection, op)
                case {"want": "initial", "digest": str(digest)}:
                    self._serve_initial(connection, digest)
                case _:
                    connection.send({"refused": f"unknown request {str(request)[:80]}"})
        except CopyFailed:
            return  # the asker notices by itself and asks again, here or elsewhere
        finally:
            connection.close()

    def _serve_meta(self, connection: CopyConnection) -> None:
        with self._standing.changed:
            meta, member = self.meta, self._standing.position.entered > 0
        if meta is None or not member:
            connection.send({"later": "the loop has not begun here"})
        else:
            connection.send({"meta": cast(Json, asdict(meta))})

    def _serve_state(self, connection: CopyConnection, newcomer: str) -> None:
        standing = self._standing
        with standing.changed:
            standing.changed.wait_for(lambda: self._may_copy(newcomer) or not standing.position.donor, LATER_S)
            if ready := self._may_copy(newcomer):
                assert self.op is not None and self.carrier is not None
                number, op, carrier = standing.position.reduced, self.op, self.carrier
                self._active.add(connection)
                standing.post(CopyBegun(newcomer))
        if not ready:
            connection.send({"later": "no window here"})
            return
        complete = False
        try:
            header, blobs = carrier.capture()
            connection.send({"op": number, "about": _op_json(op), "state": header}, blobs)
            answer, _ = connection.receive()
            complete = answer.get("complete") == number
        finally:
            with standing.changed:
                self._active.discard(connection)
                standing.post(CopyEnded(newcomer, number, complete))

    def _may_copy(self, newcomer: str) -> bool:
        """Only the donor's header waits for the copy, so no other copy would count."""
        p = self._standing.position
        wanted = p.newest_pending is not None and p.newest_pending.member(newcomer) is not None
        return p.donor and wanted and self._open and p.phase is Phase.COLLECTING and p.carry is None and not p.quiesced

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
            names = sorted(result.flats)
            header |= {"result": result.meta(), "groups": {name: result.flats[name].numel() for name in names}}
            connection.send(header, [result.flats[name].view(torch.uint8) for name in names])
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


def _op_json(op: Op) -> dict[str, Json]:
    return {**asdict(op), "kind": str(op.kind)}
