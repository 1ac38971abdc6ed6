"""A newcomer's copy of one state, from its donor and from members on other hosts that are in the same operation.

If the donor dies and the operation is done again, the next donor has the same state and sends what is missing.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch

from elastic.checkpoints.description import described_tensors
from runtime.allreduce.reduction.flat_pool import room_for
from runtime.allreduce.reduction.partial_sum import Json
from runtime.recovery.state.host_bytes import CHUNK_BYTES, HostBytes, Part, Slice, parts_of
from runtime.recovery.transfer.client import ANSWER_S
from runtime.recovery.transfer.connection import MAX_TOTAL_BYTES, CopyConnection, CopyFailed
from runtime.recovery.transfer.parts import Parts

PART_BYTES = CHUNK_BYTES
"""What a member copies from its GPU at once."""
HELPERS_MAX = 3
HELPER_S = 1.0
"""Seconds for which the donor waits for parts that helpers were asked for, before it sends them itself."""
DONOR = "donor"

Open = Callable[[], CopyConnection]


def digest(header: dict[str, Json]) -> str:
    """Hex; equal if two members would send the same state: names, types, shapes, and all plain values."""
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()


class MultiSourceCopy:
    """The newcomer's own thread asks the donor, another thread each helper. The donor sends what a helper cannot."""

    def __init__(self, number: int, header: dict[str, Json]) -> None:
        """number: the operation. header: the donor's description of its state. Raises CopyFailed."""
        self._request: dict[str, Json] = {"want": "part", "op": number, "digest": digest(header)}
        sizes = _sizes(header)
        self._blobs = room_for(sizes)
        self._parts = Parts(parts_of(sizes, PART_BYTES))
        self._changed = threading.Condition()
        self._helping: set[CopyConnection] = set()
        self._ending = False
        self._runs = 0
        self.gathered = 0
        """Bytes that have arrived and are verified."""

    def is_of(self, number: int, header: dict[str, Json]) -> bool:
        """Whether a donor with this description of its state can send what is missing."""
        return (self._request["op"], self._request["digest"]) == (number, digest(header))

    def run(self, donor: CopyConnection, helpers: Sequence[Open]) -> list[torch.Tensor]:
        """The blobs of the state, in the order of the header, each part verified. Raises CopyFailed; then it can be
        called again with another donor, and goes on."""
        self._ending = False
        self._runs += 1
        for number, helper in enumerate(helpers[:HELPERS_MAX]):
            # A helper of an earlier run may be reached only now: with the name of another one, one of their two parts
            # would count as there when it is not.
            name = f"helper {number} of run {self._runs}"
            threading.Thread(target=self._help, args=(name, helper), name=f"copy-{number}", daemon=True).start()
        try:
            self._pull(DONOR, donor)
            with self._changed:
                self._changed.wait_for(lambda: not self._parts.under_way, HELPER_S)
        finally:
            self._end()
        self._pull(DONOR, donor)
        assert self._parts.complete
        return self._blobs

    def _end(self) -> None:
        """Stop the helpers: when this returns, none of them writes into the memory any more."""
        with self._changed:
            self._ending = True
            for connection in self._helping:
                connection.abort()
            self._changed.wait_for(lambda: not self._helping)

    def _help(self, name: str, helper: Open) -> None:
        try:
            connection = helper()
        except CopyFailed:
            return  # the helper may be gone; the donor sends all
        with self._changed:
            if not self._ending:
                self._helping.add(connection)
        try:
            if connection in self._helping:
                connection.send(self._request)
                answer, _ = connection.receive(within_s=ANSWER_S)
                if "ready" in answer:
                    self._pull(name, connection)
        except CopyFailed:
            return
        finally:
            connection.close()
            with self._changed:
                self._parts.lost(name)
                self._helping.discard(connection)
                self._changed.notify_all()

    def _pull(self, name: str, connection: CopyConnection) -> None:
        """Ask one member for parts until none is left to ask for. Raises CopyFailed."""
        while True:
            with self._changed:
                part = self._parts.take(name)
            if part is None:
                return
            try:
                connection.send({"part": [list(piece) for piece in part]})
                connection.receive(partial(self._room, part), within_s=ANSWER_S)
            except CopyFailed:
                with self._changed:
                    self._parts.lost(name)
                raise
            with self._changed:
                self._parts.done(name)
                self.gathered += sum(end - start for _, start, end in part)
                self._changed.notify_all()

    def _room(self, part: Part, header: dict[str, Json], sizes: list[int]) -> list[torch.Tensor]:
        room = [self._blobs[blob][start:end] for blob, start, end in part]
        if [piece.numel() for piece in room] != sizes:
            raise CopyFailed(f"pieces of {sizes} bytes instead of {[piece.numel() for piece in room]}")
        return room


def _sizes(header: dict[str, Json]) -> list[int]:
    try:
        sizes = [tensor.nbytes for tensor in described_tensors(header)]
    except ValueError as error:
        raise CopyFailed(f"malformed description of a state: {error}") from error
    if sum(sizes) > MAX_TOTAL_BYTES:
        raise CopyFailed(f"tensors of {str(sizes)[:80]} bytes in the description of a state")
    return sizes


def send_parts(connection: CopyConnection, state: HostBytes) -> dict[str, Json]:
    """The answering side: send the parts asked for, until another message comes; returns that. Raises CopyFailed."""
    while True:
        request, _ = connection.receive()
        if not isinstance(asked := request.get("part"), list):
            return request
        try:
            pieces = state.read(cast(list[Slice], asked))
        except (TypeError, ValueError, IndexError) as error:
            raise CopyFailed(f"asked for a part that is none: {str(asked)[:80]}") from error
        connection.send({}, pieces)
