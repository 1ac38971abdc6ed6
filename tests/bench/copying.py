"""How fast state is copied between two workers, beside plain TCP: `python -m tests.bench.copying`.

Two processes on the loopback device: a worker's listener, and a newcomer that calls it. In turns with that the same
bytes go through a bare socket, in pieces of several sizes, of which the best counts. All go into the same memory, which
has been used before; a copy into new memory shows what the kernel takes for pages.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import torch

from runtime.allreduce.ring.listener import Listener
from runtime.allreduce.ring.ring import Peer
from runtime.allreduce.ring.unix_socket import tune
from runtime.recovery.transfer.connection import CopyConnection, CopyFailed, open_copy
from tests.bench.intervals import median_interval, ratios

HOST = "127.0.0.1"
JOB, TOKEN, GENERATION, DONOR = "bench", "t" * 32, 1, "donor"
TENSORS = 16
RAW_PIECES = (1 << 18, 1 << 20, 1 << 22)
WITHIN_S = 120.0


@dataclass(slots=True)
class Copies:
    """Gigabytes (10**9 bytes) a second; the n-th of all were copied one after the other. raw: the best piece size."""

    raw: list[float] = field(default_factory=list)
    copied: list[float] = field(default_factory=list)
    into_new: list[float] = field(default_factory=list)

    @property
    def shares(self) -> list[float]:
        """Of the rate of plain TCP."""
        return ratios(self.copied, self.raw)


def measure(megabytes: int, rounds: int, say: Callable[[str], None]) -> Copies:
    """megabytes: 10**6 bytes, in TENSORS tensors."""
    found = Copies()
    tensors = [torch.zeros(megabytes * 10**6 // TENSORS, dtype=torch.uint8) for _ in range(TENSORS)]
    gigabytes = sum(tensor.numel() for tensor in tensors) / 1e9
    here, there = multiprocessing.Pipe()
    donor = multiprocessing.get_context("spawn").Process(target=_donate, args=(there, megabytes), daemon=True)
    donor.start()
    there.close()
    try:
        if not here.poll(WITHIN_S):
            raise TimeoutError(f"the donor's process has not begun in {WITHIN_S} s")
        raw_port, port = here.recv()
        for number in range(-1, rounds):
            raw = [gigabytes / _receive_raw(raw_port, piece, tensors) for piece in RAW_PIECES]
            copied = gigabytes / _receive(port, tensors)
            into_new = gigabytes / _receive(port, None)
            if number < 0:
                continue  # it warms up
            found.raw.append(max(raw))
            found.copied.append(copied)
            found.into_new.append(into_new)
            say(
                f"copy {number + 1}/{rounds}: {copied:.2f} GB/s, into new memory {into_new:.2f}, "
                f"plain TCP {', '.join(f'{rate:.2f}' for rate in raw)}"
            )
    finally:
        here.close()
        donor.join(WITHIN_S)
        donor.kill()
    return found


def _receive_raw(port: int, piece: int, tensors: Sequence[torch.Tensor]) -> float:
    """Seconds."""
    with socket.create_connection((HOST, port), timeout=WITHIN_S) as sock:
        tune(sock)
        begun_s = time.perf_counter()
        sock.sendall(piece.to_bytes(8, "big"))
        for tensor in tensors:
            view = tensor.numpy().data
            while view.nbytes:
                received = sock.recv_into(view[:piece])
                if not received:
                    raise ConnectionError("the donor's process is gone")
                view = view[received:]
        return time.perf_counter() - begun_s


def _receive(port: int, tensors: Sequence[torch.Tensor] | None) -> float:
    """Seconds. tensors: where to; None: into new ones."""
    called = open_copy(
        Peer(DONOR, HOST, port),
        job=JOB,
        generation=GENERATION,
        me="newcomer",
        plan="",
        token=TOKEN,
        deadline_s=WITHIN_S,
    )
    with closing(called) as connection:
        begun_s = time.perf_counter()
        connection.send({"want": "state"})
        connection.receive(None if tensors is None else lambda header, sizes: tensors)
        return time.perf_counter() - begun_s


def _donate(driver: Connection, megabytes: int) -> None:
    """The other process: serve until the driver hangs up."""
    torch.set_num_threads(1)
    tensors = [torch.full((megabytes * 10**6 // TENSORS,), n, dtype=torch.uint8) for n in range(TENSORS)]

    def serve(sock: socket.socket, hello: object) -> None:
        with closing(CopyConnection(sock)) as connection:
            try:
                connection.receive()
                connection.send({}, tensors)
                connection.receive()
            except CopyFailed:
                return  # the driver has what it wanted, and hung up

    copies = Listener(HOST, job=JOB, me=DONOR, token_of=lambda generation: TOKEN, serve_copy=serve)
    with closing(copies), socket.create_server((HOST, 0)) as door:
        driver.send((door.getsockname()[1], copies.address[1]))
        door.settimeout(0.1)
        while not driver.poll():
            try:
                sock, _ = door.accept()
            except TimeoutError:
                continue
            with sock:
                sock.settimeout(WITHIN_S)
                tune(sock)
                _send_raw(sock, tensors)


def _send_raw(sock: socket.socket, tensors: Sequence[torch.Tensor]) -> None:
    piece = int.from_bytes(sock.recv(8, socket.MSG_WAITALL), "big")
    for tensor in tensors:
        view = tensor.numpy().data
        for start in range(0, view.nbytes, piece):
            sock.sendall(view[start : start + piece])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.copying")
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(options.megabytes, options.rounds, print)
    share = median_interval(found.shares)
    print(f"copy {statistics.median(found.copied):.2f} GB/s, plain TCP {statistics.median(found.raw):.2f} GB/s")
    print(f"copying: copy_share={share.median:.3f} ({share.low:.3f} to {share.high:.3f})")


if __name__ == "__main__":
    main()
