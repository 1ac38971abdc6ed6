"""The measured training with rare communication as this project's users write it: DiLoCo, plus stamps.

BENCH_QUORUM: how many replicas a round waits for; 0: for all, without a quorum. BENCH_DELAY: of the DiLoCo. In a
stamp `began` says how many inner steps of all replicas are in the round.
"""

import os
from pathlib import Path

import elastic
from tests.bench import outer_work as work
from tests.bench import turnstile
from tests.bench.stamps import Shards, Stamps

QUORUM, GRACE_S = int(os.environ["BENCH_QUORUM"]), 1.0
DELAY = int(os.environ["BENCH_DELAY"])

job = elastic.join(seed=int(os.environ["BENCH_SEED"]))
model, inner, outer_optimizer = work.build()
outer = elastic.DiLoCo(model, inner, outer_optimizer, every=work.INNER_STEPS, delay=DELAY)
if QUORUM:
    outer.with_quorum(QUORUM, GRACE_S)
text, held_out = work.texts()
train = job.loader(text, work.SEQUENCES * work.REPLICAS, shards=work.REPLICAS, shuffle=True)
job.register(model=model, optimizer=inner, outer=outer)
stamps = Stamps(Path(os.environ["BENCH_STAMPS"]), job.worker_id)
computed = Shards(Path(os.environ["BENCH_STAMPS"]), job.worker_id)
pace = work.Pace()
gate = turnstile.enter(job.worker_id)

for step in job.steps(train, total=turnstile.OPEN, outer=outer):
    for x, y in step:
        pace.begin()
        loss = work.backward(model, x, y)
        pace.wait()
        inner.step()
        inner.zero_grad()
        computed.write(step.index, step.inner_index)
        step.log(loss=loss)
    counted = int(step.metrics.get("elastic.inner_steps", work.REPLICAS * work.INNER_STEPS))
    stamps.write(step.index, counted, job.generation, job.world_size, step.metrics["loss"])
    if (step.index + 1) % work.MARK_ROUNDS == 0:
        held = job.evaluate(lambda x, y: {"loss": work.loss_of(model, x, y)}, held_out)
        work.Mark(step.index + 1, held["loss"], job.digest()).write(job.worker_id)
gate.close()
