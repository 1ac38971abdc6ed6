"""What the words of a step cost in large worlds: `python -m tests.bench.words [--members 8 32]`.

Members are forks of this process, on one machine. An operation reduces a loss and no tensors, and its header is as
large as that of a step, so it is the headers of a step alone. Printed: CPU time of a member for building a ring, for
building it over the connections of the one before, and for an operation (medians over members), and frames that a
member sends for an operation.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import threading
import time
import traceback
from typing import Any

import torch

from runtime.allreduce.reduction.over_mesh import ReductionRequest, exchange
from runtime.allreduce.reduction.partial_sum import Partial
from runtime.allreduce.ring.frames import Frame, Payload, SendQueue
from runtime.allreduce.ring.listener import Listener
from runtime.allreduce.ring.ring import PARTS, Peer, Ring
from runtime.allreduce.ring.ring_builder import RingSpec, build

WAIT_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--operations", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for members in arguments.members:
        builds, rebuilds, operations, frames = zip(*_measure(members, arguments.operations), strict=True)
        build_ms, rebuild_ms, operation_ms = (
            1000 * statistics.median(times) for times in (builds, rebuilds, operations)
        )
        print(
            f"{members:4} members: build {build_ms:6.2f} ms CPU, over kept connections {rebuild_ms:6.2f} ms, "
            f"operation {operation_ms:6.3f} ms, {statistics.median(frames):g} frames",
            flush=True,
        )


def _measure(members: int, operations: int) -> list[tuple[float, float, float, float]]:
    """Of each member: CPU seconds of a build, of one over the same connections, of an operation, and frames sent for
    one."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(members)]
    barrier = context.Barrier(members)
    processes = []
    for rank, (_, theirs) in enumerate(pipes):
        process = context.Process(target=_member, args=(rank, members, operations, barrier, theirs), daemon=True)
        process.start()
        processes.append(process)
    try:
        ends = [ours for ours, _ in pipes]
        ports = [_receive(end) for end in ends]
        for end in ends:
            end.send(ports)
        return [_receive(end) for end in ends]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _receive(end: Any) -> Any:
    if not end.poll(WAIT_S):
        raise TimeoutError(f"a member has not answered for {WAIT_S:g} s")
    return end.recv()


def _member(rank: int, members: int, operations: int, barrier: Any, pipe: Any) -> None:
    try:
        pipe.send(_serve(rank, members, operations, barrier, pipe))
        pipe.recv()
    except EOFError:
        pass
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _serve(rank: int, members: int, operations: int, barrier: Any, pipe: Any) -> tuple[float, float, float, float]:
    listener = Listener("127.0.0.1", job="words", me=f"w{rank}", token_of=lambda number: "t", serve_copy=_no_copies)
    pipe.send(listener.address[1])
    peers = [Peer(f"w{other}", "127.0.0.1", port) for other, port in enumerate(pipe.recv())]
    builds: list[float] = []
    rebuilds: list[float] = []
    times = []
    ring: Ring | None = None
    for generation in range(1, 8):
        barrier.wait(WAIT_S)
        began_s = time.process_time()
        kept = ring.hand_over(ring.members) if ring is not None and generation > 4 else {}
        if ring is not None:
            ring.close()
        ring = build(
            listener,
            RingSpec(
                job="words", generation=generation, base=generation, me=f"w{rank}", peers=peers, plan="p", token="t"
            ),
            deadline_s=WAIT_S,
            cancelled=threading.Event(),
            kept=kept,
        )
        (builds if generation <= 4 else rebuilds).append(time.process_time() - began_s)
    barrier.wait(WAIT_S)
    assert ring is not None
    root = Partial(rank, rank + 1, has_grad=(1 << 20) - 1, weight=8.0, scalars={"loss": ("mean", 0.5 + rank, 8.0)})
    sent = _Count()
    for op in range(operations):
        began_s = time.process_time()
        exchange(
            ring,
            ReductionRequest(
                op=PARTS * op,
                header={"carry": [], "own": None},
                agreed={
                    "about": {"units": members, "epoch": 0, "step": op, "pass_no": op, "label": "step", "kind": "pass"},
                    "fingerprint": dict.fromkeys(("model", "optimizer", "numerics", "random"), 16 * "0"),
                },
                roots=[root],
                units=members,
                groups={},
            ),
        )
        times.append(time.process_time() - began_s)
    return (statistics.median(builds), statistics.median(rebuilds), statistics.median(times), sent.frames / operations)


class _Count:
    """Counts the frames that this process sends."""

    def __init__(self) -> None:
        self.frames = 0
        make = SendQueue._next

        def noted(queue: SendQueue) -> tuple[Frame, Payload] | None:
            item = make(queue)
            self.frames += item is not None
            return item

        SendQueue._next = noted  # type: ignore[method-assign, assignment]


def _no_copies(sock: object, hello: object) -> None:
    raise AssertionError("nobody copies here")


if __name__ == "__main__":
    main()
