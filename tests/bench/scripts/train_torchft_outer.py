"""The measured training with rare communication as torchft's users write it: each process is a replica group of one.

TORCHFT_LIGHTHOUSE: the address of the lighthouse. BENCH_QUORUM: min_replica_size. BENCH_NODE: which node this is.
BENCH_ADDRESS: its address. In a stamp `began` says how many inner steps of this process are in the round.
"""

import os
import socket
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.local_sgd import DiLoCo

from tests.bench import outer_work as work
from tests.bench import turnstile
from tests.bench.stamps import Shards, Stamps

WAIT, QUORUM_WAIT = timedelta(seconds=10), timedelta(seconds=60)

torch.set_num_threads(1)
torch.manual_seed(int(os.environ["BENCH_SEED"]))
node, address = os.environ["BENCH_NODE"], os.environ["BENCH_ADDRESS"]
socket.gethostname = lambda: address  # torchft serves states under it, and here no name server knows the hosts
name = f"{node}-{os.getpid()}"
store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
model, inner, outer = work.build()
healed = False


def load(state):
    global healed
    healed = True
    model.load_state_dict(state["model"])
    inner.load_state_dict(state["optimizer"])


manager = Manager(
    pg=ProcessGroupGloo(timeout=WAIT),
    load_state_dict=load,
    state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
    min_replica_size=int(os.environ["BENCH_QUORUM"]),
    use_async_quorum=False,
    timeout=WAIT,
    quorum_timeout=QUORUM_WAIT,
    connect_timeout=WAIT,
    replica_id=f"node_{node}_",
    rank=0,
    world_size=1,
    store_addr=address,
    store_port=store.port,
    hostname=address,
)
text, _ = work.texts()
drawn = torch.Generator().manual_seed(os.getpid())
stamps = Stamps(Path(os.environ["BENCH_STAMPS"]), name)
computed = Shards(Path(os.environ["BENCH_STAMPS"]), name)
pace = work.Pace()
gate = turnstile.enter(name)

with DiLoCo(manager, [model], inner, outer, sync_every=work.INNER_STEPS, use_bucketization=True):
    while True:
        before, healed, total = manager.current_step(), False, 0.0
        for number in range(work.INNER_STEPS):
            pace.begin()
            pieces = [text[int(at)] for at in torch.randint(len(text), (work.SEQUENCES,), generator=drawn)]
            x, y = (torch.stack(part) for part in zip(*pieces, strict=True))
            inner.zero_grad()
            total += work.backward(model, x, y).item()
            computed.write(before, number)
            pace.wait()
            inner.step()  # the last one synchronises
        after = manager.current_step()
        if after > before:
            # Who has got another one's parameters in this synchronisation has sent that one's difference.
            counted = work.INNER_STEPS if manager.is_participating() and not healed else 0
            stamps.write(after - 1, counted, after, manager.num_participants(), total / work.INNER_STEPS)
