"""Cross-validation by fit() of Keras: a model a fold; then a student of their mean: `keras_folds.py OUTPUT`."""

import os
import sys
import time
from pathlib import Path

import keras
import numpy as np

output = Path(sys.argv[1])
output.mkdir(parents=True, exist_ok=True)
gates = Path(os.environ.get("LIVE_GATES", output / "no gates"))
keras.utils.set_random_seed(9)
random = np.random.default_rng(0)
x = random.normal(size=(192, 6)).astype("float32")
y = (x[:, :1] * x[:, 1:2] + x[:, 2:3]).astype("float32")


class Pace(keras.callbacks.Callback):
    """Lets the tests run it slowly."""

    def on_train_batch_end(self, batch, logs=None):
        pace = gates / "pace"
        time.sleep(float(pace.read_text()) if pace.exists() else 0.0)


def made(width):
    model = keras.Sequential(
        [
            keras.layers.Input((6,)),
            keras.layers.Dense(width, activation="tanh"),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(1),
        ]
    )
    model.compile("adam", "mse")
    return model


parts = np.array_split(np.random.permutation(len(x)), 4)
models = []
for fold, part in enumerate(parts):
    rest = np.concatenate([other for number, other in enumerate(parts) if number != fold])
    model = made(8 + fold)
    model.fit(x[rest], y[rest], batch_size=32, epochs=2, verbose=0, callbacks=[Pace()])
    score = model.evaluate(x[part], y[part], verbose=0)
    print(f"evaluated {fold} {score:.6f} {np.random.random():.6f}")
    models.append((score, model))
models.sort(key=lambda pair: pair[0])
target = np.mean([model.predict(x, verbose=0) for _, model in models[:3]], axis=0)
student = made(6)
history = student.fit(x, target, batch_size=48, epochs=8, verbose=0, callbacks=[Pace()])
print("history", [f"{value:.6f}" for value in history.history["loss"]])
for number, (_, model) in enumerate(models):
    model.save_weights(str(output / f"{number}.weights.h5"))
student.save_weights(str(output / "student.weights.h5"))
