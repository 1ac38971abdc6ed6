"""Canonical and native exchange against gloo's allreduce: `python -m tests.bench.exchange [--members 2 4] [--mb 40]`.

All three run in the same processes, one after the other in every round, so that whatever else the machine does meets
all alike. Printed: medians of the time until the last member is through and of the CPU time of a member, with the
median of the ratios of the rounds; gloo against gloo is the null.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import spawn

from runtime.allreduce.reduction.over_mesh import ReductionRequest, Sums, exchange
from runtime.allreduce.reduction.partial_sum import Partial
from runtime.allreduce.ring.listener import Listener
from runtime.allreduce.ring.ring import Peer, Ring
from runtime.allreduce.ring.ring_builder import RingSpec, build

GROUP = "float32"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mb", type=int, default=40, help="megabytes (10**6) of float32 per member")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--tcp", action="store_true", help="a loopback address per member, so that all use TCP")
    arguments = parser.parse_args()
    for members in arguments.members:
        with tempfile.TemporaryDirectory() as shared:
            spawn(
                _member, args=(members, arguments.mb * 250_000, arguments.rounds, arguments.tcp, shared), nprocs=members
            )


def _member(rank: int, members: int, elements: int, rounds: int, tcp: bool, shared: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=FileStore(os.path.join(shared, "store"), members),
        rank=rank,
        world_size=members,
        timeout=timedelta(seconds=120),
    )
    name = f"w{rank}"
    host = f"127.0.0.{rank + 1}" if tcp else "127.0.0.1"
    listener = Listener(
        host, job="bench", me=name, token_of=lambda generation: "t", serve_copy=lambda sock, hello: None
    )
    addresses: list[tuple[str, int]] = [("", 0)] * members
    dist.all_gather_object(addresses, listener.address)
    peers = [Peer(f"w{other}", *address) for other, address in enumerate(addresses)]
    builds = []
    for generation in range(1, 12):
        dist.barrier()
        begun_s = time.perf_counter()
        ring = build(
            listener,
            RingSpec(job="bench", generation=generation, base=generation, me=name, peers=peers, plan="p", token="t"),
            deadline_s=60.0,
            cancelled=threading.Event(),
        )
        builds.append(time.perf_counter() - begun_s)
        if generation < 11:
            dist.barrier()
            ring.close()
    times = _rounds(ring, rank, members, elements, rounds)
    if rank == 0:
        _report(members, elements, rounds, builds, times, "TCP" if tcp else "unix sockets")
    dist.barrier()
    ring.close()
    listener.close()
    dist.destroy_process_group()


def _rounds(ring: Ring, rank: int, members: int, elements: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """name -> (seconds, CPU seconds) of each round."""
    data = torch.randn(elements)
    gloo_data = data.clone()
    outs = {GROUP: torch.zeros(elements)}
    root = Partial(rank, rank + 1, {GROUP: data})
    op = iter(range(10**9))

    def ours() -> None:
        exchange(
            ring, ReductionRequest(op=next(op), roots=[root], units=members, groups={GROUP: elements}), sums=Sums(outs)
        )

    def native() -> None:
        exchange(
            ring,
            ReductionRequest(op=next(op), roots=[root], leaves=[rank], units=members, groups={GROUP: elements}),
            sums=Sums(outs),
        )

    def gloo() -> None:
        dist.all_reduce(gloo_data)

    def scalars() -> None:
        exchange(ring, ReductionRequest(op=next(op), roots=[Partial(rank, rank + 1)], units=members, groups={}))

    calls: dict[str, Callable[[], None]] = {
        "gloo": gloo,
        "exact": ours,
        "allreduce": native,
        "gloo again": gloo,
        "headers only": scalars,
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for number in range(rounds + 3):
        gloo_data.copy_(data)
        for name, call in calls.items():
            dist.barrier()
            begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
            call()
            took = torch.tensor([time.perf_counter() - begun_s, time.process_time() - begun_cpu_s])
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if number >= 3:
                times[name].append((took[0].item(), took[1].item()))
    return times


def _report(
    members: int,
    elements: int,
    rounds: int,
    builds: list[float],
    times: dict[str, list[tuple[float, float]]],
    path: str,
) -> None:
    print(f"{members} members, {elements * 4 / 1e6:.0f} MB float32, {rounds} rounds, {path}, {os.cpu_count()} cores")
    print(f"  build {1000 * statistics.median(builds):6.1f} ms (worst {1000 * max(builds):.1f})")
    for name, values in times.items():
        columns = [f"  {name:13}"]
        for which, unit in ((0, "ms"), (1, "ms CPU")):
            ratios = [value[which] / base[which] for value, base in zip(values, times["gloo"], strict=True)]
            median_ms = 1000 * statistics.median(value[which] for value in values)
            columns.append(f"{median_ms:7.2f} {unit}, {statistics.median(ratios):.3f} of gloo")
        print("   ".join(columns), flush=True)


if __name__ == "__main__":
    main()
