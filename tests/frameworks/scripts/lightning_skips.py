"""What a LightningModule and its hooks may do besides: end epochs early, train on a part of the data, and keep numbers
in attributes in every way. `lightning_skips.py OUTPUT_DIR`."""

import os
import sys
import time
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.last_loss, self.worst, self.kept = float("inf"), None, None
        self.held, self.first = torch.zeros(()), True

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 4 + self.current_epoch % 3 else None

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.layer(batch[0]).squeeze(1), batch[1])
        self.last_loss = loss
        self.worst = float(loss)
        self.made_here, self.first = loss.detach().double(), False
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert self.made_here.dtype == torch.float64 and not self.first
        self.held = self.layer.weight.sum() * 2  # with its graph
        self.log_dict({"last": self.last_loss, "worst": self.worst, "made": self.made_here, "held": self.held.detach()})

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)]


class Nap(Callback):
    """Counts the batches that were begun, and those that were trained."""

    def __init__(self):
        self.begun = self.trained = 0

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.begun += 1

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.trained += 1
        assert self.trained == trainer.global_step * trainer.accumulate_grad_batches
        assert self.begun == self.trained + trainer.current_epoch, "one of each epoch was not trained"
        time.sleep(pace())


def pace():
    """Seconds that a step takes at least, which a test sets while the job runs."""
    file = Path(os.environ.get("LIVE_GATES", "")) / "pace"
    return float(file.read_text()) if file.is_file() else 0.0


L.seed_everything(5)
points = torch.randn(320, 4)
data = TensorDataset(points, points.sum(1) + 0.1 * torch.randn(320))
module, nap = Regression(), Nap()
trainer = L.Trainer(
    accelerator="cpu",
    devices=4,
    strategy="ddp",
    max_epochs=20,
    limit_train_batches=0.5,
    logger=CSVLogger(sys.argv[1], name="logs"),
    callbacks=[ModelCheckpoint(dirpath=f"{sys.argv[1]}/each", save_top_k=-1), nap],
    log_every_n_steps=1,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, DataLoader(data, batch_size=4, shuffle=True))
assert trainer.num_training_batches == 10, "half of the 20 batches of a rank"
assert nap.trained == trainer.global_step == sum(4 + epoch % 3 for epoch in range(20)), nap.trained
