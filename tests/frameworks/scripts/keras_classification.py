"""A classifier by fit() of Keras, as it is written for one process: `keras_classification.py OUTPUT`."""

import os
import sys
import time
from pathlib import Path

import keras
import numpy as np

output = Path(sys.argv[1])
output.mkdir(parents=True, exist_ok=True)
keras.utils.set_random_seed(3)
random = np.random.default_rng(0)
x = random.normal(size=(330, 8)).astype("float32")
y = (x.sum(1) > 0).astype("int64") + (x[:, 0] > 1)


class Pace(keras.callbacks.Callback):
    """Lets the tests run it slowly."""

    def on_train_batch_end(self, batch, logs=None):
        pace = Path(os.environ["LIVE_GATES"]) / "pace" if "LIVE_GATES" in os.environ else None
        time.sleep(float(pace.read_text()) if pace is not None and pace.exists() else 0.0)

    def on_epoch_end(self, epoch, logs=None):
        print(f"epoch {epoch} " + " ".join(f"{name}={value:.6f}" for name, value in sorted(logs.items())), flush=True)


model = keras.Sequential(
    [
        keras.layers.Input((8,)),
        keras.layers.Dense(16, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.3 if "nodropout" not in sys.argv else 0.0),
        keras.layers.Dense(3),
    ]
)
model.compile(
    optimizer=keras.optimizers.Adam(1e-2, global_clipnorm=1.0),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top2")],
)
history = model.fit(
    x,
    y,
    batch_size=32,
    epochs=6,
    validation_split=0.2,
    verbose=2,
    callbacks=[
        Pace(),
        keras.callbacks.EarlyStopping(monitor="val_loss", patience=3, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=1, min_delta=0.02),
        keras.callbacks.ModelCheckpoint(str(output / "best.weights.h5"), save_best_only=True, save_weights_only=True),
        keras.callbacks.CSVLogger(str(output / "log.csv")),
    ],
)
print("history", {name: [round(float(value), 6) for value in values] for name, values in history.history.items()})
model.save(str(output / "final.keras"))
