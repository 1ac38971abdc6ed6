"""fit() without random numbers in the model, by Adam, with a metric of each kind; prints the loss of each step and the
figures of the epoch."""

import keras
import numpy as np

keras.utils.set_random_seed(9)
random = np.random.default_rng(2)
x = random.normal(size=(500, 6)).astype("float32")
y = (x[:, :2].sum(1) > 0).astype("float32")[:, None]
model = keras.Sequential(
    [
        keras.layers.Input((6,)),
        keras.layers.Dense(16, activation="tanh", kernel_regularizer="l2"),
        keras.layers.LayerNormalization(),
        keras.layers.Dense(1, activation="sigmoid"),
    ]
)
model.compile(
    keras.optimizers.Adam(3e-3),
    loss="binary_crossentropy",
    metrics=["accuracy", keras.metrics.AUC(name="auc"), keras.metrics.Precision(name="precision")],
)
losses = []
steps = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: losses.append(logs["loss"]))
# 8 of 10 steps an epoch have 51 samples, which 4 ranks do not divide
history = model.fit(x, y, batch_size=51, epochs=5, shuffle=False, verbose=0, callbacks=[steps], validation_data=(x, y))
figures = {name: values[-1] for name, values in history.history.items() if not name.endswith("loss")}
said = {**{f"step{number}": loss for number, loss in enumerate(losses)}, **figures}
print("history", *(f"{name}={value:.9f}" for name, value in said.items()))
