"""What Lightning cannot do in place; each error is printed.

`lightning_refused.py [KIND]`: what is seen in a step only."""

import sys

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
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


class Validated(Module):
    def validation_step(self, batch, batch_idx):
        pass


class TakesItself(Module):
    def validation_step(self, dataloader_iter):
        next(dataloader_iter)


class WithBackbone(Module):
    def __init__(self):
        super().__init__()
        self.backbone = torch.nn.Linear(1, 1)


class Nothing(Module):
    def training_step(self, batch, batch_idx):
        return None


class Own(DDPStrategy):
    pass


StrategyRegistry.register("ddp_compressed", DDPStrategy, ddp_comm_hook=fp16_compress_hook)
StrategyRegistry.register("ddp_own", Own)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([torch.zeros(1)])


def loader(data=None, **options):
    return DataLoader(data or TensorDataset(torch.zeros(8, 1)), **options)


def train(module, data=None, **arguments):
    L.Trainer(max_epochs=1, **QUIET, **arguments).fit(module, loader() if data is None else data, loader())


IN_STEPS = {
    "gathers": lambda: train(Gathers()),
    "none": lambda: train(Nothing()),  # with several ranks Lightning refuses it by itself
    "none batch": lambda: train(Module(), loader(collate_fn=lambda samples: None)),
    "list": lambda: train(Module(), [loader()]),
}
"""Kind -> what is seen when a step is asked for, or computed. Behind it no fit() begins."""

for what in (
    (IN_STEPS[sys.argv[1]], lambda: train(Module()))
    if len(sys.argv) > 1
    else (
        lambda: train(Module(), strategy="fsdp"),
        lambda: train(Module(), sync_batchnorm=True),
        lambda: train(Module(automatic=False)),
        lambda: train(Module(optimizers=2, automatic=False)),
        lambda: train(Module(), DataLoader(Stream())),
        lambda: train(Module(), callbacks=[L.pytorch.callbacks.GradientAccumulationScheduler({0: 2})]),
        lambda: train(Module(), callbacks=[L.pytorch.callbacks.StochasticWeightAveraging(swa_lrs=0.1)]),
        lambda: train(WithBackbone(), callbacks=[L.pytorch.callbacks.BackboneFinetuning()]),
        lambda: train(Module(), strategy=DDPStrategy(ddp_comm_hook=fp16_compress_hook)),
        lambda: train(Module(), strategy="ddp_compressed"),
        lambda: train(Module(), strategy="ddp_own"),
        lambda: train(Module(), strategy=DDPStrategy(model_averaging_period=4)),
        lambda: L.Trainer(**QUIET).validate(Validated(), CombinedLoader({"a": loader(), "b": loader()}, "max_size")),
        lambda: L.Trainer(**QUIET).validate(TakesItself(), loader()),
        lambda: train(Module(), loader(batch_size=None)),
        lambda: Tuner(L.Trainer(**QUIET)).lr_find(Module(), loader()),
        lambda: train(Validated(), val_check_interval={"seconds": 2}),
        lambda: train(Validated(), val_check_interval=3, accumulate_grad_batches=2),
        lambda: train(Validated(), val_check_interval=2, accumulate_grad_batches=3, check_val_every_n_epoch=None),
    )
):
    try:
        what()
    except ConfigError as error:
        print("refused:", error, flush=True)
