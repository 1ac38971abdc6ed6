"""A step's bytes and time between machines, against DDP over gloo: `python -m tests.bench.net`. Root.

Machines are network namespaces on one switch, with a token bucket at both ends of each cable. The members of a layout,
such as 2x4 (nodes x ranks on each), are forks of this process that enter the namespaces: rings, the exchange and DDP
are real; there is no leader and there are no agents. A step is a forward and a backward pass of a small MLP with one
shard a member, and the sum of its gradients. All kinds of steps take turns in the same processes. Bytes are what the
nodes' interfaces have sent, without the headers of Ethernet, IP and TCP. The last line is for machines.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkContext, ForkProcess
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from chaos_tests.cluster.network import Network, why_not
from elastic.config import Compression
from elastic.protocol.reduction_tree import Node
from elastic.protocol.shard_assignment import owned, slack_percent
from runtime.allreduce.fixed_point.conversion import decode, encode
from runtime.allreduce.fixed_point.exponents import BlockExponents
from runtime.allreduce.reduction.early_sums import EarlySums, LastShard
from runtime.allreduce.reduction.gradient_harvest import Harvest
from runtime.allreduce.reduction.leaves.fixed_leaves import BLOCK
from runtime.allreduce.reduction.over_mesh import ReductionRequest, Sums, exchange
from runtime.allreduce.reduction.partial_sum import Partial
from runtime.allreduce.reduction.schedule import DTYPES
from runtime.allreduce.ring.listener import Listener
from runtime.allreduce.ring.ring import Peer, Ring
from runtime.allreduce.ring.ring_builder import RingSpec, build

GROUP = "float32"
LAYERS, WIDTH = 10, 500
PARAMETERS = LAYERS * (WIDTH * WIDTH + WIDTH)
BYTES = 4 * PARAMETERS
BUCKETS_MB = (1, 4, 25)
"""DDP's own choices; the best counts."""
NARROW = tuple(str(compression) for compression in Compression if compression is not Compression.NONE)
"""exact, with --compression."""
OURS = ("exact", "fixed", "allreduce", *NARROW)
EARLY = ("exact early", "fixed early")
"""With --overlap on."""
ODD_SHARDS = 64
WAIT_S = 300.0
PACKET_HEADERS = 14 + 20 + 32
"""Bytes of a packet for Ethernet, IPv4 and TCP with time stamps."""
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, slots=True)
class Layout:
    """nodes x ranks on each."""

    nodes: int
    ranks: int

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(f"n{rank // self.ranks}" for rank in range(self.world_size))

    @property
    def bound(self) -> float:
        """The bytes that a node has to send: reduced within it first, then like a ring of nodes."""
        return 2 * BYTES * (self.nodes - 1) / self.nodes

    def __str__(self) -> str:
        return f"{self.nodes}x{self.ranks}"


@dataclass(frozen=True, slots=True)
class Turn:
    """One step of all members. sent: bytes of each node."""

    seconds: float
    cpu_s: float
    sent: tuple[int, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="turns of each kind of step (default: %(default)s)")
    parser.add_argument(
        "--rates", type=int, nargs="+", default=[200, 1000], metavar="MBIT", help="of each cable, each way"
    )
    arguments = parser.parse_args()
    if because := why_not():
        sys.exit(f"bench-net: {because}")
    torch.set_num_threads(1)
    found: dict[str, float] = {}
    for layout in (Layout(4, 1), Layout(2, 2), Layout(2, 4)):
        found |= _layout(layout, arguments.rates, arguments.rounds)
    found["odd"] = _odd(Layout(3, 1), min(arguments.rates))
    print("net:", *(f"{name}={value:.3f}" for name, value in found.items()))


