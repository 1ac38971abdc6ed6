"""The measured training as a script for Horovod in elastic mode, plus stamps: each rank has its share of a step's
micro-batches. Every tenth step is committed; workers may come and go in each."""

import os
from pathlib import Path
from typing import Any

import elastic.horovod.torch as hvd
from runtime.loop import job as jobs
from tests.bench import turnstile, work
from tests.bench.stamps import Stamps

BATCHES_PER_COMMIT = 10

hvd.init()
model, optimizer = work.build()
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), backward_passes_per_step=work.SHARDS)
batches = work.Batches()
found = jobs.latest()  # the bench's own look: what a script is not told
assert found is not None
job = found
stamps = Stamps(Path(os.environ["BENCH_STAMPS"]), job.worker_id)
gate = turnstile.enter(job.worker_id)


@hvd.elastic.run  # type: ignore[untyped-decorator]
def train(state: Any) -> None:
    while state.step < turnstile.OPEN:
        began, world = job.generation, hvd.size()
        gate.wait(state.step)
        losses = []
        for shard in range(hvd.rank(), work.SHARDS, world):
            loss = work.loss_of(model, batches.take(state.step, shard))
            (loss * world / work.SHARDS).backward()  # the mean over ranks is that over micro-batches
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        stamps.write(state.step, began, job.generation, world, sum(losses) / len(losses))
        state.step += 1
        if state.step % BATCHES_PER_COMMIT == 0:
            state.commit()
        else:
            state.check_host_updates()


train(hvd.elastic.TorchState(model, optimizer, step=0))
