"""What constants of the data path gain or cost behind a narrow cable: `python -m tests.bench.tuning`. Root, 7 minutes.

Of those that change no bit: the size of a piece, how many pieces a peer may be ahead of the sum, and into how many
parts gradients are cut that leave early. Machines and steps are those of net.py. All values take turns in the same
processes; the product's own value takes two turns a round, and what the second takes over the first is noise. Besides,
how much of a cable one TCP connection fills, and how much four.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from chaos_tests.cluster.network import Network, why_not
from runtime.allreduce.reduction import early_sums, lanes, over_mesh
from runtime.allreduce.reduction.gradient_harvest import Harvest
from tests.bench import net

PIECES = {f"pieces of {size} KiB": size << 10 for size in (64, 256, 4096)}
WINDOWS = {f"{pieces} pieces ahead": pieces for pieces in (1, 2, 16)}
PARTS = {f"{parts} parts early": parts for parts in (4, 8, 128)}
OWN, AGAIN, EARLY = "exact", "exact again", "exact early"
STREAM_BYTES = 64 << 20


class _Tuned(net._Steps):
    """With other constants, for one step."""

    def __init__(self, rank: int, layout: net.Layout, ring: Any) -> None:
        super().__init__(rank, layout, ring)
        self._own = (over_mesh.PIECE_BYTES, lanes._WINDOW)
        parts = early_sums.PARTS
        for kind, number in PARTS.items():
            early_sums.PARTS = number
            self._harvests[kind] = Harvest(list(self._model.named_parameters()))
        early_sums.PARTS = parts

    def step(self, kind: str, backward_s: float) -> None:
        over_mesh.PIECE_BYTES, lanes._WINDOW = PIECES.get(kind, self._own[0]), WINDOWS.get(kind, self._own[1])
        if kind in PARTS:
            self._model.backward_s = backward_s
            self._train_early(kind)
            return
        super().step(kind.removesuffix(" again") if kind not in PIECES.keys() | WINDOWS.keys() else OWN, backward_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each value (default: %(default)s)")
    parser.add_argument("--rates", type=int, nargs="+", default=[200, 1000], metavar="MBIT", help="of each cable")
    arguments = parser.parse_args()
    if because := why_not():
        sys.exit(f"tuning: {because}")
    torch.set_num_threads(1)
    net._Steps = _Tuned  # type: ignore[misc]
    layout = net.Layout(4, 1)
    for rate in arguments.rates:
        print(f"one machine to another at {rate} Mbit/s: {_streams(rate)}", flush=True)
    with net._members(layout) as members:
        for rate in arguments.rates:
            members.narrow(rate)
            _print(layout, rate, "", members.turns([OWN, AGAIN, *PIECES, *WINDOWS], arguments.rounds))
        rate = min(arguments.rates)
        members.narrow(rate)
        wire_s = layout.bound / (rate * 125_000)
        kinds = [EARLY, f"{EARLY} again", *PARTS]
        what = ", backward takes as long as the wire"
        _print(layout, rate, what, members.turns(kinds, arguments.rounds, backward_s=wire_s))


def _print(layout: net.Layout, rate: int, what: str, turns: dict[str, list[net.Turn]]) -> None:
    own, *others = turns
    seconds = [turn.seconds for turn in turns[own]]
    print(f"{layout} at {rate} Mbit/s{what}: {own} {statistics.median(seconds):.3f} s", flush=True)
    for kind in others:
        ratios = [turn.seconds / base.seconds for turn, base in zip(turns[kind], turns[own], strict=True)]
        cpu = statistics.median(turn.cpu_s for turn in turns[kind]) / statistics.median(t.cpu_s for t in turns[own])
        low, high = sorted(ratios)[1], sorted(ratios)[-2]
        print(f"  {kind:20} {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f}); CPU {cpu:.2f}", flush=True)


def _streams(rate_mbit: int) -> str:
    """Bytes over a cable by one and by four connections, over what the cable could carry in that time."""
    found = []
    with Network() as network:
        addresses = [network.add(name) for name in ("a", "b")]
        for name in ("a", "b"):
            network.narrow(name, 1000 * rate_mbit)
        for streams in (1, 4):
            ready, done = multiprocessing.Pipe()
            context = multiprocessing.get_context("fork")
            within = [network.within(name)[1].removeprefix("--net=") for name in ("a", "b")]
            takes = context.Process(target=_take, args=(within[1], addresses[1], streams, done), daemon=True)
            takes.start()
            port = ready.recv()
            gives = context.Process(target=_give, args=(within[0], addresses[1], port, streams), daemon=True)
            gives.start()
            seconds = ready.recv()
            for process in (takes, gives):
                process.join()
            share = STREAM_BYTES / (rate_mbit * 125_000) / seconds
            found.append(f"{streams} connection{'s' * (streams > 1)} {share:.3f}")
    return ", ".join(found) + " of the cable"


def _take(within: str, host: str, streams: int, pipe: Any) -> None:
    net._enter(within)
    with socket.create_server((host, 0), backlog=streams) as server:
        pipe.send(server.getsockname()[1])
        socks = [server.accept()[0] for _ in range(streams)]
    begun_s = time.perf_counter()
    room = bytearray(1 << 20)

    def drain(sock: socket.socket) -> None:
        while sock.recv_into(room):
            pass

    _each(socks, drain)
    pipe.send(time.perf_counter() - begun_s)


def _give(within: str, host: str, port: int, streams: int) -> None:
    net._enter(within)
    socks = [socket.create_connection((host, port)) for _ in range(streams)]
    content = memoryview(os.urandom(1 << 20))

    def send(sock: socket.socket) -> None:
        for _ in range(STREAM_BYTES // len(content) // streams):
            sock.sendall(content)
        sock.close()

    _each(socks, send)


def _each(socks: Sequence[socket.socket], call: Any) -> None:
    threads = [threading.Thread(target=call, args=(sock,)) for sock in socks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
