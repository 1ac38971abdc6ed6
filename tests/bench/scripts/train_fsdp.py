"""The measured training with FSDP2 on gloo. Under `elastic run --restart` its state is kept in memory after each step.

With BENCH_CHECKPOINT set, as under torchrun, it writes a checkpoint of torch.distributed.checkpoint there each 10 steps
while the training goes on, and starts from the newest whole one.
"""

import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import elastic
from tests.bench import turnstile, work
from tests.bench.stamps import Stamps

CHECKPOINT_STEPS = 10
EACH = 3
"""Micro-batches of a process in a step: as many in all, because each one gathers the weights."""
KEPT_CHECKPOINTS = 2

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(work.SEED)
model = work.mlp()
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
kept = elastic.keep(model, optimizer)
place = os.environ.get("BENCH_CHECKPOINT")
saver = dist.new_group(backend="gloo") if place else None
saving = None


def newest():
    """The directories of whole checkpoints, by step."""
    paths = Path(place).glob("*/.metadata") if place else ()
    return sorted((path.parent for path in paths), key=lambda one: int(one.name))


def state():
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


if found := newest():
    held = state()
    dcp.load(held, checkpoint_id=found[-1])
    set_state_dict(model, optimizer, model_state_dict=held["model"], optim_state_dict=held["optimizer"])
    kept.step = int(found[-1].name)
batches = work.Batches()
mine = range(rank * EACH, (rank + 1) * EACH)
restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
name = f"rank{rank}-{os.getpid()}"
stamps = Stamps(Path(os.environ["BENCH_STAMPS"]), name)
gate = turnstile.enter(name)

while kept.step < turnstile.OPEN:
    step = kept.step
    gate.wait(step)
    total = 0.0
    for shard in mine:
        model.set_requires_gradient_sync(shard == mine[-1])
        loss = work.loss_of(model, batches.take(step, shard))
        (loss / EACH).backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    stamps.write(step, restarts, restarts, world, total / EACH)
    kept.done()
    if place and kept.step % CHECKPOINT_STEPS == 0:
        if saving is not None:
            saving.result()
        if rank == 0:
            for old in newest()[:-KEPT_CHECKPOINTS]:
                shutil.rmtree(old)
        saving = dcp.async_save(state(), checkpoint_id=f"{place}/{kept.step}", process_group=saver)
