"""The measured training with torch's DistributedDataParallel on gloo, under torchrun or started by hand.

With BENCH_CHECKPOINT set it writes a checkpoint every 10 steps and starts from it, as torchrun's users have to.
BENCH_BUCKET_MB: DDP's bucket_cap_mb.
"""

import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.bench import turnstile, work
from tests.bench.stamps import Stamps

CHECKPOINT_STEPS = 10

torch.set_num_threads(1)
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", os.environ.get("BENCH_INIT", "env://"), rank=rank, world_size=world)
model, optimizer = work.build()
first = 0
checkpoint = os.environ.get("BENCH_CHECKPOINT")
if checkpoint and os.path.exists(checkpoint):
    saved = torch.load(checkpoint, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"]
ddp = DistributedDataParallel(model, bucket_cap_mb=float(os.environ.get("BENCH_BUCKET_MB", "25")))
batches = work.Batches()
mine = range(rank * work.SHARDS // world, (rank + 1) * work.SHARDS // world)
restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
name = f"rank{rank}-{os.getpid()}"
stamps = Stamps(Path(os.environ["BENCH_STAMPS"]), name)
gate = turnstile.enter(name)

for step in range(first, turnstile.OPEN):
    gate.wait(step)
    total = 0.0
    for shard in mine:
        # DDP averages over the ranks; the mean over all micro-batches takes this factor.
        with nullcontext() if shard == mine[-1] else ddp.no_sync():
            loss = work.loss_of(ddp, batches.take(step, shard))
            (loss * (world / work.SHARDS)).backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    if checkpoint and rank == 0 and (step + 1) % CHECKPOINT_STEPS == 0:
        content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
        torch.save(content, checkpoint + ".tmp")
        os.replace(checkpoint + ".tmp", checkpoint)
    stamps.write(step, restarts, restarts, world, total / len(mine))
