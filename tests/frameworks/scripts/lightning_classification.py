"""A classifier by Lightning, as one would write it for DDP: a data module, checkpoints of the best epochs, early
stopping and metrics of torchmetrics. `lightning_classification.py OUTPUT_DIR`."""

import os
import sys
import time
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics.classification import MulticlassAccuracy


class Points(L.LightningDataModule):
    def setup(self, stage):
        self.train, self.held = self.made(160, 0), self.made(int(os.environ.get("EVALUATED", "77")), 1)

    @staticmethod
    def made(samples, seed):
        generator = torch.Generator().manual_seed(seed)
        points = torch.randn(samples, 6, generator=generator)
        noise = 0.8 * torch.randn(samples, generator=generator)
        return TensorDataset(points, (points[:, 0] * points[:, 1] + noise > 0).long())

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=4, sampler=DistributedSampler(self.train, seed=1))

    def val_dataloader(self):
        return DataLoader(self.held, batch_size=8)

    def test_dataloader(self):
        return DataLoader(self.held, batch_size=8)


class Classifier(L.LightningModule):
    def __init__(self, width=16):
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 2))
        self.train_accuracy, self.accuracy = MulticlassAccuracy(2), MulticlassAccuracy(2)
        self.epoch_losses, self.epochs, self.seen = [], [], 0

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.body(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.train_accuracy(logits, y)
        self.seen += 1
        self.epoch_losses.append(loss.detach())
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self):
        assert len(self.epoch_losses) == 10, "one loss for each step"
        self.epochs.append(float(torch.stack([torch.as_tensor(loss) for loss in self.epoch_losses]).mean()))
        self.epoch_losses.clear()
        self.log("mean_of_losses", self.epochs[-1])
        self.log("steps_seen", float(self.seen))

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self.body(x)
        self.accuracy(logits, y)
        self.log("val_loss", nn.functional.cross_entropy(logits, y), sync_dist=True)
        self.log("val_accuracy", self.accuracy)

    test_step = validation_step

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-2)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class Nap(Callback):
    """Counts steps in an attribute of its own."""

    def __init__(self):
        self.steps = 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.steps += 1
        assert self.steps == trainer.global_step
        time.sleep(pace())


def pace():
    """Seconds that a step takes at least, which a test sets while the job runs."""
    file = Path(os.environ.get("LIVE_GATES", "")) / "pace"
    return float(file.read_text()) if file.is_file() else 0.0


L.seed_everything(1)
trainer = L.Trainer(
    accelerator="cpu",
    devices=4,
    strategy="ddp",
    max_epochs=int(os.environ.get("EPOCHS", "12")),
    logger=CSVLogger(sys.argv[1], name="logs"),
    callbacks=[
        ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}-{val_loss:.3f}"),
        EarlyStopping("val_loss", patience=3),
        Nap(),
    ],
    log_every_n_steps=3,
    enable_progress_bar=False,
    enable_model_summary=False,
)
data = Points()
trainer.fit(Classifier(), datamodule=data)
trainer.test(datamodule=data, ckpt_path="best")
