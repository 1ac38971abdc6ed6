"""Training loops of frameworks, in place: scripts that call transformers.Trainer, under `elastic run --ranks N`.

A framework's batch is a *handle*: one optimizer step, without data. The adapter runs the framework's own closure once
for each rank that this worker computes; behind it the gradients of all ranks are in place, and the framework clips,
steps, logs and calls its callbacks once. So no frame of the script is run twice, and read-ahead does no harm. What the
framework keeps between steps is registered, for newcomers and for runs that go on.

    step_loop.py                the job's steps: handed out, computed shard by shard, ended
    rank_batches.py             the batches of a loader that accelerate has prepared, for any rank
    plain_state.py              what a framework keeps between steps
    hugging_face.py             transformers.Trainer
    hugging_face_evaluation.py  its evaluations, spread over the workers
    trl_metrics.py              what trl's trainers note while they compute a loss
    imports.py                  adapts a framework when the script imports it
"""
