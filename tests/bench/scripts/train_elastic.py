"""The measured training under `elastic run`, as its users would write it, plus stamps.

BENCH_PIECE_KB: the size of the pieces in which slices travel. Beside the stamps stands how many bytes the ring sent.
"""

import os
from pathlib import Path

import elastic
from runtime.allreduce.reduction import over_mesh
from tests.bench import sent, turnstile, work
from tests.bench.stamps import Stamps

over_mesh.PIECE_BYTES = int(os.environ.get("BENCH_PIECE_KB", "1024")) << 10
job = elastic.join(seed=work.SEED)
model, optimizer = work.build()
job.register(model=model, optimizer=optimizer)
batches = work.Batches()
stamps = Stamps(Path(os.environ["BENCH_STAMPS"]), job.worker_id)
count = sent.Sent(Path(os.environ["BENCH_STAMPS"]), job.worker_id)
gate = turnstile.enter(job.worker_id)

for step in job.steps(shards=work.SHARDS, total=turnstile.OPEN):
    began, world = job.generation, job.world_size
    # The bench's own look: reading step.index here would bind a newcomer to this step.
    gate.wait(step._running.place.index)
    for shard in step:
        loss = work.loss_of(model, batches.take(step.index, shard.index))
        loss.backward()
        step.log(loss=loss)
    optimizer.step()
    optimizer.zero_grad()
    count.write()
    stamps.write(step.index, began, job.generation, world, step.metrics["loss"])
