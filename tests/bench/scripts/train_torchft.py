"""The measured training as torchft's users write it: each process is a replica group of one, with a part of each step's
micro-batches that stays its own.

TORCHFT_LIGHTHOUSE: the address of the lighthouse. BENCH_NODE: which node this is, BENCH_NODES: of which, in order. In
a stamp `began` says how many micro-batches of this process are in the step.
"""

import os
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from tests.bench import turnstile, work
from tests.bench.stamps import Stamps

WAIT = timedelta(seconds=10)

torch.set_num_threads(1)
nodes = os.environ["BENCH_NODES"].split(",")
place = nodes.index(os.environ["BENCH_NODE"])
name = f"{nodes[place]}-{os.getpid()}"
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
bare, inner = work.build()


def load(state):
    bare.load_state_dict(state["model"])
    inner.load_state_dict(state["optimizer"])


manager = Manager(
    pg=ProcessGroupGloo(timeout=WAIT),
    load_state_dict=load,
    state_dict=lambda: {"model": bare.state_dict(), "optimizer": inner.state_dict()},
    min_replica_size=1,
    timeout=WAIT,
    quorum_timeout=WAIT,
    connect_timeout=WAIT,
    replica_id=f"node_{nodes[place]}_",
    rank=0,
    world_size=1,
    store_addr="127.0.0.1",
    store_port=store.port,
    hostname="127.0.0.1",
)
model = DistributedDataParallel(manager, bare)
optimizer = Optimizer(manager, inner)
batches = work.Batches()
mine = range(place * work.SHARDS // len(nodes), (place + 1) * work.SHARDS // len(nodes))
stamps = Stamps(Path(os.environ["BENCH_STAMPS"]), name)
gate = turnstile.enter(name)

while True:
    step = manager.current_step()
    gate.wait(step)
    optimizer.zero_grad()
    total = 0.0
    for shard in mine:
        with nullcontext() if shard == mine[-1] else model.no_sync():
            loss = work.loss_of(model, batches.take(step, shard))
            (loss * (len(nodes) / work.SHARDS)).backward()
        total += loss.item()
    optimizer.step()
    if manager.current_step() > step:
        counted = len(mine) if manager.is_participating() else 0
        stamps.write(step, counted, manager.current_step(), manager.num_participants(), total / len(mine))
