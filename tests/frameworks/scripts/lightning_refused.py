"""What Lightning cannot do in place; each error is printed."""

import lightning as L
import torch
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from elastic.errors import ConfigError

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


class Module(L.LightningModule):
    def __init__(self, optimizers=1, automatic=True):
        super().__init__()
        self.layer, self.number, self.automatic_optimization = torch.nn.Linear(1, 1), optimizers, automatic

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).sum()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(self.number)]


class Gathers(Module):
    def training_step(self, batch, batch_idx):
        return self.all_gather(self.layer(batch[0])).sum()


class Stream(IterableDataset):
    def __iter__(self):
        return iter([torch.zeros(1)])


def train(module, data=None, **arguments):
    data = data or TensorDataset(torch.zeros(8, 1))
    L.Trainer(max_epochs=1, **QUIET, **arguments).fit(module, DataLoader(data))


for what in (
    lambda: train(Module(), strategy="fsdp"),
    lambda: train(Module(), sync_batchnorm=True),
    lambda: train(Module(automatic=False)),
    lambda: train(Module(optimizers=2, automatic=False)),
    lambda: train(Module(), Stream()),
    lambda: train(Module(), callbacks=[L.pytorch.callbacks.GradientAccumulationScheduler({0: 2})]),
    lambda: train(Gathers()),
    lambda: Tuner(L.Trainer(**QUIET)).lr_find(Module(), DataLoader(TensorDataset(torch.zeros(8, 1)))),
):
    try:
        what()
    except ConfigError as error:
        print("refused:", error, flush=True)
