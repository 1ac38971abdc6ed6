"""What overlapping the reduction with the last shard's backward would gain: `python -m tests.bench.overlap`. It is
a part of `make bench-step` too.

Workers train the model of work.py over the ring of this project, without anything that makes it survive failures. In
one way they reduce when the last backward is over, as the product does. In the other a hook of each parameter counts
its bucket down, and a thread exchanges a complete bucket while backward goes on. Both ways take turns, in blocks;
printed are the median step and CPU time of a worker and the median of the ratios of neighbouring blocks, with the one
way against itself as the null.
"""

from __future__ import annotations

import argparse
import json
import queue
import resource
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from runtime.allreduce.reduction.over_mesh import ReductionRequest, Sums, exchange
from runtime.allreduce.reduction.partial_sum import Partial
from runtime.allreduce.ring.listener import Listener
from runtime.allreduce.ring.ring import Peer, Ring
from runtime.allreduce.ring.ring_builder import RingSpec, build
from tests.bench import work
from tests.bench.intervals import median_interval, ratios

GROUP = "float32"
AFTERWARDS, OVERLAPPED, AGAIN = "afterwards", "overlapped", "afterwards again"
WAYS = (AFTERWARDS, OVERLAPPED, AGAIN)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, default=2)
    parser.add_argument("--bucket-mb", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--block", type=int, default=6, help="steps; the first one is not measured")
    parser.add_argument("--json", type=Path, help="where the seconds of a step go: by way, per block")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as shared:
        spawn(_member, args=(options, shared), nprocs=options.members)


class Worker:
    """One replica. Gradients of all shards are added into one flat tensor, in the order in which backward ends."""

    def __init__(self, ring: Ring, bucket_mb: float) -> None:
        self._ring = ring
        self._model, self._optimizer = work.build()
        self._batches = work.Batches()
        parameters = list(self._model.parameters())[::-1]
        self._flat = torch.zeros(sum(parameter.numel() for parameter in parameters))
        self._sum = torch.zeros_like(self._flat)
        self._views: dict[nn.Parameter, Tensor] = {}
        self._means: dict[nn.Parameter, Tensor] = {}
        self._bucket_of: dict[nn.Parameter, int] = {}
        self._buckets: list[tuple[int, int]] = []
        self._lay_out(parameters, int(bucket_mb * 250_000))
        self._missing: list[int] = []
        self._last = self._overlapping = False
        self._op = 0
        self._due: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()
        threading.Thread(target=self._exchange_due, daemon=True).start()
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._ready)

    def _lay_out(self, parameters: list[nn.Parameter], elements: int) -> None:
        lo = hi = 0
        for parameter in parameters:
            end = hi + parameter.numel()
            self._views[parameter] = self._flat[hi:end].view_as(parameter)
            self._means[parameter] = self._sum[hi:end].view_as(parameter)
            self._bucket_of[parameter] = len(self._buckets)
            hi = end
            if hi - lo >= elements or parameter is parameters[-1]:
                self._buckets.append((lo, hi))
                lo = hi

    def step(self, number: int, way: str) -> None:
        self._overlapping = way == OVERLAPPED
        self._missing = [0] * len(self._buckets)
        for bucket in self._bucket_of.values():
            self._missing[bucket] += 1
        self._flat.zero_()
        share = work.SHARDS // self._ring.world_size
        for turn in range(share):
            self._last = turn == share - 1
            work.loss_of(self._model, self._batches.take(number, self._ring.rank * share + turn)).backward()
        if self._overlapping:
            for _ in self._buckets:
                self._done.get()
        else:
            self._exchange(0, len(self._flat))
        self._sum /= work.SHARDS
        for parameter, mean in self._means.items():
            parameter.grad = mean
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _ready(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
        self._views[parameter].add_(parameter.grad)
        parameter.grad = None
        if self._last and self._overlapping:
            bucket = self._bucket_of[parameter]
            self._missing[bucket] -= 1
            if not self._missing[bucket]:
                self._due.put(bucket)

    def _exchange_due(self) -> None:
        while (bucket := self._due.get()) is not None:
            self._exchange(*self._buckets[bucket])
            self._done.put(None)

    def _exchange(self, lo: int, hi: int) -> None:
        exchange(
            self._ring,
            ReductionRequest(
                op=self._op,
                roots=[Partial(self._ring.rank, self._ring.rank + 1, {GROUP: self._flat[lo:hi]})],
                units=self._ring.world_size,
                groups={GROUP: hi - lo},
            ),
            sums=Sums({GROUP: self._sum[lo:hi]}),
        )
        self._op += 1

    def digest(self) -> float:
        return sum(float(parameter.detach().double().abs().sum()) for parameter in self._model.parameters())


def _member(rank: int, options: argparse.Namespace, shared: str) -> None:
    torch.set_num_threads(1)
    members = options.members
    dist.init_process_group("gloo", init_method=f"file://{Path(shared) / 'store'}", rank=rank, world_size=members)
    name = f"w{rank}"
    listener = Listener(
        "127.0.0.1", job="bench", me=name, token_of=lambda generation: "t", serve_copy=lambda sock, hello: None
    )
    addresses: list[tuple[str, int]] = [("", 0)] * members
    dist.all_gather_object(addresses, listener.address)
    ring = build(
        listener,
        RingSpec(
            job="bench",
            generation=1,
            base=1,
            me=name,
            peers=[Peer(f"w{other}", *address) for other, address in enumerate(addresses)],
            plan="p",
            token="t",
        ),
        deadline_s=60.0,
        cancelled=threading.Event(),
    )
    worker = Worker(ring, options.bucket_mb)
    wall_s, cpu_s = _rounds(worker, options.rounds, options.block)
    digests: list[float] = [0.0] * members
    dist.all_gather_object(digests, worker.digest())
    assert len(set(digests)) == 1, f"the replicas differ: {digests}"
    if rank == 0:
        _report(members, options.bucket_mb, wall_s, cpu_s)
        if options.json is not None:
            options.json.write_text(json.dumps(wall_s), encoding="utf-8")
    dist.barrier()
    ring.close()
    listener.close()
    dist.destroy_process_group()


def _rounds(worker: Worker, rounds: int, block: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """(seconds, CPU seconds) of a step by way, per block."""
    wall_s: dict[str, list[float]] = {way: [] for way in WAYS}
    cpu_s: dict[str, list[float]] = {way: [] for way in WAYS}
    number = 0
    for turn in range(rounds + 1):  # the first round warms up
        for way in WAYS[turn % 3 :] + WAYS[: turn % 3]:
            for step in range(block):
                if step == 1:
                    begun_s, used_s = time.perf_counter(), _cpu_s()
                worker.step(number, way)
                number += 1
            if turn:
                wall_s[way].append((time.perf_counter() - begun_s) / (block - 1))
                cpu_s[way].append((_cpu_s() - used_s) / (block - 1))
    return wall_s, cpu_s


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _report(members: int, bucket_mb: float, wall_s: dict[str, list[float]], cpu_s: dict[str, list[float]]) -> None:
    print(f"{work.MODEL}, {members} members, buckets of {bucket_mb:g} MB")
    for way in WAYS:
        interval = median_interval(ratios(wall_s[way], wall_s[WAYS[0]]))
        step_ms, used_ms = statistics.median(wall_s[way]) * 1e3, statistics.median(cpu_s[way]) * 1e3
        spread = f"{interval.low:.3f} to {interval.high:.3f}"
        print(
            f"  {way:16s} {step_ms:6.1f} ms, CPU {used_ms:6.1f} ms; / {WAYS[0]}: {interval.median:.3f} ({spread})",
            flush=True,
        )


if __name__ == "__main__":
    main()
