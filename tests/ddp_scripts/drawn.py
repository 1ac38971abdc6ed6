"""A loop that draws its own batches, with accumulation, mixed precision and a learning rate by step, as those who train
small language models write it; the two lines of elastic.ddp are said in the file."""

import contextlib
import math
import os
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import elastic.ddp as ddp

ddp.enable(ranks=4)

CONTEXT, BATCH, ACCUMULATED, WORDS = 8, 3, 2, 24
STEPS = {"warmup": 2, "decay": 12}


def get_lr(step):
    if step < STEPS["warmup"]:
        return 1e-2 * (step + 1) / STEPS["warmup"]
    return 1e-3 + 0.5 * 9e-3 * (1 + math.cos(math.pi * min(1.0, step / STEPS["decay"])))


def main(epochs=2, seed_of_the_rank=True):
    last = 5 * epochs
    dist.init_process_group("gloo")
    torch.manual_seed(1337 + (dist.get_rank() if seed_of_the_rank else 0))
    data = (np.arange(400, dtype=np.uint16) * 7) % WORDS

    def get_batch():
        starts = torch.randint(len(data) - CONTEXT, (BATCH,))
        x, y = (
            torch.stack([torch.from_numpy(data[i + d : i + d + CONTEXT].astype(np.int64)) for i in starts])
            for d in (0, 1)
        )
        return x, y

    model = DDP(
        nn.Sequential(nn.Embedding(WORDS, 16), nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, WORDS))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    ctx = contextlib.nullcontext()
    batches = iter(ddp.batches(get_batch, steps=(last + 1) * ACCUMULATED))
    iter_num, local_iter_num, best = 0, 0, 1e9
    while True:
        for group in optimizer.param_groups:
            group["lr"] = get_lr(iter_num)
        for micro_step in range(ACCUMULATED):
            model.require_backward_grad_sync = micro_step == ACCUMULATED - 1
            x, y = next(batches)
            with ctx:
                loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / ACCUMULATED
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if iter_num % 4 == 0 and dist.get_rank() == 0:
            best = min(best, loss.item() * ACCUMULATED)
            print(f"iter {iter_num}: loss {loss.item() * ACCUMULATED:.4f}", flush=True)
        time.sleep(float(os.environ.get("NAP", "0")))
        iter_num += 1
        local_iter_num += 1
        if iter_num > last:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
