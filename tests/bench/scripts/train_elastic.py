"""The measured training under `elastic run`, as its users would write it, plus stamps."""

import os
from pathlib import Path

import elastic
from tests.bench import turnstile, work
from tests.bench.stamps import Stamps

job = elastic.join(seed=work.SEED)
model, optimizer = work.build()
job.register(model=model, optimizer=optimizer)
batches = work.Batches()
stamps = Stamps(Path(os.environ["BENCH_STAMPS"]), job.worker_id)
gate = turnstile.enter(job.worker_id)

for step in job.steps(shards=work.SHARDS, total=turnstile.OPEN):
    began, world = job.generation, job.world_size
    gate.wait(step.index)
    for shard in step:
        loss = work.loss_of(model, batches.take(step.index, shard.index))
        loss.backward()
        step.log(loss=loss)
    optimizer.step()
    optimizer.zero_grad()
    stamps.write(step.index, began, job.generation, world, step.metrics["loss"])
