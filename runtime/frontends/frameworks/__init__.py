"""Training loops of frameworks, in place: scripts for transformers.Trainer or Lightning, with `elastic run --ranks`.

A framework's batch is a *handle*: one optimizer step, without data. The adapter runs the framework's own closure once
for each rank that this worker computes; behind it the gradients of all ranks are in place, and the framework clips,
steps, logs and calls its callbacks once. So no frame of the script is run twice, and read-ahead does no harm. What the
framework keeps between steps is registered, for newcomers and for runs that go on.

    step_loop.py                the job's steps: handed out, computed shard by shard, ended
    rank_batches.py             the batches that accelerate, or a DistributedSampler, gives any rank
    own_generators.py           random numbers of samplers, collators and datasets that have a generator of their own
    plain_state.py              what a framework keeps between steps
    trackers/                   what was logged, for the next leader: files of TensorBoard, runs of MLflow and W&B
    hugging_face.py             transformers.Trainer
    hugging_face_evaluation.py  its evaluations, spread over the workers
    trainer_callbacks.py        the state of its callbacks, by the names of their classes
    long_tensors.py             modules and long tensors that callbacks keep, for newcomers and checkpoints
    trainer_attributes.py       what a user's compute_loss() does to its attributes, had on every worker
    trainer_averages.py         averages of the weights that it changes, which are refused
    trainer_notes.py            what trainers log, and trl's collect, while they compute a loss
    accelerate.py               scripts with a loop of their own over what Accelerator.prepare() gives
    accelerate_batches.py       the batches of a prepared DataLoader, and the training loop over them
    lightning/                  Lightning's Trainer and Fabric
    keras/                      fit() of Keras on torch
    imports.py                  adapts a framework when the script imports it
"""
