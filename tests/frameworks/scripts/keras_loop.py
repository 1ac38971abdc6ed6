"""A model of Keras in a loop of torch, with KERAS_BACKEND=torch in the environment: `keras_loop.py [batchnorm]`."""

import os
import sys
import time
from pathlib import Path

import keras
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
keras.utils.set_random_seed(1)
layers = [keras.layers.Input((8,)), keras.layers.Dense(6, activation="relu"), keras.layers.LayerNormalization()]
if "batchnorm" in sys.argv:
    layers.append(keras.layers.BatchNormalization())
layers += [keras.layers.Dropout(0.3), keras.layers.Dense(2)]
model = DistributedDataParallel(keras.Sequential(layers))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
x = torch.randn(320, 8, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, (x.sum(1) > 0).long())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
pace = Path(os.environ["LIVE_GATES"]) / "pace"
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = loss_of(labels, model(inputs, training=True))
        loss.backward()
        optimizer.step()
        time.sleep(float(pace.read_text()) if pace.exists() else 0.0)
