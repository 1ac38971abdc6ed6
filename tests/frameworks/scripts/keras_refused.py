"""What fit() of Keras cannot do in place, one after the other: `keras_refused.py changed|twice|never`."""

import sys

import keras
import numpy as np

x, y = np.zeros((8, 2), "float32"), np.zeros((8, 1), "float32")


class Twice(keras.Model):
    def __init__(self, way):
        super().__init__()
        self.way, self.dense = way, keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        self.zero_grad()
        self(data[0]).sum().backward()
        weights = list(self.trainable_weights)
        gradients = [weight.value.grad for weight in weights]
        if self.way == "changed":
            gradients = [gradient * 2 for gradient in gradients]
        for _ in range({"changed": 1, "twice": 2, "never": 0}[self.way]):
            self.optimizer.apply(gradients, weights)
        return {}


def model(**compiled):
    made = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    made.compile("sgd", "mse", **compiled)
    return made


def summed():
    made = model()
    made.compile("sgd", keras.losses.MeanSquaredError(reduction="sum"))
    return made


def own(way):
    made = Twice(way)
    made.compile("sgd", "mse")
    return made


def frozen():
    made = model()
    made.trainable = False
    return made


for make in (lambda: model(steps_per_execution=2), summed, frozen, lambda: own(sys.argv[1]), model):
    try:
        make().fit(x, y, verbose=0)
    except Exception as error:
        print("refused:", error, flush=True)
try:
    model().train_on_batch(x, y)
except Exception as error:
    print("refused:", error, flush=True)
raise SystemExit(1)
