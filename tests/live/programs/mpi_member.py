"""One rank of mpirun with a mesh beside it: reduces over both, and compares; then the others go on without the last.

Arguments: directory, own id. The directory holds `members`, the ids by rank; results are printed as JSON lines.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from elastic.agent.worker.mpi_ranks import Ranks
from elastic.errors import RingBroken
from elastic.records.journal import Journal
from runtime.allreduce.reduction.over_mesh import ReductionRequest, exchange
from runtime.allreduce.reduction.over_transport import exchange_over
from runtime.allreduce.reduction.partial_sum import Partial
from runtime.allreduce.ring.mpi import MpiTransport, MpiWorld
from runtime.allreduce.ring.ring import Peer, Ring
from tests.trees import fold_nodes
from tests.unit.rings import build_one, listener
from tests.unit.runtime.allreduce.reduction.test_over_mesh import sum_of

LAYOUTS = (
    (4, {"float32": 1000, "float64": 7}),
    (8, {"float32": 300_001}),
    (3, {"float32": 5_000_003, "float64": 65}),
    (1, {"float32": 64}),
    (8, {"float32": 0}),
)


def abort_when_it_waits(ring: Ring, transport: MpiTransport) -> None:
    """As the control thread does when it has heard of a loss, in the middle of an exchange."""
    waits = threading.Event()
    sound = transport._await

    def wait(done: Callable[[], bool]) -> None:
        def looked() -> bool:
            complete = done()
            waits.set()
            return complete

        sound(looked)

    def abort() -> None:
        waits.wait()
        ring.abort()

    transport._await = wait  # type: ignore[method-assign]
    threading.Thread(target=abort, daemon=True).start()


def broken(ring: Ring, sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor]) -> None:
    assert isinstance(ring.transport, MpiTransport)
    abort_when_it_waits(ring, ring.transport)
    try:
        with ring.transport.attempt():
            ring.transport.exchange(sends, receives)
    except RingBroken:
        return
    raise AssertionError("an exchange that nobody answers is over")


def unreceived(ring: Ring) -> None:
    """The first sends what the other one never asks for."""
    if ring.rank == 0:
        broken(ring, {1: torch.ones(1 << 20)}, {})
    ring.close()


def main(home: Path, me: str) -> None:
    members = (home / "members").read_text().split()
    torch.set_num_threads(1)
    world = MpiWorld(Ranks.from_environment(os.environ), me, Journal(home / f"{me}.jsonl", job="job", who=me, node="n"))
    door = listener(me)
    write(home / f"port.{me}", str(door.address[1]))

    def ring_of(generation: int, ids: list[str]) -> Ring:
        ports = [int(await_file(home / f"port.{name}")) for name in ids]
        peers = [Peer(name, "127.0.0.1", port) for name, port in zip(ids, ports, strict=True)]
        ring = build_one(door, me, peers, generation=generation)
        with world.meet(generation, ids, ids.index(me)) as meeting:
            ring.transport = meeting.connect("")
        return ring

    ring = ring_of(1, members)
    for op, (units, groups) in enumerate(LAYOUTS):
        compare(ring, op, units, groups)
    say(event="same", layouts=len(LAYOUTS))
    if me == members[-1]:
        say(event="blocked")
        time.sleep(1000)
    one = torch.ones(1 << 20)
    others = [rank for rank in range(len(members)) if rank != ring.rank]
    broken(ring, dict.fromkeys(others, one), {rank: torch.empty(1 << 20) for rank in others})
    say(event="broken")
    ring.close()
    for event, generations in (("warm", range(2, 4)), ("settled", range(4, 13)), ("rebuilt", range(13, 22))):
        after = []
        for generation in generations:
            ring = ring_of(generation, members[:-1])
            compare(ring, 0, *LAYOUTS[0])
            compare(ring, 1, *LAYOUTS[1])
            ring.close()
            after.append(held())
        # Each time something of a peer's may be about to close; what leaks is there every time.
        say(event=event, **{what: min(one[what] for one in after) for what in after[0]})
    unreceived(ring_of(30, members[:-1]))
    for generation in range(31, 35):
        ring = ring_of(generation, members[:-1])
        compare(ring, 0, *LAYOUTS[1])
        ring.close()
    assert world._wire is not None
    say(event="swept", left=len(world._wire._left))
    with world.meet(50, [me, "n.9.1"], 0) as meeting:
        assert meeting.connect("") is None, "without a rank there is no way to it"
        assert meeting.because.startswith("MPI has no rank for n.9.1, because")
    say(event="end")


def compare(ring: Ring, op: int, units: int, groups: dict[str, int]) -> None:
    assert ring.transport is not None
    leaves = [(unit, unit + 1) for unit in range(units) if unit % ring.world_size == ring.rank]
    roots = [sum_of(node, groups, op) for node in fold_nodes(leaves, units)]
    out = {group: torch.full((length,), float("nan"), dtype=getattr(torch, group)) for group, length in groups.items()}
    request = ReductionRequest(op=2 * op, roots=roots, units=units, groups=groups)
    over_mpi = exchange_over(ring, request, transport=ring.transport, out=out)[1]
    over_mesh = exchange(ring, replace(request, op=2 * op + 1))[1]
    assert bits(over_mpi) == bits(over_mesh), (units, groups)


def bits(partial: Partial) -> dict[str, bytes]:
    return {group: flat.numpy().tobytes() for group, flat in partial.flats.items()}


def held() -> dict[str, int]:
    return {"threads": threading.active_count(), "fds": len(os.listdir("/proc/self/fd"))}


def write(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.part")
    partial.write_text(text)
    partial.rename(path)


def await_file(path: Path) -> str:
    while not path.exists():
        time.sleep(0.01)
    return path.read_text()


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
