"""A language model by Keras on torch, plus stamps: by fit() under `elastic run --ranks`; under torchrun, as fit() has
no data parallelism there, by the loop with DistributedDataParallel of Keras's guide. Model, optimizer and the number
of samples a rank are the same."""

import os
from pathlib import Path

os.environ["KERAS_BACKEND"] = "torch"
import keras
import numpy as np
import torch

from tests.bench import turnstile
from tests.bench.stamps import Stamps

BATCH = 4
"""Sequences a rank."""


class Words(keras.utils.PyDataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        return words(index, BATCH * int(os.environ["WORLD_SIZE"]))


def words(index, count):
    drawn = np.random.default_rng(index).integers(0, 1000, (count, 65))
    return drawn[:, :-1], drawn[:, 1:]


def transformer():
    inputs = keras.layers.Input((64,), dtype="int32")
    hidden = keras.layers.Embedding(1000, 256)(inputs)
    for _ in range(4):
        normal = keras.layers.LayerNormalization()(hidden)
        hidden = hidden + keras.layers.MultiHeadAttention(4, 64)(normal, normal, use_causal_mask=True)
        normal = keras.layers.LayerNormalization()(hidden)
        hidden = hidden + keras.layers.Dense(256)(keras.layers.Dense(1024, activation="gelu")(normal))
    return keras.Model(inputs, keras.layers.Dense(1000)(hidden))


class Turns(keras.callbacks.Callback):
    """One block of steps at a time."""

    def on_train_batch_begin(self, batch, logs=None):
        gate.wait(batch)

    def on_train_batch_end(self, batch, logs=None):
        stamps.write(batch, 0, 0, int(os.environ["WORLD_SIZE"]), 0.0)


def in_a_loop(model, loss_of, optimizer):
    torch.distributed.init_process_group("gloo")
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer.build(model.trainable_variables)
    turns = Turns()
    for step in range(turnstile.OPEN):
        turns.on_train_batch_begin(step)
        x, y = map(torch.from_numpy, words(step * 2 + torch.distributed.get_rank(), BATCH))
        parallel.zero_grad()
        loss = loss_of(y, parallel(x))
        loss.backward()
        weights = model.trainable_weights[:]
        with torch.no_grad():
            optimizer.apply([weight.value.grad for weight in weights], weights)
        turns.on_train_batch_end(step)


torch.set_num_threads(1)
keras.utils.set_random_seed(0)
name = os.environ.get("ELASTIC_WORKER_ID") or f"rank{os.environ['RANK']}-{os.getpid()}"
stamps = Stamps(Path(os.environ["BENCH_STAMPS"]), name)
gate = turnstile.enter(name)
model = transformer()
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = keras.optimizers.AdamW(5e-5, global_clipnorm=1.0)
if "ELASTIC_WORKER_ID" in os.environ:
    model.compile(optimizer, loss=loss_of)
    model.fit(Words(), epochs=1, verbose=0, callbacks=[Turns()])
else:
    in_a_loop(model, loss_of, optimizer)
