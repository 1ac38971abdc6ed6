"""Transfer learning with two fit() of Keras, which stops early, evaluates and decides between them:
`keras_transfer.py OUTPUT`."""

import os
import sys
import time
from pathlib import Path

import keras
import numpy as np

output = Path(sys.argv[1])
output.mkdir(parents=True, exist_ok=True)
gates = Path(os.environ.get("LIVE_GATES", output / "no gates"))
keras.utils.set_random_seed(5)
random = np.random.default_rng(0)
x = random.normal(size=(220, 8)).astype("float32")
y = (x.sum(1) > 0).astype("int64") + (x[:, 0] > 1)


class Pace(keras.callbacks.Callback):
    """Lets the tests run it slowly."""

    def on_train_batch_end(self, batch, logs=None):
        pace = gates / "pace"
        time.sleep(float(pace.read_text()) if pace.exists() else 0.0)


class Shuffled(keras.utils.PyDataset):
    """Shuffles itself when an epoch ends, and goes on from there in the next fit()."""

    def __init__(self):
        super().__init__()
        self.order = np.arange(160)

    def __len__(self):
        return 5

    def __getitem__(self, number):
        part = self.order[32 * number : 32 * (number + 1)]
        return x[part], y[part]

    def on_epoch_end(self):
        np.random.shuffle(self.order)


def hold():
    """Lets the tests stop it between two loops."""
    if (gates / "between").exists():
        (gates / f"between.{os.environ['ELASTIC_WORKER_ID']}").touch()
        while (gates / "between").exists():
            time.sleep(0.01)


def loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


base = keras.Sequential(
    [keras.layers.Input((8,)), keras.layers.Dense(12, activation="relu"), keras.layers.BatchNormalization()]
)
base.trainable = False
model = keras.Sequential([keras.layers.Input((8,)), base, keras.layers.Dropout(0.2), keras.layers.Dense(3)])
model.compile(keras.optimizers.Adam(5e-2), loss=loss(), metrics=["accuracy"])
data, validation = Shuffled(), (x[160:], y[160:])
first = model.fit(
    data,
    epochs=9,
    verbose=0,
    validation_data=validation,
    callbacks=[
        Pace(),
        keras.callbacks.EarlyStopping("val_loss", patience=1, min_delta=0.1, restore_best_weights=True),
        keras.callbacks.CSVLogger(str(output / "log.csv")),
    ],
)
epochs = len(first.epoch)
print("history 1", {name: [round(float(value), 6) for value in values] for name, values in first.history.items()})
hold()
figures = model.evaluate(*validation, verbose=0, return_dict=True)
print("evaluated 1", epochs, model.stop_training, {name: round(value, 6) for name, value in figures.items()})
model.save(str(output / "first.keras"))
keras.saving.save_model(model, str(output / "saved.keras"))
rate = float(model.optimizer.learning_rate) / (10 + round(100 * figures["accuracy"]))  # bits of the first loop
base.trainable = True
model.compile(keras.optimizers.Adam(rate), loss=loss(), metrics=["accuracy"])
second = model.fit(
    data,
    initial_epoch=epochs,
    epochs=epochs + 6,
    verbose=0,
    validation_data=validation,
    callbacks=[Pace(), keras.callbacks.CSVLogger(str(output / "log.csv"), append=True)],
)
print("history 2", {name: [round(float(value), 6) for value in values] for name, values in second.history.items()})
third = model.fit(data, epochs=6, verbose=0, callbacks=[Pace()])  # not compiled again: the same optimizer
print("history 3", {name: [round(float(value), 6) for value in values] for name, values in third.history.items()})
figures = model.evaluate(*validation, verbose=0, return_dict=True)
print("evaluated 3", int(model.optimizer.iterations), {name: round(value, 6) for name, value in figures.items()})
model.save_weights(str(output / "last.weights.h5"))
