"""Fine-tuning by fit() of Keras: a part of the model is frozen, gradients of two batches are accumulated, batches come
from a DataLoader of torch, EarlyStopping puts the best weights back: `keras_fine_tuning.py OUTPUT`."""

import os
import sys
import time
from pathlib import Path

import keras
import numpy as np
import torch

output = Path(sys.argv[1])
output.mkdir(parents=True, exist_ok=True)
keras.utils.set_random_seed(7)


class Images(torch.utils.data.Dataset):
    def __init__(self, count, seed):
        random = np.random.default_rng(seed)
        self.labels = random.integers(0, 4, count)
        self.images = random.normal(size=(count, 8, 8, 1)).astype("float32")
        self.images[np.arange(count), self.labels, self.labels] += 3

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index] + np.random.normal(scale=0.1, size=(8, 8, 1)).astype("float32"), self.labels[index]


class Pace(keras.callbacks.Callback):
    """Lets the tests run it slowly."""

    def on_train_batch_end(self, batch, logs=None):
        pace = Path(os.environ["LIVE_GATES"]) / "pace" if "LIVE_GATES" in os.environ else None
        time.sleep(float(pace.read_text()) if pace is not None and pace.exists() else 0.0)


base = keras.Sequential(
    [
        keras.layers.Input((8, 8, 1)),
        keras.layers.Conv2D(8, 3, padding="same", activation="relu"),
        keras.layers.BatchNormalization(),
    ],
    name="base",
)
base.trainable = False
inputs = keras.layers.Input((8, 8, 1))
hidden = keras.layers.RandomFlip(seed=2)(inputs)
hidden = keras.layers.GlobalAveragePooling2D()(keras.layers.Conv2D(8, 3)(base(hidden)))
model = keras.Model(inputs, [keras.layers.Dense(4, name="label", kernel_regularizer="l2")(hidden)])
model.compile(
    keras.optimizers.SGD(0.3, momentum=0.9, gradient_accumulation_steps=2),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
loader = torch.utils.data.DataLoader(Images(150, 1), batch_size=16, shuffle=True, drop_last=True)
model.fit(
    loader,
    epochs=6,
    verbose=0,
    validation_data=(Images(60, 2).images, Images(60, 2).labels),
    class_weight={0: 1.0, 1: 2.0, 2: 1.0, 3: 0.5} if "class_weight" in sys.argv else None,
    callbacks=[
        Pace(),
        keras.callbacks.EarlyStopping("val_loss", patience=1, min_delta=0.01, restore_best_weights=True),
        keras.callbacks.CSVLogger(str(output / "log.csv")),
    ],
)
figures = model.evaluate(Images(60, 2).images, Images(60, 2).labels, verbose=0, return_dict=True)
print("evaluated", {name: round(value, 6) for name, value in figures.items()})
model.save_weights(str(output / "last.weights.h5"))