def _layout(layout: Layout, rates: Sequence[int], rounds: int) -> dict[str, float]:
    found: dict[str, float] = {}
    ddp = [f"ddp {size}" for size in BUCKETS_MB]
    with _members(layout) as members:
        for rate in rates:
            members.narrow(rate)
            turns = members.turns([*OURS, *ddp], rounds)
            best = min(ddp, key=lambda kind: statistics.median(turn.seconds for turn in turns[kind]))
            sizes = f"{BYTES / 1e6:.1f} MB of gradients, of which a node has to send {layout.bound / 1e6:.1f} MB"
            print(f"{layout} at {rate} Mbit/s, {sizes}; {rounds} rounds")
            for kind in (*OURS, best):
                print(f"  {_line(kind, turns[kind], turns[best])}")
            if layout == Layout(2, 4) and rate == min(rates):
                sent = statistics.median(max(turn.sent) for turn in turns["exact"])
                found["bytes_2x4"] = sent / layout.bound
                found["step_2x4"] = _ratio(turns["exact"], turns[best])
            if layout == Layout(4, 1) and rate == min(rates):
                for kind in NARROW:
                    found[f"{kind}_4x1"] = _ratio(turns[kind], turns["exact"])
        if layout == Layout(4, 1):
            members.narrow(min(rates))
            wire_s = layout.bound / (min(rates) * 125_000)
            slow = [f"{kind} slow" for kind in ("exact", *EARLY, *ddp)]
            turns = members.turns(slow, rounds, backward_s=wire_s)
            best = min(slow[3:], key=lambda kind: statistics.median(turn.seconds for turn in turns[kind]))
            print(f"{layout} at {min(rates)} Mbit/s, backward takes as long as the wire, {wire_s:.2f} s")
            for kind in (*slow[:3], best):
                print(f"  {_line(kind, turns[kind], turns[best])}")
            found["overlap_4x1"] = _ratio(turns["exact early slow"], turns[best])
            found["overlap_fixed_4x1"] = _ratio(turns["fixed early slow"], turns[best])
    return found


def _odd(layout: Layout, rate: int) -> float:
    """Bytes of the member that sends most, over those of a ring, with more shards than members. rate: of each cable, in
    Mbit/s, such that no packet has to be sent again."""
    with _members(layout) as members:
        members.narrow(rate)
        turns = members.turns(["odd", "odd fixed"], 3)
    ratios = {kind: statistics.median(max(turn.sent) for turn in turns[kind]) / layout.bound for kind in turns}
    for kind, ratio in ratios.items():
        print(f"{layout} with {ODD_SHARDS} shards, {kind}: who sends most sends {ratio:.4f} of a ring's bytes")
    return ratios["odd"]


def _line(kind: str, turns: Sequence[Turn], base: Sequence[Turn]) -> str:
    seconds = [turn.seconds for turn in turns]
    sent = statistics.median(max(turn.sent) for turn in turns) / 1e6
    cpu_s = statistics.median(turn.cpu_s for turn in turns)
    return (
        f"{kind:12} {statistics.median(seconds):6.3f} s ({min(seconds):.3f} to {max(seconds):.3f}), "
        f"{_ratio(turns, base):.3f} of DDP's best; {sent:6.1f} MB a node; {cpu_s:.3f} s CPU a member"
    )


def _ratio(turns: Sequence[Turn], base: Sequence[Turn]) -> float:
    return statistics.median(turn.seconds / other.seconds for turn, other in zip(turns, base, strict=True))


# ------------------------------------------------------------------------------------------------- members


@contextmanager
def _members(layout: Layout) -> Iterator[_Members]:
    with Network() as network:
        members = _Members(layout, network, multiprocessing.get_context("fork"))
        try:
            yield members
        finally:
            members.close()


