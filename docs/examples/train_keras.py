"""A classifier by Keras's fit() on torch: `KERAS_BACKEND=torch elastic run --workers 3 --ranks 4 train_keras.py`.

There is nothing of elastic-ring in it. Arguments: the directory for its files (default: keras-output).
"""

import sys
from pathlib import Path

import keras
import numpy as np

output = Path(sys.argv[1] if len(sys.argv) > 1 else "keras-output")
output.mkdir(parents=True, exist_ok=True)
keras.utils.set_random_seed(0)
random = np.random.default_rng(0)
images = random.normal(size=(5000, 16, 16, 1)).astype("float32")
labels = random.integers(0, 10, 5000)
images[np.arange(5000), labels, labels] += 4  # one bright point says what it is

model = keras.Sequential(
    [
        keras.layers.Input((16, 16, 1)),
        keras.layers.Conv2D(16, 3, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(10),
    ]
)
model.compile(
    keras.optimizers.Adam(1e-3, global_clipnorm=1.0),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
model.fit(
    images,
    labels,
    batch_size=128,
    epochs=12,
    validation_split=0.2,
    verbose=2,
    callbacks=[
        keras.callbacks.EarlyStopping(monitor="val_loss", patience=3, restore_best_weights=True),
        keras.callbacks.ModelCheckpoint(str(output / "best.weights.h5"), save_best_only=True, save_weights_only=True),
        keras.callbacks.CSVLogger(str(output / "log.csv")),
    ],
)
model.save(str(output / "model.keras"))
