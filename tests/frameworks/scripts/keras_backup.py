"""fit() of Keras over a generator that draws its batches at random, with BackupAndRestore: a run that is started again
goes on from the last backup. `keras_backup.py OUTPUT`."""

import os
import sys
import time
from pathlib import Path

import keras
import numpy as np

output = Path(sys.argv[1])
output.mkdir(parents=True, exist_ok=True)
keras.utils.set_random_seed(5)


def batches():
    """30 batches, which are six epochs."""
    for number in range(30):
        x = np.random.normal(size=(16, 4)).astype("float32")
        yield x, x.sum(axis=1, keepdims=True) + number / 30


class Pace(keras.callbacks.Callback):
    """Lets the tests run it slowly."""

    def on_train_batch_end(self, batch, logs=None):
        pace = Path(os.environ["LIVE_GATES"]) / "pace" if "LIVE_GATES" in os.environ else None
        time.sleep(float(pace.read_text()) if pace is not None and pace.exists() else 0.0)


model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(0.01), loss="mse")
model.fit(
    batches(),
    steps_per_epoch=5,
    epochs=6,
    verbose=0,
    callbacks=[Pace(), keras.callbacks.BackupAndRestore(str(output / "backup"), delete_checkpoint=False)],
)
model.save_weights(str(output / "last.weights.h5"))