class _Members:
    """The processes of one layout, which do one step at a time."""

    def __init__(self, layout: Layout, network: Network, context: ForkContext) -> None:
        self._layout, self._network = layout, network
        self._nodes = [f"n{number}" for number in range(layout.nodes)]
        addresses = [network.add(name) for name in self._nodes]
        pipes = [context.Pipe() for _ in range(layout.world_size)]
        self._ends = [ours for ours, _ in pipes]
        self._processes: list[ForkProcess] = []
        for rank, (_, theirs) in enumerate(pipes):
            within = network.within(self._nodes[rank // layout.ranks])[1].removeprefix("--net=")
            process = context.Process(target=_member, args=(rank, layout, addresses, within, theirs), daemon=True)
            process.start()
            self._processes.append(process)
        ports = [self._receive(end) for end in self._ends]
        for end in self._ends:
            end.send(ports)
        for end in self._ends:
            self._receive(end)

    def narrow(self, rate_mbit: int) -> None:
        for name in self._nodes:
            self._network.narrow(name, 1000 * rate_mbit)

    def turns(self, kinds: Sequence[str], rounds: int, backward_s: float = 0.0) -> dict[str, list[Turn]]:
        """Turns of each kind, in another order each time; one more of each before, which does not count."""
        found: dict[str, list[Turn]] = {kind: [] for kind in kinds}
        for number in range(rounds + 1):
            for at in range(len(kinds)):
                kind = kinds[(at + number) % len(kinds)]
                turn = self._turn(kind, backward_s)
                if number:
                    found[kind].append(turn)
        return found

    def _turn(self, kind: str, backward_s: float) -> Turn:
        before = self._sent()
        for end in self._ends:
            end.send((kind, backward_s))
        done = [self._receive(end) for end in self._ends]
        sent = tuple(after - start for after, start in zip(self._sent(), before, strict=True))
        return Turn(max(took for took, _ in done), statistics.mean(cpu for _, cpu in done), sent)

    def _sent(self) -> list[int]:
        counters = []
        for name in self._nodes:
            words = (*self._network.within(name), "cat", "/proc/net/dev")
            lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
            (cable,) = (line.split(":")[1].split() for line in lines if line.strip().startswith("eth0:"))
            counters.append(int(cable[8]) - PACKET_HEADERS * int(cable[9]))
        return counters

    def _receive(self, end: Any) -> Any:
        if not end.poll(WAIT_S):
            raise TimeoutError(f"a member of {self._layout} has not answered for {WAIT_S:g} s")
        return end.recv()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _member(rank: int, layout: Layout, addresses: Sequence[str], within: str, pipe: Any) -> None:
    try:
        _serve(rank, layout, addresses, within, pipe)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _serve(rank: int, layout: Layout, addresses: Sequence[str], within: str, pipe: Any) -> None:
    _enter(within)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    host = addresses[rank // layout.ranks]
    listener = Listener(host, job="net", me=f"w{rank}", token_of=lambda generation: "t", serve_copy=_no_copies)
    pipe.send(listener.address[1])
    ports = pipe.recv()
    peers = [Peer(f"w{other}", addresses[other // layout.ranks], port) for other, port in enumerate(ports)]
    ring = build(
        listener,
        RingSpec(job="net", generation=1, base=1, me=f"w{rank}", peers=peers, plan="p", token="t"),
        deadline_s=WAIT_S,
        cancelled=threading.Event(),
    )
    method = f"tcp://{addresses[0]}:29611"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=layout.world_size)
    member = _Steps(rank, layout, ring)
    pipe.send("ready")
    while True:
        kind, backward_s = pipe.recv()
        dist.barrier()
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        member.step(kind, backward_s)
        pipe.send((time.perf_counter() - began_s, time.process_time() - began_cpu_s))


def _no_copies(sock: object, hello: object) -> None:
    raise AssertionError("nobody copies here")


def _enter(namespace: str) -> None:
    """Python has os.setns since 3.12 only."""
    with open(namespace) as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")


class _Pause(torch.autograd.Function):
    """Takes the time of a layer's backward pass on an accelerator, without this machine's processors."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, seconds: Callable[[], float]) -> Tensor:
        ctx.seconds = seconds
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds())
        return grads[0], None


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.backward_s = 0.0

    def forward(self, value: Tensor) -> Tensor:
        for layer in self.layers:
            value = _Pause.apply(layer(value).tanh(), lambda: self.backward_s / LAYERS)  # type: ignore[no-untyped-call, unused-ignore]
        return value


class _Steps:
    def __init__(self, rank: int, layout: Layout, ring: Ring) -> None:
        self._ring, self._rank, self._world_size = ring, rank, layout.world_size
        self._model = _Model()
        self._wrapped = {
            f"ddp {size}": DistributedDataParallel(self._model, bucket_cap_mb=size, gradient_as_bucket_view=True)
            for size in BUCKETS_MB
        }
        self._data = torch.randn(4, WIDTH)
        self._flat = torch.empty(PARAMETERS)
        self._exponents = torch.full((-(-PARAMETERS // BLOCK),), 16, dtype=torch.int16)
        self._integers = {
            "int16": torch.zeros_like(self._exponents),
            "int32": torch.zeros(PARAMETERS, dtype=torch.int32),
        }
        self._sums_of = {
            GROUP: Sums({GROUP: torch.empty(PARAMETERS)}),
            "int32": Sums({group: torch.empty_like(flat) for group, flat in self._integers.items()}),
        }
        self._scratch = torch.randn(PARAMETERS)
        state = BlockExponents(always_wide=False)
        state.units = layout.world_size
        parameters = list(self._model.named_parameters())
        self._harvests = {
            "exact early": Harvest(parameters),
            "fixed early": Harvest(parameters, fixed=state),
            **{name: Harvest(parameters, compression=Compression(name)) for name in NARROW},
        }
        self._rooms: dict[str, Tensor] = {}
        self._odd = owned(ODD_SHARDS, (), layout.hosts, slack_percent(layout.nodes))[rank]
        self._op = 0

    def step(self, kind: str, backward_s: float) -> None:
        self._model.backward_s = backward_s
        kind = kind.removesuffix(" slow")
        if kind in self._wrapped:
            self._train(self._wrapped[kind])
            return
        if kind == "odd":
            self._exchange(self._odd, [{GROUP: self._scratch}] * len(self._odd), ODD_SHARDS)
            return
        if kind == "odd fixed":
            self._exchange(self._odd, [self._integers] * len(self._odd), ODD_SHARDS, merged=True)
            return
        if kind in EARLY:
            self._train_early(kind)
            return
        if kind in NARROW:
            self._train_narrow(kind)
            return
        self._train(self._model)
        flat = torch.cat([p.grad.reshape(-1) for p in self._model.parameters() if p.grad is not None], out=self._flat)
        node = (self._rank, self._rank + 1)
        if kind == "fixed":
            self._integers["int16"].copy_(encode(flat, self._exponents, BLOCK, self._integers["int32"]))
            self._exchange([node], [self._integers], self._world_size, merged=True)
            decode(self._sums_of["int32"].out["int32"], self._exponents, BLOCK, flat)
            return
        self._exchange([node], [{GROUP: flat}], self._world_size, [self._rank] if kind == "allreduce" else None)

    def _train_narrow(self, kind: str) -> None:
        """As a worker does it, with --compression."""
        harvest = self._harvests[kind]
        harvest.begin_pass(0, 0, 0)
        harvest.before(self._rank)
        self._model(self._data).sum().backward()
        leaf = harvest.leaf(self._rank, 1.0, {})
        out = {group: self._room("out", group, size) for group, size in harvest.groups().items()}
        self._reduce([leaf], Sums(out))
        harvest.install(Partial(0, self._world_size, out, leaf.has_grad, float(self._world_size)), "mean")

    def _train_early(self, kind: str) -> None:
        """As a worker does it, with --overlap on."""
        harvest, fixed = self._harvests[kind], kind == "fixed early"
        harvest.begin_pass(0, 0, 0)
        harvest.before(self._rank)
        groups = harvest.groups()
        out, room = (
            {group: self._room(name, group, size) for group, size in groups.items()} for name in ("out", "room")
        )

        def sum_up(sums: EarlySums) -> None:
            roots = [Partial(*node, {} if fixed else sums.terms[0]) for node in sums.nodes]
            merged = sums.terms if fixed else None
            self._reduce(roots, Sums(sums.out), sums.ready, merged=merged, cuts=sums.cuts)

        wake, world_size = self._ring.wake, self._world_size
        last = LastShard(self._rank, world_size, (), fixed)
        sums = EarlySums(harvest.early.cuts, last, out, room, sum_up, wake)
        harvest.early.expect(sums, lambda: 1.0)
        self._model(self._data).sum().backward()
        leaf = harvest.leaf(self._rank, 1.0, {})
        leaf.settle()
        assert sums.flush([leaf.flats]), "what was sent early is not the gradient"
        self._reduce([Partial(self._rank, self._rank + 1)], Sums({}))
        harvest.install(Partial(0, self._world_size, out, leaf.has_grad, float(self._world_size)), "mean")

    def _room(self, name: str, group: str, size: int) -> Tensor:
        return self._rooms.setdefault(f"{name} {group} {size}", torch.empty(size, dtype=DTYPES[group]))

    def _reduce(
        self, roots: Sequence[Partial], sums: Sums, ready: Callable[[], int] | None = None, **arguments: Any
    ) -> None:
        exchange(
            self._ring,
            ReductionRequest(
                op=self._op,
                roots=roots,
                units=self._world_size,
                groups={group: len(flat) for group, flat in sums.out.items()},
                **arguments,
            ),
            sums=sums,
            ready=ready,
        )
        self._op += 1

    def _train(self, model: nn.Module) -> None:
        self._model.zero_grad(set_to_none=False)
        model(self._data).sum().backward()

    def _exchange(
        self,
        nodes: Iterable[Node],
        flats: Sequence[dict[str, Tensor]],
        units: int,
        leaves: Sequence[int] | None = None,
        *,
        merged: bool = False,
    ) -> None:
        sums = self._sums_of["int32" if merged else GROUP]
        exchange(
            self._ring,
            ReductionRequest(
                op=self._op,
                roots=[Partial(*node, values) for node, values in zip(nodes, flats, strict=True)],
                leaves=leaves,
                merged=[flats[0]] if merged else None,
                units=units,
                groups={group: len(flat) for group, flat in sums.out.items()},
            ),
            sums=sums,
        )
        self._op += 1


if __name__ == "__main__":
    main()
