"""The measured training as a DistributedDataParallel script under `elastic run --ranks`, plus stamps: a rank's batch is
one micro-batch of the step."""

import os
from pathlib import Path

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import elastic.ddp as ddp
from runtime.frontends.ddp.rank_script import RankScript
from tests.bench import turnstile, work
from tests.bench.stamps import Stamps

dist.init_process_group("gloo")
model, optimizer = work.build()
model = DistributedDataParallel(model)
batches = work.Batches()
name = os.environ["ELASTIC_WORKER_ID"]
stamps = Stamps(Path(os.environ["BENCH_STAMPS"]), name)
wait = turnstile.enter(name).wait  # not the object: what a silent turn does to its limit would be undone
script = RankScript.running()  # the bench's own look: what a script is not told
assert script.job is not None

for step, batch in enumerate(ddp.batches(batches.take, steps=turnstile.OPEN)):
    began, world = script.job.generation, script.job.world_size
    wait(step)
    optimizer.zero_grad()
    loss = work.loss_of(model, batch)
    loss.backward()
    optimizer.step()
    if not script.silent:
        stamps.write(script.number, began, script.job.generation, world, loss.item())
