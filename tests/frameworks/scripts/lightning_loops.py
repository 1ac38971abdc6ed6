"""Several fit() of Lightning: one Trainer for the head, which stops early, another one for all of the model at a rate
that follows from the first one; evaluations between them. `lightning_loops.py OUTPUT_DIR`."""

import os
import sys
import time
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.base, self.head = nn.Linear(6, 16), nn.Sequential(nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 2))
        self.rate, self.accuracy = 5e-2, MulticlassAccuracy(2)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.head(self.base(x)), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self.head(self.base(x))
        self.accuracy(logits, y)
        self.log("val_loss", nn.functional.cross_entropy(logits, y), sync_dist=True)
        self.log("val_accuracy", self.accuracy)

    def configure_optimizers(self):
        return torch.optim.AdamW([weight for weight in self.parameters() if weight.requires_grad], lr=self.rate)


class Pace(Callback):
    """Lets the tests run it slowly."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        file = Path(os.environ.get("LIVE_GATES", "")) / "pace"
        time.sleep(float(file.read_text()) if file.is_file() else 0.0)


def loader(samples, seed, **more):
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(samples, 6, generator=generator)
    return DataLoader(TensorDataset(points, (points[:, 0] * points[:, 1] > 0).long()), batch_size=4, **more)


def made(epochs, *callbacks):
    return L.Trainer(
        accelerator="cpu",
        devices=4,
        strategy="ddp",
        max_epochs=epochs,
        logger=CSVLogger(sys.argv[1], name="logs"),
        callbacks=[ModelCheckpoint(monitor="val_loss", filename="{epoch}-{val_loss:.3f}"), Pace(), *callbacks],
        log_every_n_steps=3,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


L.seed_everything(1)
module, data, held = Classifier(), loader(96, 0, shuffle=True), loader(45, 1)
module.base.requires_grad_(False)
first = made(4, EarlyStopping("val_loss", patience=1, min_delta=0.01))
first.fit(module, data, held)
print(
    "fitted 1", first.global_step, first.current_epoch, f"{float(first.callback_metrics['val_loss']):.6f}", flush=True
)
(figures,) = first.validate(module, held, verbose=False)
print("evaluated 1", {name: round(value, 6) for name, value in sorted(figures.items())}, flush=True)
module.base.requires_grad_(True)
module.rate = 1e-3 * (1 + figures["val_loss"])  # bits of the first loop
second = made(4)
second.fit(module, data, held)
print("fitted 2", second.global_step, f"{float(second.callback_metrics['train_loss_epoch']):.6f}", flush=True)
second.fit_loop.max_epochs = 12
second.fit(module, data, held)  # the same Trainer goes on
print("fitted 3", second.global_step, f"{float(second.callback_metrics['train_loss_epoch']):.6f}", flush=True)
second.validate(module, held, ckpt_path="best", verbose=False)
second.save_checkpoint(str(Path(sys.argv[1]) / "last.ckpt"))
