"""A language model by fit() of Keras, with a train_step() of its own, over a PyDataset that shuffles itself when an
epoch ends: `keras_language_model.py OUTPUT`."""

import os
import sys
import time
from pathlib import Path

import keras
import numpy as np

output = Path(sys.argv[1])
output.mkdir(parents=True, exist_ok=True)
keras.utils.set_random_seed(5)


class Text(keras.utils.PyDataset):
    """210 windows over a text: the last batch of 16 has 2, which are fewer than ranks."""

    def __init__(self):
        super().__init__()
        self.random = np.random.default_rng(1)
        text = (np.cumsum(self.random.integers(0, 3, 4000)) * 7) % 29
        self.windows = np.lib.stride_tricks.sliding_window_view(text, 17)[::19]
        self.order = np.arange(len(self.windows))

    def __len__(self):
        return -(-len(self.order) // 16)

    def __getitem__(self, index):
        rows = self.windows[self.order[index * 16 : (index + 1) * 16]]
        return rows[:, :-1], rows[:, 1:]

    def on_epoch_end(self):
        self.random.shuffle(self.order)


class Model(keras.Model):
    def __init__(self):
        super().__init__()
        self.embedding = keras.layers.Embedding(29, 16)
        self.attention = keras.layers.MultiHeadAttention(2, 8, dropout=0.1)
        self.norm = keras.layers.LayerNormalization()
        self.head = keras.layers.Dense(29)

    def call(self, x, training=False):
        hidden = self.embedding(x)
        hidden = self.norm(hidden + self.attention(hidden, hidden, use_causal_mask=True, training=training))
        return self.head(keras.random.dropout(hidden, 0.1) if training else hidden)

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        logits = self(x, training=True)
        loss = self.compute_loss(x=x, y=y, y_pred=logits)
        loss.backward()
        weights = list(self.trainable_weights)
        self.optimizer.apply([weight.value.grad for weight in weights], weights)
        for metric in self.metrics:
            metric.update_state(loss) if metric.name == "loss" else metric.update_state(y, logits)
        return {**{metric.name: metric.result() for metric in self.metrics}, "largest": logits.abs().max()}


class Pace(keras.callbacks.Callback):
    """Lets the tests run it slowly."""

    def on_train_batch_end(self, batch, logs=None):
        pace = Path(os.environ["LIVE_GATES"]) / "pace" if "LIVE_GATES" in os.environ else None
        time.sleep(float(pace.read_text()) if pace is not None and pace.exists() else 0.0)


schedule = keras.optimizers.schedules.CosineDecay(1e-2, 40, warmup_target=2e-2, warmup_steps=5)
model = Model()
model.compile(
    keras.optimizers.AdamW(schedule, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=None),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
)
model.fit(
    Text(),
    epochs=4,
    verbose=0,
    callbacks=[
        Pace(),
        keras.callbacks.CSVLogger(str(output / "log.csv")),
        keras.callbacks.BackupAndRestore(str(output / "backup"), delete_checkpoint=False),
        keras.callbacks.ModelCheckpoint(str(output / "epoch{epoch}.weights.h5"), save_weights_only=True),
    ],
)
