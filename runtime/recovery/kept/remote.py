"""Segments on other machines: mirrored there after each step, read from there by a script, copied there by a worker.

All goes over the copy connections of the workers, which prove the token of the generation, and have TLS where the job
has. A script calls as its worker. The worker that is asked answers on a thread of its listener:

    {"want": "kept_write", "round": r, "file": f, "header": h}  then {} + body, table -> {"kept": step}, or {"refused"}
    {"want": "kept_table", "segment": [step, run, generation, group, part, parts]}  -> {"header": h} + table, or refused
    {"want": "kept_bytes", "segment": ..., "sum": s, "at": a, "size": n}            -> {} + bytes, or {"refused": why}
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch

from elastic.errors import CheckpointCorrupt
from runtime.allreduce.reduction.partial_sum import Json
from runtime.allreduce.ring.ring import Peer
from runtime.allreduce.ring.tls import TlsContexts
from runtime.recovery.kept.choice import HeldSegment, RoundNumber
from runtime.recovery.kept.place import KeptPlace, directory_of
from runtime.recovery.kept.segment import Header, Segment, SegmentFile, read_header, segments_in
from runtime.recovery.transfer.connection import CopyConnection, CopyFailed, open_copy

CONNECT_S = 5.0
BUSY_S = 30.0
"""Seconds for which a worker that has too many callers is called again."""
BUSY_POLL_S = 0.1
PIECE_BYTES = 64 << 20
"""A worker copies a segment in pieces of so many bytes, so that not all of it is in memory a second time."""
COPIED = "3"
"""The end of the name of a file that a worker has copied; those of scripts are numbered from 0 to 2."""


@dataclass(frozen=True, slots=True)
class CopyDial:
    """What a process needs to call the workers of a generation. peers: worker id -> its host and port."""

    job: str
    me: str
    generation: int
    plan: str
    token: str
    peers: Mapping[str, tuple[str, int]]

    def open(self, worker_id: str, seal: TlsContexts) -> CopyConnection:
        """Raises CopyFailed."""
        if worker_id not in self.peers:
            raise CopyFailed(f"{worker_id} is no member of generation {self.generation}")
        host, port = self.peers[worker_id]
        until_s = time.monotonic() + BUSY_S
        while True:
            try:
                return open_copy(
                    Peer(worker_id, host, port),
                    job=self.job,
                    generation=self.generation,
                    me=self.me,
                    plan=self.plan,
                    token=self.token,
                    deadline_s=CONNECT_S,
                    seal=seal,
                )
            except CopyFailed as error:
                if "copies are running" not in str(error) or time.monotonic() > until_s:
                    raise
                time.sleep(BUSY_POLL_S)


@dataclass(frozen=True, slots=True)
class OtherMachines:
    """What a script needs of other machines. mirrors: a worker of each, from the next one on, that takes what this
    script sends there. parts: parts of the step that the script loads, which are not on this machine -> the worker that
    has them. count: of all of them.
    """

    dial: CopyDial
    mirrors: tuple[str, ...]
    parts: Mapping[int, str]
    count: int

    def write(self, path: Path) -> None:
        """It has the token, so only this user can read it. Raises OSError."""
        path.touch(0o600)
        path.write_text(json.dumps([asdict(self.dial), self.mirrors, list(self.parts.items()), self.count]))

    @classmethod
    def read(cls, path: str) -> Self | None:
        """None: there is no path, as all is on this machine."""
        if not path:
            return None
        dial, mirrors, parts, count = json.loads(Path(path).read_text())
        peers = {worker: (str(host), int(port)) for worker, (host, port) in dial.pop("peers").items()}
        return cls(CopyDial(**dial, peers=peers), tuple(mirrors), {int(part): worker for part, worker in parts}, count)


class RemoteSegment:
    """A segment that another machine has; used as Segment. Raises CopyFailed."""

    def __init__(self, connection: CopyConnection, held: HeldSegment) -> None:
        self._connection, self._held = connection, held
        connection.send({"want": "kept_table", "segment": list[Json](held.to_json())})
        answer, blobs = connection.receive()
        self.header = _header(answer)
        self._table = bytes(blobs[0].numpy())

    def table(self) -> Any:
        return json.loads(self._table)

    def table_bytes(self) -> bytes:
        return self._table

    def read(self, at: int, size: int) -> memoryview:
        request: dict[str, Json] = {"want": "kept_bytes", "segment": list[Json](self._held.to_json())}
        self._connection.send({**request, "sum": self.header.sum, "at": at, "size": size})
        answer, blobs = self._connection.receive()
        if len(blobs) != 1:
            raise CopyFailed(f"no part of a segment came: {answer.get('refused', 'malformed answer')}")
        return blobs[0].numpy().data


def _header(answer: Mapping[str, Json]) -> Header:
    with suppress(CheckpointCorrupt, ValueError):
        if (found := Header.unpack(bytes.fromhex(str(answer.get("header"))))) is not None:
            return found
    raise CopyFailed(f"no segment came: {answer.get('refused', 'malformed answer')}")


class SegmentMirror:
    """Sends segments to another machine, one after another. Used by one thread at a time. Raises CopyFailed."""

    def __init__(self, connection: CopyConnection, number: RoundNumber) -> None:
        self._connection, self._round = connection, number

    def send(self, file: str, header: Header, body: memoryview, table: bytes) -> None:
        """Returns when the segment is there. file: its name here and there."""
        request: dict[str, Json] = {"want": "kept_write", "round": str(self._round), "file": file}
        self._connection.send({**request, "header": header.pack().hex()})
        self._connection.send({}, [_blob(body), _blob(memoryview(bytearray(table)))])
        answer, _ = self._connection.receive()
        if answer.get("kept") != header.step:
            raise CopyFailed(f"step {header.step} is not mirrored: {answer.get('refused', 'malformed answer')}")

    def close(self) -> None:
        self._connection.close()


def _blob(view: memoryview) -> torch.Tensor:
    return torch.frombuffer(view, dtype=torch.uint8) if view.nbytes else torch.empty(0, dtype=torch.uint8)


def pull(dial: CopyDial, worker_id: str, seal: TlsContexts, held: HeldSegment, memory: str) -> None:
    """Copy a segment to this machine. Raises CopyFailed, OSError where it has no room, and NoMemory."""
    connection = dial.open(worker_id, seal)
    try:
        segment = RemoteSegment(connection, held)
        path = KeptPlace(memory, held.round).directory() / f"{held.group}.{held.part}.{COPIED}"
        file = SegmentFile(path)
        try:
            body = file.begin(segment.header.body)
            for at in range(0, segment.header.body, PIECE_BYTES):
                size = min(PIECE_BYTES, segment.header.body - at)
                body[at : at + size] = segment.read(at, size)
            file.finish(held, body, segment.table_bytes(), segment.header.sum)
        finally:
            file.close()
    finally:
        connection.close()


class KeptServer:
    """The worker's side. memory: the job's directory in its machine's memory; "": there is none."""

    def __init__(self, memory: str) -> None:
        self._memory = memory

    def answer(self, connection: CopyConnection, request: Mapping[str, Json]) -> bool:
        """Answer, unless the request is another one. Threads of the listener. Raises CopyFailed."""
        match request:
            case {"want": "kept_write", "round": str(number), "file": str(file), "header": str(header)}:
                self._write(connection, number, file, header)
            case {"want": "kept_table", "segment": list(said)}:
                found = self._find(said)
                if found is None:
                    connection.send({"refused": "this segment is not here"})
                else:
                    table = _blob(memoryview(bytearray(found.table_bytes())))
                    connection.send({"header": found.header.pack().hex()}, [table])
            case {"want": "kept_bytes", "segment": list(said), "sum": int(total), "at": int(at), "size": int(size)}:
                found = self._find(said)
                if found is None or found.header.sum != total or at < 0 or size < 0 or at + size > found.header.body:
                    connection.send({"refused": "this segment is not here any more"})
                else:
                    connection.send({}, [_blob(found.read(at, size))])
            case _:
                return False
        return True

    def _find(self, said: Sequence[Json]) -> Segment | None:
        try:
            wanted = HeldSegment.from_json(said)
        except (TypeError, ValueError) as error:
            raise CopyFailed(f"malformed segment: {error}") from error
        for path in segments_in(directory_of(self._memory, wanted.round)) if self._memory else ():
            with suppress(CheckpointCorrupt, OSError, ValueError):
                header = read_header(path)
                if header is not None and header.held == wanted:
                    return Segment(path, header)
        return None

    def _write(self, connection: CopyConnection, number: str, name: str, said: str) -> None:
        """Take a segment in the three steps in which its script has written it."""
        header, found = _header({"header": said}), RoundNumber.parse(number)
        if found is None or not all(word.isdigit() for word in name.split(".")):
            raise CopyFailed(f"malformed name of a segment: {number[:40]}/{name[:40]}")
        refused = "" if self._memory else "that machine has no directory in memory"
        file: SegmentFile | None = None
        body = memoryview(bytearray(0))
        try:
            if not refused:
                file = SegmentFile(KeptPlace(self._memory, found).directory() / name)
                body = file.begin(header.body)
        except OSError as error:
            refused = f"{self._memory} cannot be written ({error.strerror})"
        try:
            if file is None or refused:
                connection.receive()
                connection.send({"refused": refused})
                return
            table = torch.empty(header.table, dtype=torch.uint8)
            connection.receive(lambda _, sizes: [_blob(body), table])
            file.finish(header.held, body, table.numpy().tobytes(), header.sum)
            connection.send({"kept": header.step})
        except OSError as error:
            connection.send({"refused": f"{self._memory} cannot be written ({error.strerror})"})
        except CheckpointCorrupt as error:
            connection.send({"refused": str(error)})
        finally:
            if file is not None:
                file.close()
